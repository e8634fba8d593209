"""P21 Figure 5: LeNet-5, relative flatness and four other measures against the gap.

The paper has 110 minima over initialisations, rates, batch sizes and optimisers, and prints no
coefficients in its text: relative flatness has the largest, the Fisher-Rao norm the smallest. As in
the authors' code, training ends at a mean loss of 0.1. With 50,000 images, weight decay is an axis
as in that code. Its crops and flips are left out, because stacked networks cannot draw them.
Higher rates and small batches give flatter minima with larger gaps in nats.
"""

from collections.abc import Callable, Sequence

import pandas as pd

from benchmarks.papers._common import Figure, bootstrap, conditions, correlation
from benchmarks.papers._lenet import FIVE, complete, of_network

GOAL = 0.1
RATES = {"SGD": 0.02, "Adam": 0.001, "RMSprop": 0.0005}


def main(argv: Sequence[str] | None = None) -> int:
    figure = Figure("p21_figure_5", __doc__, argv, full=False)
    decays = [{"param_decay": decay} for decay in (0.0, 5e-4)] if figure.full else [{}]
    runs = [
        {"param_optimizer": name, "param_batch_size": size, "param_faster": faster,
         "param_init": kind, **decay, "param_seed": seed}
        for seed in range(1 if figure.quick else 3)
        for decay in decays
        for kind in ("xavier_normal", "kaiming_uniform", "uniform")
        for size in ((32, 128, 512) if figure.full else (32, 128))
        for faster in (1, 2)
        for name in (RATES if not figure.quick else ["Adam"])
    ]  # fmt: skip
    every = complete(
        figure, runs[: 4 if figure.quick else None],
        lambda run: RATES[run["param_optimizer"]] * run["param_faster"], GOAL, of_network,
    )  # fmt: skip
    frame = every[every["train_loss"] <= (9 if figure.quick else 1.5 * GOAL)]

    def lead(other: str) -> Callable[[pd.DataFrame], float]:
        def of(rows: pd.DataFrame) -> float:
            r = rows[["relative_flatness", other]].corrwith(rows["generalization_gap"])
            return float(r["relative_flatness"] - r[other])

        return of

    claims = [correlation(f"r of {name}", "> 0", frame, name) for name in FIVE]
    # the authors' code divides features by their deviations, and has the norm of the last layer
    measured = frame.dropna(subset="l2_norm_last")
    claims += [
        correlation(f"r of {name}, same minima", "> 0", measured, name)
        for name in ("normalized_relative_flatness", "l2_norm_last", "relative_flatness")
    ]
    claims += [
        bootstrap(f"r of relative_flatness minus r of {name}", "> 0", frame, lead(name))
        for name in FIVE[1:]
    ]
    setting = ["param_optimizer", "param_faster", "param_batch_size"]
    conditions(frame, ["relative_flatness", "hessian_trace", "pac_bayes_flatness"], setting)
    return figure.finish(claims)


if __name__ == "__main__":
    raise SystemExit(main())
