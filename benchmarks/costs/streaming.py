"""Peak memory of measures, nets and searches over data that are larger than memory.

python -m benchmarks.costs.streaming            # 20 GiB of rows, 20 to 30 minutes
python -m benchmarks.costs.streaming --quick    # a smoke run without verdict
python -m benchmarks.costs.streaming --kinds Dataset DataLoader    # of these rows only

The rows are virtual: computed when they are read, or zeros of a sparse file. The second table has
a row for each function, and the peak of its memory with less data.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks._harness.memory import peak_growth
from benchmarks._harness.timing import Budget, environment, table, verdict

N_FEATURES, N_CLASSES = 4096, 10
ROW = 4 * N_FEATURES  # bytes
LIMIT = 500  # MiB


class Rows:
    """An array-like of which rows are computed when they are read."""

    dtype = np.dtype(np.float32)

    def __init__(self, n: int) -> None:
        self.shape = (n, N_FEATURES)
        self._pattern = np.linspace(-1, 1, N_FEATURES, dtype=np.float32)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        # a sample at a time must not cost an array of all numbers
        numbers = np.asarray(rows) if isinstance(rows, int) else np.arange(self.shape[0])[rows]
        return np.cos(0.1 * numbers, dtype=np.float32)[..., None] * self._pattern

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return self[:]


class Samples(Dataset):
    """Pairs of a row and its label."""

    def __init__(self, n: int) -> None:
        self.rows = Rows(n)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self.rows[i], i % N_CLASSES


class Stream(IterableDataset):
    """The same pairs as a stream."""

    def __init__(self, n: int) -> None:
        self.samples = Samples(n)

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        return (self.samples[i] for i in range(len(self.samples)))


def _memmap(n: int, folder: Path) -> np.memmap:
    path = folder / "rows.bin"
    with path.open("wb") as file:
        file.truncate(n * ROW)  # a sparse file
    return np.memmap(path, dtype=np.float32, mode="r", shape=(n, N_FEATURES))


def _npy(n: int, folder: Path) -> np.ndarray:
    path = folder / "rows.npy"
    np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(n, N_FEATURES))
    return np.load(path, mmap_mode="r")


def _zarr(n: int, folder: Path) -> Any:
    import zarr  # noqa: PLC0415

    return zarr.create_array(
        store=str(folder / "rows.zarr"),
        shape=(n, N_FEATURES),
        chunks=(256, N_FEATURES),
        dtype="float32",
        fill_value=0.5,
    )


KINDS: dict[str, Callable[[int, Path], Any]] = {
    "array-like": lambda n, folder: Rows(n),
    "memmap": _memmap,
    "np.load": _npy,
    "zarr": _zarr,
    "Dataset": lambda n, folder: Samples(n),
    "IterableDataset": lambda n, folder: Stream(n),
    "DataLoader": lambda n, folder: DataLoader(Samples(n), batch_size=256),
}


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(N_FEATURES, 16), nn.ReLU(), nn.Linear(16, N_CLASSES))


def _net(**arguments: Any) -> Any:
    from relflat_sk import RelativeFlatnessRegularizedNet  # noqa: PLC0415

    return RelativeFlatnessRegularizedNet(
        _module(), max_epochs=1, batch_size=256, verbose=0, random_state=0, **arguments
    )


def _measure(X: Any, y: Any) -> None:
    from relflat_sk import relative_flatness  # noqa: PLC0415

    relative_flatness(_module(), X, y, criterion=nn.CrossEntropyLoss())


def _normalised(X: Any, y: Any) -> None:
    from relflat_sk import relative_flatness  # noqa: PLC0415

    relative_flatness(_module(), X, y, criterion=nn.CrossEntropyLoss(), normalize=True, layer=0)


def _report(X: Any, y: Any) -> None:
    from relflat_sk import flatness_report  # noqa: PLC0415

    names = ["trace_flatness", "gradient_norm", "fisher_rao_norm", "inverse_margin"]
    flatness_report(_module(), X, y, criterion=nn.CrossEntropyLoss(), measures=names)


def _score(X: Any, y: Any) -> None:
    from relflat_sk import FlatnessScorer  # noqa: PLC0415

    FlatnessScorer(non_minimum="warn")(_net().initialize(), X, y)


def _pipeline(X: Any, y: Any) -> None:
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    from relflat_sk import relative_flatness  # noqa: PLC0415

    rows = Rows(100)[:]
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, np.arange(100) % 10)
    relative_flatness(model, X, y)


def _fit(X: Any, y: Any) -> None:
    _net().fit(X, y)


def _predict(X: Any, y: Any) -> None:
    _net().fit(Rows(100)[:], np.arange(100) % 10).predict(X)


def _search(X: Any, y: Any) -> None:
    from relflat_sk import FlatMinimaSearch  # noqa: PLC0415

    FlatMinimaSearch(_net(flatness_weight=0), {"lr": [0.01]}, goal=2.0).fit(X, y)


FUNCTIONS = {
    "relative_flatness": _measure,
    "normalised, first layer": _normalised,
    "flatness_report": _report,
    "FlatnessScorer": _score,
    "pipeline": _pipeline,
    "net.fit": _fit,
    "net.predict": _predict,
    "FlatMinimaSearch": _search,
}


def _run(function: str, kind: str, n: int) -> None:
    """Print the peak growth of memory in bytes and the seconds, or the error."""
    with tempfile.TemporaryDirectory() as folder:
        X = KINDS[kind](n, Path(folder))
        y = None if isinstance(X, Dataset | DataLoader) else np.arange(n) % N_CLASSES
        import relflat_sk  # noqa: F401, PLC0415

        FUNCTIONS[function](Rows(64)[:], np.arange(64) % N_CLASSES)  # loads libraries
        started = time.perf_counter()
        try:
            peak = peak_growth(lambda: FUNCTIONS[function](X, y))
        except Exception as error:  # the table shows it
            print(f"{type(error).__name__}: {error}")
        else:
            print(f"{peak} {time.perf_counter() - started}")


def _peak(function: str, kind: str, n: int) -> tuple[float, float]:
    """Return MiB and seconds of a call in a fresh process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.costs.streaming"]
    arguments = ["--cell", function, kind, str(n)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    try:
        peak, seconds = map(float, done.stdout.split("\n")[0].split())
    except ValueError:
        print(f"{function}, {kind}: {done.stdout[:300]}{done.stderr[-300:]}", flush=True)
        return float("nan"), float("nan")
    return peak / 2**20, seconds


def main() -> int:
    """Print the tables and the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--gib", type=float, help="size of the rows (default: 20)")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        metavar="KIND",
        help=f"of {', '.join(KINDS)} (default: all)",
    )
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell is not None:
        function, kind, n = arguments.cell
        _run(function, kind, int(n))
        return 0
    print(environment())
    large = arguments.gib or (0.25 if arguments.quick else 20)
    small = min(large, 0.5)
    budgets = []
    rows = [[f"relative_flatness, {large:g} GiB", "peak MiB", "seconds"]]
    for kind in arguments.kinds:
        peak, seconds = _peak("relative_flatness", kind, int(large * 2**30) // ROW)
        rows.append([kind, f"{peak:.0f}", f"{seconds:.0f}"])
        budgets.append(Budget(f"peak MiB of relative_flatness, {kind}", peak, LIMIT))
    print(f"\n{table(rows)}\n")
    rows = [[f"peak MiB, {small:g} GiB", *arguments.kinds]]
    for function in FUNCTIONS:
        peaks = [_peak(function, kind, int(small * 2**30) // ROW)[0] for kind in arguments.kinds]
        rows.append([function, *(f"{peak:.0f}" for peak in peaks)])
    print(f"\n{table(rows)}\n")
    return verdict(budgets, judged=not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
