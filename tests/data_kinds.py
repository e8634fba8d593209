"""The same samples as data of all kinds: in memory, on disk, computed, streamed."""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


class Stream(IterableDataset):
    """Starts anew each time that it is iterated."""

    def __init__(self, X, y):
        self.pairs = X, y

    def __iter__(self):
        return zip(*map(torch.from_numpy, self.pairs), strict=True)


class Pairs(Dataset):
    """A map-style data set without arrays inside that others could find."""

    def __init__(self, X, y):
        self._X, self._y = X, y

    def __len__(self):
        return len(self._X)

    def __getitem__(self, i):
        return torch.from_numpy(self._X[i]), int(self._y[i])


def memmap(folder, X, mode="r"):
    path = folder / "rows.bin"
    X.tofile(path)
    return np.memmap(path, dtype=X.dtype, mode=mode, shape=X.shape)


def npy(folder, X):
    np.save(folder / "rows.npy", X)
    return np.load(folder / "rows.npy", mmap_mode="r")


# from a folder, inputs and labels to arguments of a measure or of fit
ARRAYS = {
    "memmap": lambda folder, X, y: (memmap(folder, X), y),
    "np.load": lambda folder, X, y: (npy(folder, X), y),
}
SETS = {
    "map-style": lambda folder, X, y: (Pairs(X, y), None),
    "tensors": lambda folder, X, y: (TensorDataset(*map(torch.from_numpy, (X, y))), None),
    "stream": lambda folder, X, y: (Stream(X, y), None),
}
LOADER = {"loader": lambda *data: (DataLoader(SETS["tensors"](*data)[0], batch_size=13), None)}
KINDS = {**ARRAYS, **SETS, **LOADER}
