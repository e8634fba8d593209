"""Time of flatness at all layers of LeNet-5 and in all weights, in passes, and of rivals."""

import math
import statistics
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
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
from benchmarks._harness.timing import Budget, environment, interleave, ratio, verdict
from relflat_sk import flatness_report, measure

CRITERION = nn.CrossEntropyLoss()
BATCH_SIZE = 1024
RTOL = 0.01
TRACE_LIKE = [
    "relative_flatness", "normalized_relative_flatness", "hessian_trace", "trace_flatness",
    "neuron_flatness_max", "neuron_flatness_sum",
]  # fmt: skip
# most forward passes on N_WHOLE images
WHOLE = {
    "network_flatness": 55, "joint_eigenvalue_flatness": 40, "pac_bayes_flatness": 116,
    "pac_bayes_magnitude_flatness": 107,
}  # fmt: skip
N_WHOLE = 1000
LAYERS = [
    name for name, layer in LeNet5().named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)
]
# Hutch++ and XTrace: images on which their number of products is found, a multiple of the step
N_PILOT, STEP = 256, 6
EXPLANATION = f"""
Hessian trace by layer at a standard error of {RTOL:.0%}. Rivals report no error: the probes they
need follow from the spread of those they drew here, all of them timed. Where they need more than
were timed, or fewer, the time in the table is EXTRAPOLATED LINEARLY. Products of Hutch++, XTrace:
as many as bring the spread of repeated estimates on the first {N_PILOT} images to 1%, assuming
that all images take no fewer; their time is that many of curvlinops' own, the QR left out. Their
trace, and how far it is off, are those of the first images too."""


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


def n_needed(estimates: Sequence[float]) -> int:
    """Return the number of estimates for a standard error of 1%, by the spread of these."""
    spread = statistics.stdev(estimates) / abs(statistics.fmean(estimates))
    return max(1, math.ceil((spread / RTOL) ** 2))


def distance(estimates: Sequence[float], ours: Any) -> float:
    """Return the distance of a rival's mean to our value, in standard errors.

    The standard error of a few estimates is uncertain itself, so the distance follows Student's t
    distribution. It is translated into the equally unlikely distance of a normal distribution.
    """
    mean = statistics.fmean(estimates)
    stderr = statistics.stdev(estimates) / math.sqrt(len(estimates))
    stderr = max(math.hypot(stderr, ours["stderr"]), 1e-6 * abs(mean))
    return float(norm.isf(student.sf(abs(mean - ours["value"]) / stderr, len(estimates) - 1)))


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
    budgets = [time_report(model, X, y, options.rounds)]
    budgets += time_whole(model, X[:N_WHOLE], y[:N_WHOLE], options.rounds)
    print(EXPLANATION)
    for name in ("pyhessian", "curvlinops"):
        if not find_spec(name):
            print(f"\nSKIPPED: {name} is missing. See benchmarks/README.md, Other libraries")
    found = pd.concat([compare_at(layer, model, X, y, options) for layer in LAYERS])
    rivals = found[found["way"] != "ours"].groupby("way")
    for name, least in rivals["ratio"].min().items():
        budgets.append(Budget(f"{name} / ours, the least of all layers", least, 3, at_least=True))
    if rivals.ngroups:
        furthest = found["off / se"].max()
        name = "largest distance of rivals' means, in standard errors"
        budgets.append(Budget(name, furthest, 4))
    return verdict(budgets, judged=not options.quick)


def time_report(model: nn.Module, X: Tensor, y: Tensor, rounds: int) -> Budget:
    """Time the report of all layers next to a forward-backward pass."""
    ways = {
        "forward-backward": lambda: forward_backward(model, X, y),
        "flatness_report": lambda: report(model, X, y, TRACE_LIKE),
    }
    times = interleave(ways, rounds)
    to_pass = ratio(times["flatness_report"], times["forward-backward"])
    print(f"\n{len(LAYERS)} layers, {len(TRACE_LIKE)} measures, {rounds} rounds: median seconds")
    print(pd.DataFrame(times).median().to_string(float_format="{:.3f}".format))
    print(f"flatness_report / forward-backward [quartiles]: {to_pass}")
    return Budget("flatness_report / forward-backward", to_pass.value, 60)


