"""Training steps of stacked networks and of single ones, by kind of network and batch size.

The rule of `fleet="auto"` (`relflat_sk.fleet._fleet.why_alone`) was read from this table on a
CPU. On a CUDA device, the budget is for 64 LeNet-5 in batches of 32.

    python -m benchmarks.costs.stacking                  # a few minutes
    python -m benchmarks.costs.stacking --device cuda
    python -m benchmarks.costs.stacking --device cuda --network LeNet-5 --batch 32
    python -m benchmarks.costs.stacking --quick          # a smoke run without verdict
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
from torch import nn

from benchmarks._harness.networks import LeNet5
from benchmarks._harness.timing import (
    Budget,
    environment,
    interleave,
    ratio,
    table,
    verdict,
    wait_for_device,
)
from relflat_sk import FleetTrainer, RelativeFlatnessRegularizedClassifier
from relflat_sk.fleet._fleet import why_alone

STEPS, EPOCHS = 32, 1
# how many times as fast stacked nets must be: where fleet="auto" stacks, and for 64 on a GPU
LEAST_ON_CPU, LEAST_ON_GPU = 1.0, 20.0


def perceptron(*sizes: int, norm: bool = False) -> nn.Sequential:
    """Return a perceptron of some sizes, with or without batch norm."""
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), *([nn.BatchNorm1d(n_out)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers[: -1 - norm])


# network -> its maker, and the shape of an input
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "64-128-64-10": (partial(perceptron, 64, 128, 64, 10), (64,)),
    "784-512-512-10": (partial(perceptron, 784, 512, 512, 10), (784,)),
    "784-1500-1500-10": (partial(perceptron, 784, 1500, 1500, 10), (784,)),
    "64-128-64-10 with batch norm": (partial(perceptron, 64, 128, 64, 10, norm=True), (64,)),
    "LeNet-5": (LeNet5, (3, 32, 32)),
}
BATCHES = 8, 32, 128


def main() -> int:
    """Measure, print, and return the exit code."""
    options = _parse()
    warnings.simplefilter("ignore")
    n = options.nets or (4 if options.quick else 64 if options.device == "cuda" else 16)
    rounds = 1 if options.quick else 5
    names = [options.network] if options.network else list(NETWORKS)
    batches = [options.batch] if options.batch else BATCHES
    if options.quick:
        names, batches = [names[0], names[-1]], batches[:1]
    print(f"{n} stacked nets against single ones on {options.device}, {rounds} rounds")
    print(environment())
    rows, budgets = [["network", *(f"batch {size}" for size in batches)]], []
    for name in dict.fromkeys(names):
        row, (module, shape) = [name], NETWORKS[name]
        for size in batches:
            times = _times(module, shape, size, n, rounds, options.device, options.quick)
            found = ratio(times["single"], times["stacked"])
            row.append(str(found))
            least = _least(name, size, options.device)
            if least is not None:
                budgets.append(Budget(f"{name}, batch {size}", found.value, least, True))
        rows.append(row)
    print("\nHow many times as fast stacked nets are, with quartiles:")
    print(table(rows))
    return verdict(budgets, judged=not options.quick)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--nets", type=int, help="nets at a time (default: 16, 64 on cuda)")
    parser.add_argument("--network", choices=NETWORKS, help="only this network")
    parser.add_argument("--batch", type=int, help="only batches of this size")
    return parser.parse_args()


def _least(network: str, size: int, device: str) -> float | None:
    """Return the budget of a network and batch size; None if there is none."""
    if device != "cpu":
        return LEAST_ON_GPU if (network, size) == ("LeNet-5", 32) else None
    return LEAST_ON_CPU if why_alone(NETWORKS[network][0]()) is None else None


def _times(
    module: Callable[[], nn.Module],
    shape: tuple[int, ...],
    size: int,
    n: int,
    rounds: int,
    device: str,
    quick: bool,
) -> dict[str, list[float]]:
    """Return the seconds that epochs take for each net, stacked and by itself."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=((4 if quick else STEPS) * size, *shape)).astype(np.float32)
    y = np.arange(len(X)) % 10

    def seconds(nets: int, fleet: int | None, epochs: int) -> float:
        estimators = [
            RelativeFlatnessRegularizedClassifier(
                module, flatness_weight=0, batch_size=size, max_epochs=epochs, lr=1e-4,
                random_state=seed, device=device, verbose=0,
            )
            for seed in range(nets)
        ]  # fmt: skip
        trainer = FleetTrainer(estimators, fleet=fleet)
        started = time.perf_counter()
        trainer.fit(X, y)
        wait_for_device()
        return time.perf_counter() - started

    def epoch(nets: int, fleet: int | None) -> float:
        """Leave out what a fit takes before and after its epochs."""
        if quick:  # epochs this short are lost in the noise of a difference
            return seconds(nets, fleet, EPOCHS) / nets
        longer, shorter = (seconds(nets, fleet, epochs) for epochs in (2 * EPOCHS, EPOCHS))
        return max(longer - shorter, 1e-9) / nets

    found: dict[str, list[float]] = {"stacked": [], "single": []}
    ways = {
        "stacked": lambda: found["stacked"].append(epoch(n, n)),
        "single": lambda: found["single"].append(epoch(2, None)),
    }
    interleave(ways, rounds)
    return {name: times[-rounds:] for name, times in found.items()}  # without the warm-up


if __name__ == "__main__":
    sys.exit(main())
