"""Networks that several benchmarks train, and the loop that trains them without the library."""

import itertools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk import MLP, RelativeFlatnessRegularizedClassifier, SharpnessAwareMixin


def epochs(
    loss: Callable[[Tensor], Tensor],  # of some rows of the data
    optimizer: torch.optim.Optimizer,
    n: int,  # number of samples
    batch_size: int,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Train by an optimizer, in shuffled batches; yield the number of each epoch at its end."""
    for epoch in itertools.count():
        for rows in torch.randperm(n, generator=generator).split(batch_size):
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()
        yield epoch


class SharpnessAwareClassifier(SharpnessAwareMixin, RelativeFlatnessRegularizedClassifier):
    """The net of all other methods, trained by SAM."""


class Dropout(nn.Sequential):
    """An `MLP` with dropout behind each hidden layer."""

    def __init__(self, dropout: float, **arguments: Any) -> None:
        parts = []
        for part in MLP(**arguments):
            parts += [part, nn.Dropout(dropout)] if isinstance(part, nn.ReLU) else [part]
        super().__init__(*parts)


class LeNet5(nn.Module):
    """LeNet-5 as it is commonly trained on CIFAR-10, with ReLU and max pooling.

    `features` computes 84 features per image, `head` turns them into 10 logits. Flatness is
    measured at `head`, the last layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Turn (n, 3, 32, 32) images into (n, 10) logits."""
        return self.head(self.features(x))


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


class Block(nn.Module):
    """Residual block: two convolutions, the first with a stride, and a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if n_in != n_out:
            projection = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(n_out))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Turn (n, n_in, h, w) into (n, n_out, h / stride, w / stride)."""
        return self.relu(self.main(x) + self.shortcut(x))


class ResNet18(nn.Sequential):
    """ResNet-18 as it is commonly trained on CIFAR-10, without pooling after the stem."""

    def __init__(self) -> None:
        stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        blocks = [Block(n_in, n_out, 1 if n_in == n_out else 2) for n_in, n_out in pairwise(widths)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
        super().__init__(*stem, *blocks, *head)
