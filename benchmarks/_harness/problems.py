"""The data sets and networks on which accuracies are compared."""

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn

from benchmarks._harness.data import add_data_argument, load_images
from relflat_sk import MLP

__all__ = ["TABLES", "Arrays", "Problem", "SmallConvNet", "add_problem_arguments", "load_problem"]

Arrays = tuple[np.ndarray, np.ndarray]

TABLES = {"wine": load_wine, "breast cancer": load_breast_cancer, "digits": load_digits}


class SmallConvNet(nn.Sequential):
    """Three convolutions and two linear layers, for 3x32x32 images."""

    def __init__(self) -> None:
        parts: list[nn.Module] = []
        for n_in, n_out in [(3, 16), (16, 32), (32, 64)]:
            parts += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        head = [nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)]
        super().__init__(*parts, *head)
        # a third faster on a CPU
        self.to(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Problem:
    """Training data, test data and the network to train.

    Parameters
    ----------
    name : str
        Data set and number of training samples.
    train, test : tuple of ndarray
        Inputs and labels.
    network : dict
        Arguments of a net that make the module.
    """

    name: str
    train: Arrays
    test: Arrays
    network: dict[str, Any]


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--problem``, ``--data`` and ``--n-train``, from which `load_problem` takes a data set.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The parser of the benchmark's command line.
    """
    parser.add_argument("--problem", choices=[*TABLES, "CIFAR-10"], default="digits")
    add_data_argument(parser)
    parser.add_argument("--n-train", type=int, help="training samples (default: see the problem)")


def load_problem(
    name: str, n_train: int | None = None, path: str | None = None, n_test: int = 5000
) -> Problem:
    """Load a data set, split into training and test data, with its network.

    Parameters
    ----------
    name : {"digits", "breast cancer", "wine", "CIFAR-10"}
        Of scikit-learn, standardised, for a network of 128 and 64 hidden units; or CIFAR-10 for
        `SmallConvNet`.
    n_train : int, optional
        Number of training samples; by default half of a table, and 1,000 images of CIFAR-10.
    path : str, optional
        The .npz file of CIFAR-10.
    n_test : int, default=5000
        Number of test images of CIFAR-10; of a table, all that is left is tested on.

    Returns
    -------
    Problem
        Data and network.
    """
    if name == "CIFAR-10":
        n_train = n_train or 1000
        X, y = (tensor.numpy() for tensor in load_images(n_train + n_test, path))
        parts = (X[:n_train], y[:n_train]), (X[n_train:], y[n_train:])
        return Problem(f"{name} {n_train}", *parts, {"module": SmallConvNet})
    X, y = TABLES[name](return_X_y=True)
    n_train = n_train or len(y) // 2
    X, X_test, y, y_test = train_test_split(X, y, train_size=n_train, stratify=y, random_state=0)
    scaler = StandardScaler().fit(X)
    X, X_test = (scaler.transform(part).astype(np.float32) for part in (X, X_test))
    network = {"module": MLP, "module__hidden_layer_sizes": (128, 64)}
    return Problem(f"{name} {n_train}", (X, y), (X_test, y_test), network)
