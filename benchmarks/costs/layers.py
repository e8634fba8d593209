"""Time of flatness at all layers of LeNet-5, in passes and next to other libraries."""

import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pandas as pd
import torch
from scipy.stats import norm
from scipy.stats import t as student
from torch import Tensor, nn

from benchmarks._harness import peers
from benchmarks._harness.data import load_images
from benchmarks._harness.networks import LeNet5, epochs
from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.timing import Budget, environment, interleave, ratio, table, verdict
from relflat_sk import flatness_report

CRITERION = nn.CrossEntropyLoss()
BATCH_SIZE = 1024
RTOL = 0.01
TRACE_LIKE = [
    "relative_flatness",
    "normalized_relative_flatness",
    "hessian_trace",
    "trace_flatness",
    "neuron_flatness_max",
    "neuron_flatness_sum",
]
LAYERS = [
    name for name, layer in LeNet5().named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)
]


def train(X: Tensor, y: Tensor, n_epochs: int) -> nn.Module:
    """Train a LeNet-5 with Adam, in batches of 128."""
    torch.manual_seed(0)
    model = LeNet5()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    training = epochs(lambda rows: CRITERION(model(X[rows]), y[rows]), optimizer, len(X), 128)
    for _ in range(n_epochs):
        next(training)
    model.zero_grad()
    return model.eval()


def forward_backward(model: nn.Module, X: Tensor, y: Tensor) -> None:
    """Compute the gradient of the loss in all parameters, batch by batch."""
    for x, target in zip(X.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True):
        model.zero_grad()
        CRITERION(model(x), target).backward()
    model.zero_grad()


def report(
    model: nn.Module, X: Tensor, y: Tensor, measures: list[str], layers: Any = "all"
) -> pd.DataFrame:
    """Measure layers by the public function."""
    return flatness_report(
        model, X, y, measures=measures, layers=layers, criterion=CRITERION,
        batch_size=BATCH_SIZE, rtol=RTOL, random_state=0,
    )  # fmt: skip


@dataclass
class Ours:
    """The Hessian trace at one layer, measured by `flatness_report` at each call."""

    model: nn.Module
    X: Tensor
    y: Tensor
    layer: str
    value: float = math.nan
    stderr: float = math.nan
    method: str = ""

    def __call__(self) -> None:
        """Measure, and keep value, standard error and method."""
        table = report(self.model, self.X, self.y, ["hessian_trace"], [self.layer])
        (row,) = table.itertuples()
        self.value, self.stderr, self.method = row.value, row.stderr, row.method

    def distance(self, rival: "Probes") -> float:
        """Return the distance to a rival's mean, in standard errors.

        The standard error of a few probes is uncertain itself, so the distance follows
        Student's t distribution. It is translated into the equally unlikely distance of a
        normal distribution.
        """
        stderr = max(math.hypot(rival.stderr, self.stderr), 1e-6 * abs(rival.mean))
        t = abs(rival.mean - self.value) / stderr
        return float(norm.isf(student.sf(t, len(rival.values) - 1)))


@dataclass
class Probes:
    """The probes of one rival, collected over the rounds."""

    draw: Callable[[int], list[float]]
    at_once: int
    values: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        """Draw the probes of one round."""
        self.values += self.draw(self.at_once)

    @property
    def mean(self) -> float:
        """Mean of the probes drawn so far."""
        return statistics.fmean(self.values)

    @property
    def stderr(self) -> float:
        """Standard error of the mean."""
        return statistics.stdev(self.values) / math.sqrt(len(self.values))

    def needed(self) -> int:
        """Return the number of probes for a standard error of 1%, by the spread of these."""
        spread = statistics.stdev(self.values) / abs(self.mean)
        return max(1, math.ceil((spread / RTOL) ** 2))


