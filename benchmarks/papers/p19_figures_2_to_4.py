"""P19 Figures 2 to 4: LeNet-5, flatness at the last layer against the gap, rescaled, robustness.

The paper's gap, five times the summed test losses minus the summed training losses, is ours times
the size of the training sample, so that the correlations are the same. Networks whose training loss
is above 0.1 after 400 epochs are left out: they are at no minimum.
"""

from collections.abc import Callable, Sequence

import pandas as pd

from benchmarks.papers._common import Figure, bootstrap, conditions, correlation, mean
from benchmarks.papers._lenet import DELTA, complete, of_layer

RATES = {4: 0.001, 32: 0.008, 64: 0.02, 512: 0.1}
GOAL = 0.01
INITS = ("xavier_normal", "kaiming_uniform", "uniform", "normal")


def seed_share(gaps: pd.DataFrame) -> float:
    """Compute the share of the variance that is between seeds; rows are setups."""
    if min(gaps.shape) < 2:
        return float("nan")
    between_seeds = gaps.var(axis=1).mean()
    between_setups = gaps.mean(axis=1).var() - between_seeds / gaps.shape[1]
    return float(between_seeds / (between_seeds + max(between_setups, 0)))


def main(argv: Sequence[str] | None = None) -> int:
    figure = Figure("p19_figures_2_to_4", __doc__, argv, full=False)
    runs = [
        {"param_batch_size": size, "param_init": kind, "param_seed": seed}
        for seed in range(1 if figure.quick else 9)
        for kind in INITS
        for size in (RATES if not figure.quick else (32,))
    ]
    rates = dict.fromkeys(RATES, 0.1) if figure.quick else RATES
    every = complete(figure, runs, lambda run: rates[run["param_batch_size"]], GOAL, of_layer)
    frame = every[every["train_loss"] <= (9 if figure.quick else 0.1)]
    inside = frame["robustness"] <= DELTA**2 / 2 * frame["eigenvalue_flatness"]

    def r(rows: pd.DataFrame, name: str) -> float:
        return float(rows[name].corr(rows["generalization_gap"]))

    def change(name: str) -> Callable[[pd.DataFrame], float]:
        return lambda rows: abs(r(rows, name)) - abs(r(rows, f"{name}_rescaled"))

    setup, gap = ["param_batch_size", "param_init"], "generalization_gap"
    means = frame.groupby(setup)[["trace_flatness", gap]].mean()
    gaps = frame.pivot(index=setup, columns="param_seed", values=gap).dropna()
    claims = [
        correlation("Figure 2: r of kappa_Tr", 0.91, frame, "trace_flatness"),
        correlation("Figure 2: the same of means over seeds", 0.91, means, "trace_flatness"),
        correlation("Figure 2: the same without the two largest gaps", 0.91,
                    frame.drop(frame[gap].nlargest(2).index), "trace_flatness"),
        bootstrap("Figure 2: share of the gap's variance between seeds", "< 0.5", gaps,
                  seed_share),
        correlation("Figure 2: r of kappa", "> 0", frame, "eigenvalue_flatness"),
        bootstrap("Figure 2: r of kappa_Tr minus r of kappa", "> 0", frame,
                  lambda rows: r(rows, "trace_flatness") - r(rows, "eigenvalue_flatness")),
        bootstrap("Figure 3: loss of abs(r) by rescaling, kappa_Tr", "< 0.01", frame,
                  change("trace_flatness")),
        bootstrap("Figure 3: the same, Hessian trace", "> 0", frame, change("hessian_trace")),
        mean("Figure 4: share of minima below the bound", "> 0.9", inside.astype(float)),
    ]  # fmt: skip
    conditions(frame, ["trace_flatness"], ["param_batch_size"])  # which has one rate
    return figure.finish(claims)


if __name__ == "__main__":
    raise SystemExit(main())