def time_whole(model: nn.Module, X: Tensor, y: Tensor, rounds: int) -> list[Budget]:
    """Time measures of the whole network next to a forward pass."""

    def forward() -> None:
        with torch.no_grad():
            model(X)

    ways: dict[str, Callable[[], object]] = {"forward": forward}
    for name in WHOLE:
        ways[name] = partial(measure, name, model, X, y, criterion=CRITERION, random_state=0)
    times = interleave(ways, rounds)
    return [
        Budget(f"{name} / forward", ratio(times[name], times["forward"]).value, most)
        for name, most in WHOLE.items()
    ]


def compare_at(
    layer: str, model: nn.Module, X: Tensor, y: Tensor, options: Namespace
) -> pd.DataFrame:
    """Compare the trace of a layer with other libraries, and print the table."""
    torch.manual_seed(0)
    batches = list(zip(X.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))
    draws = peers.probes(model, CRITERION, layer, batches)
    ours = report(model, X, y, ["hessian_trace"], [layer]).iloc[0]
    estimates: dict[str, list[float]] = {name: [] for name in draws}
    ways = {
        name: lambda name=name: estimates[name].extend(draws[name](options.probes))
        for name in draws
    }
    for draw in draws.values():
        draw(1)
    ways["ours"] = lambda: report(model, X, y, ["hessian_trace"], [layer])
    times = interleave(ways, options.rounds, warmup=0)
    rows = [{"way": "ours", "trace": ours["value"], "products": ours["method"],
             "seconds": statistics.median(times["ours"])}]  # fmt: skip

    def add(way: str, values: list[float], reference: Any, n: int, timed: str, like: str) -> None:
        scaled = [seconds * n / options.probes for seconds in times[like]]
        to_ours = ratio(scaled, times["ours"])
        rows.append({
            "way": way, "trace": statistics.fmean(values), "off / se": distance(values, reference),
            "products": n, "timed": timed, "seconds": statistics.median(scaled),
            "ratio": to_ours.value, "/ ours [quartiles]": str(to_ours),
        })  # fmt: skip

    for name, values in estimates.items():
        add(name, values, ours, n_needed(values), str(len(values)), name)
    if peers.CURVLINOPS in draws:
        few = X[:N_PILOT], y[:N_PILOT]
        reference = report(model, *few, ["hessian_trace"], [layer]).iloc[0]
        pilot = peers.curvlinops_operator(model, CRITERION, layer, [few])
        for method in peers.DEFLATED:
            values, n = products(pilot, method, options)
            timed = "0" if n_needed(values) == 1 else "0, not yet at 1%"  # the ratio is a bound
            add(f"curvlinops {method}", values, reference, n, timed, peers.CURVLINOPS)
    found = pd.DataFrame(rows)
    print(f"\n{layer}, weight {tuple(model.get_submodule(layer).weight.shape)}\n")
    printed = found.drop(columns="ratio", errors="ignore")
    print(printed.to_string(index=False, na_rep=""), flush=True)
    return found.reindex(columns=["way", "ratio", "off / se"])


def products(operator: peers.Operator, method: str, options: Namespace) -> tuple[list[float], int]:
    """Find estimates with a spread of 1%, and their number of products; or those of the most."""
    estimates: dict[int, list[float]] = {}

    def is_enough(n: int) -> bool:
        repeats = range(2 if options.quick else 8)
        estimates[n] = [peers.deflated_trace(operator, method, n) for _ in repeats]
        return n_needed(estimates[n]) == 1

    # the estimators need fewer products than the Hessian has columns
    numbers = range(STEP, min(options.most, operator.shape[0] - 1) + 1, STEP)
    n = numbers[min(bisect_left(numbers, True, key=is_enough), len(numbers) - 1)]
    return estimates[n], n


if __name__ == "__main__":
    raise SystemExit(main())
