"""What the penalty costs in training: steps of LeNet-5 with and without it.

Run ``python -m benchmarks.training``; ``--quick`` for a smoke run.
"""

import argparse
import sys
from collections.abc import Callable
from itertools import islice

import torch
from skorch import NeuralNet, NeuralNetClassifier
from torch import Tensor, nn

from benchmarks.data import add_data_argument, load_images
from benchmarks.models import LeNet5
from benchmarks.timing import Budget, environment, interleave, ratio, table, verdict
from relflat_sk import RelativeFlatnessRegularizedClassifier

BATCH_SIZE = 128


def make_net(estimator: Callable[..., NeuralNet], **arguments: object) -> NeuralNet:
    """Make a net that differs from the others in nothing but its class."""
    torch.manual_seed(0)
    return estimator(
        LeNet5,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=0.01,
        batch_size=BATCH_SIZE,
        train_split=None,
        verbose=0,
        **arguments,
    )


NETS: dict[str, Callable[[], NeuralNet]] = {
    "plain": lambda: make_net(NeuralNetClassifier),
    "regularised": lambda: make_net(RelativeFlatnessRegularizedClassifier, flatness_weight=0.1),
    "weight 0": lambda: make_net(RelativeFlatnessRegularizedClassifier, flatness_weight=0.0),
}


class Steps:
    """Training steps of one net, batch after batch, as skorch's own loop makes them.

    With `loader`, batches come from the net's own iterator over the data, as in `fit`;
    without, they are cut out beforehand, which leaves the optimisation step alone.
    """

    def __init__(self, net: NeuralNet, X: Tensor, y: Tensor, *, loader: bool) -> None:
        self.net = net
        net.partial_fit(X[:BATCH_SIZE], y[:BATCH_SIZE])
        net.history.new_epoch()
        self.source = net.get_iterator(net.get_dataset(X, y), training=True)
        if not loader:
            self.source = list(zip(X.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))
        self.batches = iter(self.source)

    def __call__(self) -> None:
        """Make one step."""
        one = list(islice(self.batches, 1))
        if not one:
            self.batches = iter(self.source)
            one = [next(self.batches)]
        self.net.run_single_epoch(one, training=True, prefix="train", step_fn=self.net.train_step)


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run, judges nothing")
    parser.add_argument("--steps", type=int, help="steps of each net (default: 600)")
    add_data_argument(parser)
    arguments = parser.parse_args()
    steps = arguments.steps or (10 if arguments.quick else 600)
    X, y = load_images(2048 if arguments.quick else 12_800, arguments.data)
    print(f"Training LeNet-5 in batches of {BATCH_SIZE}, {steps} steps of each net in turn")
    print(environment())

    rows = [["training step", "median ms", "/ plain [quartiles]"]]
    for loader in (True, False):
        runs = {name: Steps(make(), X, y, loader=loader) for name, make in NETS.items()}
        times = interleave(runs, steps, warmup=2 if arguments.quick else 20)
        for name, seconds in times.items():
            label = name if loader else f"{name}, without the loader"
            median = f"{1000 * torch.tensor(seconds).median():.2f}"
            rows.append([label, median, str(ratio(seconds, times["plain"]))])
        if loader:
            value = ratio(times["regularised"], times["plain"]).value
    print()
    print(table(rows))
    budget = Budget("training step, regularised / plain", value, 1.10)
    return verdict([budget], judged=not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
