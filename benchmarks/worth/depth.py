"""Compare what a search picks with and without the rule of what a minimum is.

The candidates of `benchmarks.worth.selection` are trained for some epochs, without a goal of their
own, with ``goal=None`` (a plateau makes a minimum) and with ``goal="auto"``. Two rules then pick
the flattest candidate:

any     of all candidates that are better than a constant prediction, however deep
ranked  of the minima that the search ranks: at their goal or a plateau, and of comparable depth;
        if there is none, the deepest candidate, as the search does with a warning

The regret is the test score of the best candidate minus that of the pick, in points. Kendall's tau
is that of flatness with the generalization gap, over the candidates of each rule. Both are means
over train-test splits.

    python -m benchmarks.worth.depth            # 15 minutes
    python -m benchmarks.worth.depth --quick    # a smoke run
"""

import argparse
import sys
import warnings
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import kendalltau
from sklearn.pipeline import Pipeline

from benchmarks._harness.timing import environment, table
from benchmarks.worth.selection import Task, tasks
from relflat_sk import FlatMinimaSearch

EPOCHS = (3, 10, 30)
HEADER = ["data", "goal", "epochs", "ranked", "regret: any", "ranked", "tau: any", "ranked"]
FEWEST = 5  # minima for a correlation


def search(task: Task, data: tuple[Any, ...], goal: Any, epochs: int) -> pd.DataFrame:
    """Train all candidates of a task without a goal of their own; return the table of minima."""
    X, y, X_test, y_test = data
    candidate = task.make({})
    final = candidate[-1] if isinstance(candidate, Pipeline) else candidate
    final.set_params(callbacks=None, max_epochs=epochs)
    prefix = f"{candidate.steps[-1][0]}__" if isinstance(candidate, Pipeline) else ""
    space = {
        f"{prefix}batch_size": list(task.batch_sizes),
        f"{prefix}lr": list(task.learning_rates),
        f"{prefix}random_state": list(range(task.n_seeds)),
    }
    found = FlatMinimaSearch(candidate, space, goal=goal, refit=False)
    return found.fit(X, y, X_test, y_test).minima_


def judge(minima: pd.DataFrame) -> dict[str, float]:
    """Return the share that is ranked, and regret and correlation for both rules."""
    done = minima[minima["state"] == "complete"]
    ranked = done[done["comparable"]]
    best = done["test_score"].max()
    flattest = done.loc[done["relative_flatness"].idxmin()]
    return {
        "share": len(ranked) / len(minima),
        "regret any": best - flattest["test_score"],
        "regret ranked": best - done["test_score"].iloc[0],
        "tau any": tau(done),
        "tau ranked": tau(ranked),
    }


def tau(minima: pd.DataFrame) -> float:
    """Return Kendall's tau of flatness with the gap; nan for few minima."""
    if len(minima) < FEWEST:
        return float("nan")
    return float(kendalltau(minima["relative_flatness"], minima["generalization_gap"]).statistic)


def row(name: str, goal: Any, epochs: int, found: list[dict[str, float]]) -> list[str]:
    """Return a row of the table, with means over the splits."""
    frame = pd.DataFrame(found)
    mean = frame.mean()  # of the splits that have a value
    return [
        name,
        str(goal),
        str(epochs),
        f"{100 * mean['share']:.0f}%",
        *(f"{100 * mean[key]:.1f}" for key in ("regret any", "regret ranked")),
        *("-" if np.isnan(mean[key]) else f"{mean[key]:+.2f}" for key in ("tau any", "tau ranked")),
    ]


def main() -> int:
    """Train, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one split of one data set")
    parser.add_argument("--splits", type=int, default=3, help="train-test splits (default: 3)")
    parser.add_argument("--tasks", nargs="*", help="names of data sets (default: all)")
    arguments = parser.parse_args()
    known = tasks(None)
    names = ["breast cancer"] if arguments.quick else arguments.tasks or list(known)
    n_splits, epochs = (1, EPOCHS[:1]) if arguments.quick else (arguments.splits, EPOCHS)
    print(environment())
    rows = [HEADER]
    for name in names:
        for goal in (None, "auto"):
            for n_epochs in epochs:
                found = []
                for data in known[name].splits(n_splits):
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # candidates left out are counted
                        found.append(judge(search(known[name], data, goal, n_epochs)))
                rows.append(row(name, goal, n_epochs, found))
                print(" | ".join(rows[-1]), flush=True)
    print()
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
