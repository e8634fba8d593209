"""What a search saves by measuring nets of a fleet that end together in one stacked pass.

The script prints the processor time of a fit, that of its measure and scores with the stacked pass
and one by one, and how many nets end in the same epoch: only these are measured together. The
stacked pass must not cost time anywhere.

    python -m benchmarks.costs.measuring            # 4 minutes
    python -m benchmarks.costs.measuring --quick    # a smoke run without verdict
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks._harness.minima import EPOCHS, PROBLEMS, load
from benchmarks._harness.timing import Budget, environment, table, verdict
from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier, StopAtLoss
from relflat_sk.fleet import Fleet, _measuring
from relflat_sk.search import _measure
from relflat_sk.search._measure import Measuring

DEMO = "make demo"
_TIMED = [
    (_measure, "record_measures"),
    (_measure, "record_held_out"),
    (_measuring, "_measure_all"),
]
LEAST = 0.95  # time of measure and scores one by one, over that with the stacked pass


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
    header = ["search", "fit", "measure and scores", "the same one by one"]
    rows, budgets = [[*header, "nets that end together"]], []
    for problem in list(PROBLEMS)[1:2] if quick else [DEMO, *PROBLEMS]:
        net, space, data = _search(problem, 2 if quick else 12 if problem == DEMO else 16)
        net.set_params(max_epochs=2 if quick else net.max_epochs)
        runs = [
            [_profile(net, space, *data, stacked=stacked) for stacked in (True, False)]
            for _ in range(1 if quick else 3)
        ]
        fit, stacked = np.median([run[0][:2] for run in runs], axis=0)
        alone = np.median([run[1][1] for run in runs])
        times = [f"{1000 * one:.1f}" for one in (fit, stacked, alone)]
        rows.append([problem, *times, f"{np.median(runs[0][0][2]):.0f}"])
        name = f"{problem}, measure and scores one by one / stacked"
        budgets.append(Budget(name, float(alone / stacked), LEAST, at_least=True))
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


def _profile(
    net: Any, space: Any, X: Any, y: Any, *, stacked: bool
) -> tuple[float, float, list[int]]:
    """Run a search; return the seconds of a fit, those of its measures, and who ends together."""
    seconds, together = [0.0], [0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[0] += time.process_time() - started

        return call

    train, has_ended = Fleet._train_epoch, Fleet._has_ended

    def train_epoch(fleet: Fleet) -> Any:
        together.append(0)
        return train(fleet)

    def note_end(fleet: Fleet, routine: Any) -> bool:
        ended = has_ended(fleet, routine)
        together[-1] += ended
        return ended

    with ExitStack() as stack:
        for place, name in _TIMED:
            stack.enter_context(patch.object(place, name, timed(getattr(place, name))))
        if not stacked:
            alone = patch.object(Measuring, "with_others", lambda *args: ({}, None))
            stack.enter_context(alone)
        stack.enter_context(patch.object(Fleet, "_train_epoch", train_epoch))
        stack.enter_context(patch.object(Fleet, "_has_ended", note_end))
        search = FlatMinimaSearch(
            net, space, refit=False, random_state=0, fleet=64, n_threads=None, verbose=0
        )
        started = time.process_time()
        n = len(search.fit(X, y).minima_)
        fit = time.process_time() - started
    return fit / n, seconds[0] / n, [one for one in together if one]


if __name__ == "__main__":
    sys.exit(main())