def main() -> int:
    options = read_options(
        __doc__, n_samples=(5000, 64), epochs=(10, 1), rounds=(5, 1), probes=(8, 2),
        most=(192, 12), data=IMAGES,
    )  # fmt: skip
    images = "RANDOM images, not real ones" if options.data is None else "CIFAR-10"
    n, n_epochs = options.n_samples, options.epochs
    print(f"LeNet-5, trained {n_epochs} epochs and measured on {n:,} images ({images})")
    print(f"in batches of {BATCH_SIZE}, relative tolerance {RTOL:g}")
    print(environment())
    X, y = load_images(n, options.data)
    model = train(X, y, n_epochs)
    with torch.no_grad():
        output = torch.cat([model(x) for x in X.split(BATCH_SIZE)])
    right = float((output.argmax(dim=1) == y).float().mean())
    print(f"training loss {float(CRITERION(output, y)):.3f}, accuracy {right:.3f}")
    budgets = [_time_report(model, X, y, options)]
    budgets += _compare(model, X, y, options)
    return verdict(budgets, judged=not options.quick)


def _time_report(model: nn.Module, X: Tensor, y: Tensor, options: Namespace) -> Budget:
    """Time the report of all layers next to a forward-backward pass."""
    ways = {
        "forward-backward": lambda: forward_backward(model, X, y),
        "flatness_report": lambda: report(model, X, y, TRACE_LIKE),
    }
    times = interleave(ways, options.rounds)
    to_pass = {name: ratio(taken, times["forward-backward"]) for name, taken in times.items()}
    rows = [["all layers", "median s", "/ forward-backward [quartiles]"]]
    for name, taken in times.items():
        rows.append([name, f"{statistics.median(taken):.3f}", str(to_pass[name])])
    print(f"\n{len(LAYERS)} layers, {len(TRACE_LIKE)} measures, {options.rounds} rounds\n")
    print(table(rows))
    return Budget("flatness_report / forward-backward", to_pass["flatness_report"].value, 60)


def _compare(model: nn.Module, X: Tensor, y: Tensor, options: Namespace) -> list[Budget]:
    """Compare the traces of all layers with other libraries."""
    few = X[:_N_PILOT], y[:_N_PILOT]
    print(f"""
Hessian trace by layer at a standard error of {RTOL:.0%}. Rivals report no error: the probes they
need follow from the spread of those they drew here, all of them timed. Where they need more than
were timed, or fewer, the time in the table is EXTRAPOLATED LINEARLY. Products of Hutch++, XTrace:
as many as bring the spread of repeated estimates on the first {len(few[0])} images to 1%, assuming
that all images take no fewer; their time is that many of curvlinops' own, the QR left out. Their
trace, and how far it is off, are those of the first images too.""")
    installed = _installed()
    slowest: dict[str, float] = {}
    furthest = 0.0
    for layer in LAYERS:
        ratios, distance = _compare_at(layer, model, (X, y), few, installed, options)
        furthest = max(furthest, distance)
        for name, found in ratios.items():
            slowest[name] = min(slowest.get(name, math.inf), found)
    budgets = [
        Budget(f"{name} / ours, the least of all layers", value, 3, at_least=True)
        for name, value in slowest.items()
    ]
    if slowest:
        budgets.append(Budget("largest distance of rivals' means, in standard errors", furthest, 4))
    return budgets


# Hutch++ and XTrace: images on which their number of products is found, estimates for the spread
_N_PILOT = 256
_REPEATS = 8
# their numbers of products are multiples of this: even for XTrace, of 3 for Hutch++
_STEP = 6


def _installed() -> set[str]:
    """Return the rivals that are installed, and print which are missing."""
    missing = [name for name in ("pyhessian", "curvlinops") if not find_spec(name)]
    for name in missing:
        print(f"\nSKIPPED: {name} is missing. See benchmarks/README.md, Other libraries")
    return {"pyhessian", "curvlinops"} - {*missing}


