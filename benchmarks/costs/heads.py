"""Time, memory and exactness of flatness at a head of very many classes.

python -m benchmarks.costs.heads            # 3 to 5 minutes, 3 GiB
python -m benchmarks.costs.heads --quick    # a smoke run without verdict
"""

import argparse
import math
import sys
from collections.abc import Callable

import torch
from torch import nn

from benchmarks._harness.memory import in_fresh_process, peak_growth
from benchmarks._harness.timing import Budget, environment, interleave, ratio, table, verdict
from relflat_sk import RelativeFlatnessPenalty, measure

CRITERION = nn.CrossEntropyLoss()
MEASURES = [
    "relative_flatness",
    "normalized_relative_flatness",
    "hessian_trace",
    "neuron_flatness_sum",
]


class Problem:
    """A linear head with random weights, and random features."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.head = nn.Sequential(nn.Linear(arguments.features, arguments.classes))
        self.X = torch.randn(arguments.batches * arguments.batch_size, arguments.features)
        self.y = torch.randint(arguments.classes, (len(self.X),))
        self.batch_size = arguments.batch_size

    def forward(self) -> None:
        """Run the head on all batches."""
        with torch.no_grad():
            for x in self.X.split(self.batch_size):
                self.head(x)

    def measure(self, name: str) -> float:
        """Compute a measure of the head."""
        return measure(
            name, self.head, self.X, self.y, criterion=CRITERION, batch_size=self.batch_size
        )

    def step(self, clip: float | None, weight: float) -> None:
        """Compute the gradients of one training batch, with a penalty if it has a weight."""
        self.head.zero_grad()
        x, y = self.X[: self.batch_size], self.y[: self.batch_size]
        penalty = RelativeFlatnessPenalty(weight=weight, clip=clip)
        with penalty.capture(self.head):
            output = self.head(x)
        loss = CRITERION(output, y)
        if weight:
            loss = loss + penalty(CRITERION, output, y)
        loss.backward()

    def exact(self) -> float:
        """Compute relative flatness by its sums over classes in float64."""
        weight, bias = self.head[0].weight.detach(), self.head[0].bias.detach().double()
        X = self.X.double()
        parts = weight.split(4096)
        p = (torch.cat([X @ part.double().T for part in parts], dim=1) + bias).softmax(dim=1)
        mean, squares = torch.zeros_like(X), torch.zeros_like(X[:, 0])
        for share, part in zip(p.split(4096, dim=1), parts, strict=True):
            rows = part.double()
            mean += share @ rows
            squares += share @ rows.square().sum(dim=1)
        variances = squares - mean.square().sum(dim=1)
        return float((X.square().sum(dim=1) * variances).mean())

    def ways(self) -> dict[str, Callable[[], object]]:
        """Return what is measured, by name."""
        measures = {name: lambda name=name: self.measure(name) for name in MEASURES}
        steps = {
            "training step": lambda: self.step(None, 0.0),
            "step with penalty, not limited": lambda: self.step(None, 1.0),
            "step with penalty": lambda: self.step(0.5, 1.0),
        }
        return {"forward": self.forward, **measures, **steps}


def main() -> int:
    """Measure, print, and return the exit code."""
    arguments = _parse()
    problem = Problem(arguments)
    ways = problem.ways()
    if arguments.peak_of:  # in a fresh process
        print(peak_growth(ways[arguments.peak_of]))
        return 0
    print(
        f"A head of {arguments.classes:,} classes and {arguments.features:,} features, "
        f"{arguments.batches} batches of {arguments.batch_size}; training steps are of one batch"
    )
    print(environment())
    times = interleave(ways, arguments.rounds)
    options = [
        part
        for name in ("classes", "features", "batches", "batch_size")
        for part in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))
    ]
    rows = [
        ["", "median s", "/ forward of as many batches [quartiles]", "peak MiB above the model"]
    ]
    found = {}
    for name, seconds in times.items():
        share = arguments.batches if "step" in name else 1
        compared = ratio([share * one for one in seconds], times["forward"])
        peak = math.nan
        if not arguments.quick or name == "relative_flatness":
            peak = in_fresh_process("benchmarks.costs.heads", ["--peak-of", name, *options]) / 2**20
        found[name] = compared.value, peak
        median = f"{torch.tensor(seconds).median():.2f}"
        rows.append([name, median, str(compared), f"{peak:.0f}"])
    print("\n" + table(rows))
    value, exact = problem.measure("relative_flatness"), problem.exact()
    print(f"\nrelative flatness {value:.8g}, by sums in float64 {exact:.8g}")
    time, peak = found["relative_flatness"]
    budgets = [
        Budget("relative_flatness / forward", time, 2.5),
        Budget("relative_flatness, GiB above the model", peak / 2**10, 0.6),
        Budget("relative_flatness, error in units of 1e-4", abs(value / exact - 1) / 1e-4, 1),
    ]
    return verdict(budgets, judged=not arguments.quick)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--classes", type=int, help="default: 128,000")
    parser.add_argument("--features", type=int, help="default: 1,024")
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 5)")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    usual = {"classes": 128_000, "features": 1024, "rounds": 5}
    quick = {"classes": 500, "features": 64, "rounds": 1}
    for name, value in (quick if arguments.quick else usual).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
