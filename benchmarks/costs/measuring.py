"""What a search would gain if it measured all nets of a fleet in one stacked pass.

A search measures each minimum by itself, with all its measures in one pass over the training
data. The script prints the processor time of this pass, that of a stacked pass by the same closed
formula, which gives the same values, and how many nets end in the same epoch: only these could be
measured together. The budget is for the best case, in which all of them end together.

    python -m benchmarks.costs.measuring            # 2 minutes
    python -m benchmarks.costs.measuring --quick    # a smoke run without verdict
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor

from benchmarks._harness.minima import EPOCHS, PROBLEMS, load
from benchmarks._harness.timing import Budget, environment, table, verdict
from relflat_sk import (
    FlatMinimaSearch,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
    relative_flatness,
)
from relflat_sk.ensemble import Fleet
from relflat_sk.ensemble._chain import find_chain
from relflat_sk.ensemble._criteria import find_criterion
from relflat_sk.search._trial.measuring import Measuring

DEMO = "make demo"
MOST = 1.05  # a fit over one with stacked measures; above, they would be worth their code
AT_ONCE = 256  # samples of each net in a stacked pass


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("Milliseconds of processor time for each net")
    print(environment())
    rows = [["search", "fit", "its measure", "if stacked", "scores", "nets that end together"]]
    budgets = []
    for problem in list(PROBLEMS)[1:2] if quick else [DEMO, *PROBLEMS]:
        net, space, (X, y) = _search(problem, 2 if quick else 12 if problem == DEMO else 16)
        net.set_params(max_epochs=2 if quick else net.max_epochs)
        fit, measure, scores, together = _profile(net, space, X, y)
        stacked = _stacked(net, X, y, 2 if quick else 32)
        times = [f"{1000 * one:.1f}" for one in (fit, measure, stacked, scores)]
        rows.append([problem, *times, f"{np.median(together):.0f}"])
        saved = fit / (fit - measure + stacked)
        budgets.append(Budget(f"{problem}, fit / with stacked measures", saved, MOST))
    print()
    print(table(rows))
    return verdict(budgets, judged=not quick)


def _search(problem: str, n_seeds: int) -> tuple[Any, Any, Any]:
    """Return net, space and data of a search."""
    X, y = load(problem if problem in PROBLEMS else "64")
    seeds = list(range(n_seeds))
    make, settings = RelativeFlatnessRegularizedClassifier, {"flatness_weight": 0, "verbose": 0}
    if problem == DEMO:  # as in examples/rank_minima.py
        net = make(
            module__hidden_layer_sizes=(128, 128),
            optimizer=torch.optim.SGD,
            optimizer__momentum=0.9,
            callbacks=[StopAtLoss(0.01)],
            max_epochs=500,
            **settings,
        )
        space: Any = {
            "batch_size": [16, 32, 64, 128, 256],
            "lr": lambda trial: 0.05 * trial.params["batch_size"] / 32,
            "random_state": seeds,
        }
        return net, space, (X[:600], y[:600])
    hidden, size = PROBLEMS[problem]
    net = make(
        module__hidden_layer_sizes=hidden,
        batch_size=size,
        max_epochs=EPOCHS,
        callbacks=[StopAtLoss(0.05)],
        **settings,
    )
    return net, {"lr": [0.001, 0.002], "random_state": seeds}, (X, y)


def _profile(net: Any, space: Any, X: Any, y: Any) -> tuple[float, float, float, list[int]]:
    """Run a search; return the seconds of a fit, its measure and scores, and who ends together."""
    measure, score, together = _Timed(Measuring.__call__), _Timed(type(net).score), [0]
    train, has_ended = Fleet._train_epoch, Fleet._has_ended

    def train_epoch(fleet: Fleet) -> Any:
        together.append(0)
        return train(fleet)

    def note_end(fleet: Fleet, routine: Any) -> bool:
        ended = has_ended(fleet, routine)
        together[-1] += ended
        return ended

    with (
        patch.object(Measuring, "__call__", measure.method()),
        patch.object(type(net), "score", score.method()),
        patch.object(Fleet, "_train_epoch", train_epoch),
        patch.object(Fleet, "_has_ended", note_end),
    ):
        search = FlatMinimaSearch(
            net, space, refit=False, random_state=0, fleet=64, n_threads=None, verbose=0
        )
        started = time.process_time()
        n = len(search.fit(X, y).minima_)
        seconds = time.process_time() - started
    ends = [one for one in together if one]
    return seconds / n, measure.seconds / n, score.seconds / n, ends


class _Timed:
    """A method, and the processor time of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def method(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return self._function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - started

        return call


def _stacked(net: Any, X: Any, y: Any, n: int, rounds: int = 9) -> float:
    """Return the seconds that a net's share of a stacked pass takes."""
    nets = [clone(net).set_params(random_state=k, max_epochs=3).fit(X, y) for k in range(n)]
    inputs, labels = torch.from_numpy(X), torch.from_numpy(y)
    expected = [relative_flatness(one, X, y) for one in nets]
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        found = _stacked_flatness(nets, inputs, labels)
        seconds.append(time.process_time() - started)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    return float(np.median(seconds)) / n


def _stacked_flatness(nets: Any, X: Tensor, y: Tensor) -> list[float]:
    """Compute relative flatness at the last layer, loss and accuracy of all nets at once."""
    modules = [dict(net.module_.named_parameters()) for net in nets]
    weights = {name: torch.stack([one[name].detach() for one in modules]) for name in modules[0]}
    chain: Any = find_chain(nets[0].module_, X)
    chain.bind(weights, weights, {})
    k = len(nets)
    criterion = find_criterion(nets[0].criterion_, torch.zeros(1, 10), y[:1])
    total, loss, correct = (torch.zeros(k) for _ in range(3))
    with torch.no_grad():
        for some, labels in zip(X.split(AT_ONCE), y.split(AT_ONCE), strict=True):
            z, phi, weight = chain.forward(some.expand(k, -1, -1))
            target = labels[None, :, None].expand(k, -1, -1)
            loss += criterion.each(z, target).sum(1)
            correct += (z.argmax(-1) == labels).sum(1)
            total += criterion.curvature(z, phi, weight, torch.ones(k, 1, 1)).value
    return [float(one) / len(X) for one in total]


if __name__ == "__main__":
    sys.exit(main())