def _rivals(
    layer: str, model: nn.Module, X: Tensor, y: Tensor, installed: set[str], at_once: int
) -> tuple[dict[str, Probes], peers.Operator | None]:
    """Set up the installed rivals, and curvlinops' Hessian if it is installed."""
    batches = list(zip(X.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))
    draws: dict[str, Callable[[int], list[float]]] = {}
    operator = None
    if "pyhessian" in installed:
        if len(batches) > 1:
            draws["PyHessian"] = peers.pyhessian_probes(model, CRITERION, layer, batches)
        draws["PyHessian, one batch"] = peers.pyhessian_probes(model, CRITERION, layer, [(X, y)])
    if "curvlinops" in installed:
        operator = peers.curvlinops_operator(model, CRITERION, layer, batches)
        draws["curvlinops Hutchinson"] = peers.curvlinops_probes(operator)
    return {name: Probes(draw, at_once) for name, draw in draws.items()}, operator


def _compare_at(
    layer: str,
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    few: tuple[Tensor, Tensor],
    installed: set[str],
    options: Namespace,
) -> tuple[dict[str, float], float]:
    """Print the table of one layer; return the ratios and the largest distance."""
    torch.manual_seed(0)
    rivals, operator = _rivals(layer, model, *data, installed, options.probes)
    ours = Ours(model, *data, layer)
    ours()
    for rival in rivals.values():
        rival.draw(1)
    times = interleave({"ours": ours, **rivals}, options.rounds, warmup=0)
    # name, probes, the measurement they are compared with, products, timed products, their seconds
    compared = [
        (name, rival, ours, rival.needed(), f"{len(rival.values):,}", times[name])
        for name, rival in rivals.items()
    ]
    if operator is not None:
        reference = Ours(model, *few, layer)
        reference()
        pilot = peers.curvlinops_operator(model, CRITERION, layer, [few], operator.width)
        taken = times["curvlinops Hutchinson"]
        for method in peers.DEFLATED:
            estimates, needed, reached = _products(pilot, method, options)
            timed = "0" if reached else "0, not yet at 1%"  # the ratio is a lower bound
            compared.append((f"curvlinops {method}", estimates, reference, needed, timed, taken))
    rows = [["way", "trace", "off / se", "products", "timed", "seconds", "/ ours [quartiles]"]]
    seconds = f"{statistics.median(times['ours']):.3g}"
    rows.append([f"ours, {ours.method}", f"{ours.value:.5g}", "", "", "all", seconds, "1"])
    ratios: dict[str, float] = {}
    distances = [0.0]
    for name, probes, measured, needed, timed, taken in compared:
        scaled = [t * needed / options.probes for t in taken]
        to_ours = ratio(scaled, times["ours"])
        ratios[name] = to_ours.value
        distances.append(measured.distance(probes))
        cells = [f"{probes.mean:.5g}", f"{distances[-1]:.1f}", f"{needed:,}", timed]
        rows.append([name, *cells, f"{statistics.median(scaled):.3g}", str(to_ours)])
    print(f"\n{layer}, weight {tuple(model.get_submodule(layer).weight.shape)}\n")
    print(table(rows), flush=True)
    return ratios, max(distances)


def _products(
    operator: peers.Operator, method: str, options: Namespace
) -> tuple[Probes, int, bool]:
    """Find the number of products, in steps of 6, that brings the spread of estimates to 1%."""

    def estimate(n_products: int) -> Probes:
        estimates = Probes(
            lambda n: [peers.deflated_trace(operator, method, n_products) for _ in range(n)],
            2 if options.quick else _REPEATS,
        )
        estimates()
        return estimates

    low, high = 0, _STEP
    while (estimates := estimate(high)).needed() > 1:
        low, high = high, 2 * high
        # the estimators need fewer products than the Hessian has columns
        if high > min(options.most, operator.shape[0] - 1):
            return estimates, low, False
    while high - low > _STEP:
        middle = (low + high) // (2 * _STEP) * _STEP
        between = estimate(middle)
        if between.needed() > 1:
            low = middle
        else:
            high, estimates = middle, between
    return estimates, high, True


if __name__ == "__main__":
    sys.exit(main())
