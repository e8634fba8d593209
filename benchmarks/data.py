"""Images to measure on: random ones, or CIFAR-10 where a file of it is at hand.

Timings do not depend on what is in the images, so random ones are the default and nothing
is downloaded. The file is an .npz of JPEGs (see `benchmarks/README.md`), decoded once into
a cache in the user's cache folder, outside the repository.
"""

import argparse
import hashlib
import io
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["add_data_argument", "load_images"]

VARIABLE = "RELFLAT_SK_CIFAR10"


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """Let the user name the file, on the command line or in the environment."""
    parser.add_argument(
        "--data",
        default=os.environ.get(VARIABLE) or None,
        metavar="NPZ",
        help=f"CIFAR-10 as .npz (default: ${VARIABLE}, or random images without it)",
    )


def load_images(n: int, path: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """Take n images, (n, 3, 32, 32) in float32 with mean 0 and spread 1, and their classes.

    Parameters
    ----------
    n : int
        At most 50,000 of CIFAR-10's training set.
    path : str or Path, optional
        The file; random images if None.

    Returns
    -------
    (Tensor, Tensor)

    Raises
    ------
    ValueError
        If the file has fewer images.
    """
    if path is None:
        return _random_images(n)
    images, classes = _decoded(Path(path))
    if n > len(images):
        raise ValueError(f"{path} has {len(images)} training images, but {n} are asked for.")
    X = torch.from_numpy(images[:n].transpose(0, 3, 1, 2).astype(np.float32))
    X.sub_(X.mean(dim=(0, 2, 3), keepdim=True)).div_(X.std(dim=(0, 2, 3), keepdim=True))
    return X, torch.from_numpy(classes[:n].astype(np.int64))


def _random_images(n: int) -> tuple[Tensor, Tensor]:
    """Noise around one pattern per class: a network can learn it, as it can real images."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (n,), generator=generator)
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    X = torch.randn(n, 3, 32, 32, generator=generator)
    for rows in torch.arange(n).split(1024):  # no second array of this size
        X[rows] += 0.2 * patterns[y[rows]]
    return X, y


def _decoded(path: Path) -> tuple[np.ndarray, np.ndarray]:
    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    name = f"cifar10_{hashlib.sha256(key.encode()).hexdigest()[:12]}.npz"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cached = root / "relflat_sk" / name
    if not cached.exists():
        images, classes = _decode(path)
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_name(f"{os.getpid()}_{name}")
        np.savez(partial, images=images, classes=classes)
        partial.replace(cached)  # never half a file, also when two processes decode
    with np.load(cached) as data:
        return data["images"], data["classes"]


def _decode(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        from PIL import Image  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("reading CIFAR-10 needs Pillow: pip install pillow") from error
    with np.load(path) as data:
        jpeg, offsets, y, is_train = (data[k] for k in ("jpeg", "offsets", "y", "is_train"))
    images = np.empty((int(is_train.sum()), 32, 32, 3), dtype=np.uint8)
    for row, i in enumerate(np.flatnonzero(is_train)):
        file = io.BytesIO(jpeg[offsets[i] : offsets[i + 1]].tobytes())
        images[row] = np.asarray(Image.open(file))
    return images, y[is_train]
