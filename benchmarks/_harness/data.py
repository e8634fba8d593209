"""Load the images of the benchmarks: random ones by default, CIFAR-10 from a file.

Timings do not depend on the content of the images. The file is an .npz of JPEGs (see
`benchmarks/README.md`). It is decoded once, into the user's cache folder outside the repository.
"""

import io
import os
from pathlib import Path

import numpy as np
import torch
from joblib import Memory
from torch import Tensor


def cache_folder() -> Path:
    """Return the folder of what benchmarks keep from run to run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relflat_sk"


def load_images(n: int, path: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """Load images (n, 3, 32, 32), each channel with mean 0 and deviation 1, and their classes."""
    if path is None:
        return _random_images(n)
    stat = Path(path).stat()
    decode = Memory(cache_folder(), verbose=0).cache(_decode)
    images, classes = decode(Path(path).resolve(), (stat.st_size, stat.st_mtime_ns))
    if n > len(images):
        raise ValueError(f"{path} has {len(images)} images, but {n} are asked for.")
    X = torch.from_numpy(images[:n].transpose(0, 3, 1, 2).astype(np.float32))
    X.sub_(X.mean(dim=(0, 2, 3), keepdim=True)).div_(X.std(dim=(0, 2, 3), keepdim=True))
    return X, torch.from_numpy(classes[:n].astype(np.int64))


def _random_images(n: int) -> tuple[Tensor, Tensor]:
    """Draw one pattern per class and add noise, so that a network can learn the classes."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (n,), generator=generator)
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    X = torch.randn(n, 3, 32, 32, generator=generator)
    for rows in torch.arange(n).split(1024):  # in parts: no second array of this size
        X[rows] += 0.2 * patterns[y[rows]]
    return X, y


def _decode(
    path: Path,
    version: tuple[int, int],  # size and time of the file: another one is decoded anew
) -> tuple[np.ndarray, np.ndarray]:
    """Decode the images of the file, those of the training set first."""
    from PIL import Image  # noqa: PLC0415  (not a dependency)

    with np.load(path) as data:
        jpeg, offsets, y, is_train = (data[k] for k in ("jpeg", "offsets", "y", "is_train"))
    order = np.argsort(~is_train, kind="stable")
    images = np.empty((len(order), 32, 32, 3), dtype=np.uint8)
    for row, i in enumerate(order):
        file = io.BytesIO(jpeg[offsets[i] : offsets[i + 1]].tobytes())
        images[row] = np.asarray(Image.open(file))
    return images, y[order]


def mislabel(y: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Replace a share of the labels by another class, drawn at random."""
    if not share:
        return y
    rng, n_classes = np.random.default_rng(seed), int(y.max()) + 1
    rows = rng.permutation(len(y))[: round(share * len(y))]
    y = y.copy()
    y[rows] = (y[rows] + rng.integers(1, n_classes, len(rows))) % n_classes
    return y
