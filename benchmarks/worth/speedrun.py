"""Train CIFAR-10 to 94% in ten epochs, with and without flatness: differences of many short runs.

The recipe is that of airbench94 (Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024),
with ReLU in place of GELU, so that the penalty at earlier layers is piecewise linear, and neither
Lookahead nor shifted crops in the test. Nothing was tuned for any of the arms:

plain    the recipe; *average* is the mean of its weights over the last fifth of the steps
SAM      a radius of 0.1; left out with wrong labels
last     a penalty of weight 1 at the last layer
all      the same at all layers but the whitening, in the last quarter of the steps

With ``--results FILE`` each run is saved, and an interrupted program goes on where it ended.
"""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.swa_utils import AveragedModel, update_bn

from benchmarks._harness.data import load_images, mislabel
from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.stored import completed
from benchmarks._harness.timing import environment, interval
from relflat_sk import RelativeFlatnessPenalty

ARMS = ("plain", "SAM", "last", "all")
RADIUS, WEIGHT, SHIFT, MOMENTUM = 0.1, 1.0, 2, 0.85
CRITERION = nn.CrossEntropyLoss(label_smoothing=0.2)


class Speedrun(nn.Sequential):
    """Whitening of patches, three blocks of two convolutions, and a linear layer times 1/9."""

    def __init__(self, images: Tensor, widths: tuple[int, ...]) -> None:
        whitening = nn.Conv2d(3, 24, 2)
        patches = nn.functional.unfold(images[:5000].cpu(), 2).transpose(1, 2).reshape(-1, 12)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (vectors / (values + 5e-4).sqrt()).T.reshape(-1, 3, 2, 2)
        whitening.weight.data = torch.cat([filters, -filters])
        whitening.weight.requires_grad_(False)
        parts: list[nn.Module] = [whitening, nn.ReLU()]
        n_in = 24
        for width in widths:
            for n, pool in ((n_in, [nn.MaxPool2d(2)]), (width, [])):
                convolution = nn.Conv2d(n, width, 3, padding=1, bias=False)
                nn.init.dirac_(convolution.weight.data[:n])
                norm = nn.BatchNorm2d(width, momentum=0.4)
                norm.weight.requires_grad_(False)
                parts += [convolution, *pool, norm, nn.ReLU()]
            n_in = width
        super().__init__(*parts, nn.MaxPool2d(3), nn.Flatten(), nn.Linear(n_in, 10, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Turn (n, 3, 32, 32) images into (n, 10) logits."""
        return super().forward(x) / 9


def make_optimizer(net: nn.Module, batch_size: int) -> torch.optim.Optimizer:
    """Make SGD with the rates of the recipe, which are those of losses that are sums."""
    steps = 1024 * (1 + 1 / (1 - MOMENTUM))
    norms = {id(m.bias) for m in net.modules() if isinstance(m, nn.BatchNorm2d)}
    groups = []
    for is_norm, factor in ((False, 1), (True, 64)):
        members = [p for p in net.parameters() if p.requires_grad and (id(p) in norms) == is_norm]
        rate = factor * 11.5 / steps
        decay = 0.0153 * batch_size / steps / (rate * batch_size)
        groups.append({"params": members, "lr": rate * batch_size, "weight_decay": decay})
    return torch.optim.SGD(groups, lr=1.0, momentum=MOMENTUM, nesterov=True)


def triangle(share: float) -> float:
    """Return the factor of the learning rate at a share of the steps."""
    return float(np.interp(share, [0, 0.23, 1], [0.2, 1, 0.07]))


def batches(
    X: Tensor, y: Tensor, epochs: int, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield shifted and flipped batches; an image is flipped in every other epoch."""
    padded = pad(X, (SHIFT,) * 4, "reflect")
    is_flipped = torch.rand(len(X), generator=generator) < 0.5
    for epoch in range(epochs):
        shifts = torch.randint(2 * SHIFT + 1, (len(X), 2), generator=generator)
        moved = torch.empty_like(X)
        for down, right in product(range(2 * SHIFT + 1), repeat=2):
            rows = (shifts == torch.tensor([down, right])).all(1).nonzero()[:, 0].to(X.device)
            moved[rows] = padded[rows, :, down : down + X.shape[2], right : right + X.shape[3]]
        flips = (is_flipped == (epoch % 2 == 0)).to(X.device)[:, None, None, None]
        moved = torch.where(flips, moved.flip(-1), moved)
        order = torch.randperm(len(X), generator=generator).to(X.device)
        for rows in order.split(batch_size)[: len(X) // batch_size]:
            yield moved[rows], y[rows]


def train(
    wrong: float, seed: int, arm: str, data: Any, epochs: int, batch_size: int, widths: Any
) -> dict[str, float]:
    """Train by an arm on the first n images; return test accuracies, and the training's seconds."""
    X, y, n = data
    test = X[n:], y[n:].to(X.device)
    X, y = X[:n], torch.from_numpy(mislabel(y[:n].numpy(), wrong, seed)).to(X.device)
    torch.manual_seed(seed)
    net = Speedrun(X, widths).to(X.device, memory_format=torch.channels_last)
    optimizer, average = make_optimizer(net, batch_size), AveragedModel(net)
    rates, n_steps = [g["lr"] for g in optimizer.param_groups], epochs * (len(X) // batch_size)
    layers = [name for name, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)][1:]
    penalty = RelativeFlatnessPenalty(layers if arm == "all" else -1, weight=WEIGHT)
    penalised = {"last": 0.0, "all": 0.75}.get(arm, 1.0)  # from this share of the steps on
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    for step, (x, labels) in enumerate(batches(X, y, epochs, batch_size, generator)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * triangle(step / n_steps)
        has_penalty = step >= penalised * n_steps
        with penalty.capture(net) if has_penalty else nullcontext(), _precision(x):
            output = net(x)
            loss = CRITERION(output.float(), labels)
        if has_penalty:
            loss = loss + penalty(CRITERION, output.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        if arm == "SAM":
            _go_uphill(net, x, labels)
        optimizer.step()
        if arm == "plain" and step >= 0.8 * n_steps:
            average.update_parameters(net)
    found = {"accuracy": accuracy(net, *test), "seconds": time.perf_counter() - started}
    if arm == "plain":
        with _precision(X):
            update_bn(X.split(batch_size), average)
    return found | {"average": accuracy(average, *test) if arm == "plain" else np.nan}


def _precision(x: Tensor) -> Any:
    """Return the context of forward passes: bfloat16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if x.is_cuda else nullcontext()


def _go_uphill(net: nn.Module, x: Tensor, labels: Tensor) -> None:
    """Replace the gradients by those at the highest point around, as SAM does."""
    moved = [p for p in net.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in moved if p.grad is not None])
    before = [p.detach().clone() for p in moved]
    with torch.no_grad():
        for p in moved:
            p.add_(p.grad * (RADIUS / norm))
            p.grad = None
    with _precision(x):
        output = net(x)
    CRITERION(output.float(), labels).backward()
    with torch.no_grad():
        for p, value in zip(moved, before, strict=True):
            p.copy_(value)


@torch.no_grad()
def accuracy(net: nn.Module, X: Tensor, y: Tensor) -> float:
    """Return the share of images that are classified rightly, with their mirror images."""
    net.eval()
    with _precision(X):
        hits = [
            ((net(x) + net(x.flip(-1))).argmax(1) == labels).sum()
            for x, labels in zip(X.split(2000), y.split(2000), strict=True)
        ]
    net.train()
    return float(sum(hits)) / len(y)


def report(frame: pd.DataFrame) -> None:
    """Print accuracies in percent, and gains over plain with the same seeds, in points."""
    frame = frame.set_index(["param_wrong", "param_seed", "param_arm"])
    accuracies = 100 * frame["accuracy"].unstack()
    accuracies["average"] = 100 * frame["average"].xs("plain", level="param_arm")
    tables = {}
    accuracies = accuracies[["plain", "average", *ARMS[1:]]]
    for wrong, rows in accuracies.groupby(level=0):
        values = rows.dropna(axis=1, how="all")
        gains = values.sub(values["plain"], axis=0)
        seconds = frame["seconds"].loc[wrong].groupby("param_arm").median()
        tables[f"{wrong:.0%}"] = pd.DataFrame({
            "seeds": values.count(),
            "accuracy": values.apply(lambda column: interval(column.dropna()).lstrip("+")),
            "over plain": gains.apply(lambda column: interval(column.dropna())),
            "seconds": seconds.reindex(values.columns),
        })  # fmt: skip
    found = pd.concat(tables, names=["wrong labels", "arm"])
    print(found.to_string(sparsify=False, float_format="{:.1f}".format))
    print("\nTest accuracy in percent and gain in points, with 95% intervals over seeds.")


def main() -> None:
    options = read_options(
        __doc__, data=IMAGES, device="cuda", seeds=(40, 1), wrong=[0.0], epochs=(10, 2),
        results=Path, limit=int, jobs=1,
    )  # fmt: skip
    n, n_test, batch_size, widths = (50_000, 10_000, 1024, (64, 256, 256))
    if options.quick:
        n, n_test, batch_size, widths = (512, 200, 64, (32, 32, 32))
    print(f"{n} images, {options.epochs} epochs, batches of {batch_size}\n{environment()}\n")
    X, y = load_images(n + n_test, options.data)
    X = X.to(options.device, memory_format=torch.channels_last)
    runs = [
        {"param_wrong": wrong, "param_seed": seed, "param_arm": arm}
        for wrong, seed, arm in product(options.wrong, range(options.seeds), ARMS)
        if not (wrong and arm == "SAM")
    ]
    report(completed(options, runs, train, (X, y, n), options.epochs, batch_size, widths))


if __name__ == "__main__":
    main()
