"""Print the peak growth of memory in MiB of a function over 256 MiB of rows.

``python -m tests.peak_memory FUNCTION KIND`` is run in a process of its own.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from benchmarks._harness.memory import peak_growth
from relflat_sk import RelativeFlatnessRegularizedNet, relative_flatness

N, N_FEATURES, N_CLASSES = 2**14, 4096, 10


class Rows(Dataset):
    """Rows that are computed when they are read."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.linspace(-1, 1, N_FEATURES) * (0.1 * torch.tensor(i)).cos(), i % N_CLASSES


def in_a_file(folder):
    shape = N, N_FEATURES
    mapped = np.memmap(Path(folder) / "rows", dtype=np.float32, mode="w+", shape=shape)
    return np.memmap(mapped.filename, dtype=np.float32, mode="r", shape=shape)


KINDS = {
    "memmap": lambda folder: (in_a_file(folder), np.arange(N) % N_CLASSES),
    "Dataset": lambda folder: (Rows(), None),
}


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(N_FEATURES, 16), nn.ReLU(), nn.Linear(16, N_CLASSES))


def measure(X, y):
    relative_flatness(module(), X, y, criterion=nn.CrossEntropyLoss())


def fit(X, y):
    net = RelativeFlatnessRegularizedNet(module(), max_epochs=1, batch_size=256, verbose=0)
    net.fit(X, y)


FUNCTIONS = {"measure": measure, "fit": fit}

if __name__ == "__main__":
    name, kind = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        data = KINDS[kind](folder)
        print(peak_growth(lambda: FUNCTIONS[name](*data)) / 2**20)
