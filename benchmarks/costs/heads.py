"""Time, memory and exactness of flatness at a head of very many classes.

Measures are compared with the head's forward pass over the same batches, and training steps with a
step without penalty. Memory is the growth of resident memory, in a fresh process for each row: what
a call needs beside model and data, and for steps with a penalty also beside a step without it.
"""

from collections.abc import Callable
from contextlib import nullcontext

import pandas as pd
import torch
from torch import nn

from benchmarks._harness.memory import peak_growth, peak_in_fresh_process
from benchmarks._harness.options import read_options
from benchmarks._harness.timing import Budget, compare, environment, interleave, ratio, verdict
from relflat_sk import RelativeFlatnessPenalty, measure

CRITERION = nn.CrossEntropyLoss()
N_BATCHES, BATCH_SIZE = 2, 64
FORWARD, PLAIN = "forward", "training step"
# most forward passes: 1.25 for each product of the head's size. Two are the logits and the sums of
# rows over the classes; squares that are summed column by column are the third
MEASURES = {
    "relative_flatness": 2 * 1.25,
    "normalized_relative_flatness": 3 * 1.25,
    "hessian_trace": 2 * 1.25,
    "neuron_flatness_sum": 3 * 1.25,
}


class Problem:
    """A linear head with random weights, and random features."""

    def __init__(self, n_features: int, n_classes: int, device: str) -> None:
        torch.manual_seed(0)
        self.head = nn.Sequential(nn.Linear(n_features, n_classes)).to(device)
        n = N_BATCHES * BATCH_SIZE
        self.X = torch.randn(n, n_features).to(device)
        self.y = torch.randint(n_classes, (n,)).to(device)

    def forward(self) -> None:
        """Run the head on all batches."""
        with torch.no_grad():
            for x in self.X.split(BATCH_SIZE):
                self.head(x)

    def measure(self, name: str) -> float:
        """Compute a measure of the head."""
        return measure(name, self.head, self.X, self.y, criterion=CRITERION, batch_size=BATCH_SIZE)

    def step(self, weight: float, clip: float | None = 0.5, *, normalize: bool = False) -> None:
        """Compute the gradients of one training batch, with a penalty if it has a weight."""
        self.head.zero_grad()
        x, y = self.X[:BATCH_SIZE].clone(), self.y[:BATCH_SIZE]
        x.requires_grad_()  # as behind a network that is trained, too
        penalty = RelativeFlatnessPenalty(normalize=normalize, weight=weight, clip=clip)
        with penalty.capture(self.head) if weight else nullcontext():
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
            PLAIN: lambda: self.step(0.0),
            "step with penalty, not limited": lambda: self.step(1.0, None),
            "step with penalty": lambda: self.step(1.0),
            "step with normalised penalty": lambda: self.step(1.0, normalize=True),
        }
        return {FORWARD: self.forward, **measures, **steps}


def main() -> int:
    options = read_options(
        __doc__, classes=(128_000, 500), features=(1024, 64), device="cpu", rounds=(5, 1),
        peak_of=str,
    )  # fmt: skip
    problem = Problem(options.features, options.classes, options.device)
    ways = problem.ways()
    if options.peak_of:  # in a fresh process
        print(peak_growth(ways[options.peak_of], options.device))
        return 0
    print(f"A head of {options.classes:,} classes and {options.features:,} features, {N_BATCHES}")
    print(f"batches of {BATCH_SIZE}; training steps are of one batch; on {options.device}")
    print(environment())
    times = interleave(ways, options.rounds)
    peaks = {
        name: peak_in_fresh_process("benchmarks.costs.heads", "--peak-of", name) / 2**20
        for name in ways
        if not options.quick or name in {"relative_flatness", PLAIN}
    }
    table = compare(times, FORWARD, PLAIN).assign(**{"MiB above model": pd.Series(peaks).round()})
    print(f"\n{table.to_string()}")
    value, exact = problem.measure("relative_flatness"), problem.exact()
    print(f"\nrelative flatness {value:.8g}, by sums in float64 {exact:.8g}")
    budgets = [
        Budget("relative_flatness, error in units of 1e-4", abs(value / exact - 1) / 1e-4, 1)
    ]
    for name, limit in MEASURES.items():
        found = ratio(times[name], times[FORWARD])
        budgets.append(Budget(f"{name} / forward", found.value, limit))
        if name in peaks:
            budgets.append(Budget(f"{name}, GiB above the model", peaks[name] / 2**10, 0.6))
    size = problem.head[0].weight.nbytes / 2**20
    budgets += [
        Budget(
            f"{name}, sizes of the weight above a step without",
            (peaks[name] - peaks[PLAIN]) / size,
            3.5 if "normalised" in name else 1.3,
        )
        for name in peaks
        if "penalty" in name
    ]
    return verdict(budgets, judged=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
