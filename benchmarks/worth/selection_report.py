"""Tables and the diagram of `benchmarks.worth.selection`, from its stored rows."""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t

from benchmarks._harness.tasks import CHOSEN_ON, SPACES, TASKS
from benchmarks._harness.ways import FEW, FORM, FORMS, SHARE, SHARES

BASE = "20%, log loss, refit"
MEAN = "average, as in a search"
REGRESSIONS = ("friedman", "diabetes")
FLAT = f"{FORM} at {SHARE:g}"
CLASSES = [name for name in TASKS if name not in REGRESSIONS]
HELD_BACK = "classification, held back"
GROUPS = {
    "classification, data sets on which the constants were chosen": [
        name for name in CLASSES if name in CHOSEN_ON
    ],
    HELD_BACK: [name for name in CLASSES if name not in CHOSEN_ON],
    "classification, all": CLASSES,
    "classification, clean labels": [name for name in CLASSES if "wrong" not in name],
    "classification, wrong labels": [name for name in CLASSES if "wrong" in name],
    "regression (points of R2)": list(REGRESSIONS),
}
# the ways of the diagram, with their names there
DRAWN = {
    "average of all": "the mean of all candidates",
    "flatter half": "the mean of the flatter half",
    f"{FEW} best of 20%, refit": f"the mean of the {FEW} best, by 20% held out",
    f"{FEW} random": f"the mean of {FEW} at random",
    "5 flattest": "the mean of the 5 flattest",
    "nearest to the mean of all": "nearest to the mean of all",
    FLAT: "flattest by comparable_flatness",
    "random": "at random",
    "relative_flatness": "flattest",
    "mean confidence": "most confident",
}
# the ways of the table by data set
MAIN = [
    *DRAWN, "relative_flatness, as in a search", "training loss", "gradient_norm",
    "5%, log loss, refit", BASE, "20%, accuracy, refit", "20%, log loss", "5-fold, log loss, refit",
    "5 lowest training loss", "better half of 20%, refit",
]  # fmt: skip


def compare(rows: pd.DataFrame, base: str = BASE) -> pd.DataFrame:
    """Compare each way with another on the splits that have both; a row for each way, best first.

    Means are over data sets of the means over splits. The interval of 95% around the difference to
    the other way, of which the half width is given, is over splits, the data sets given, or over
    data sets if each has one split. "worst" is the largest difference of a data set.
    """
    wide = rows.pivot_table(index=["data", "split"], columns="way", values="error")
    found = []
    for way, own in rows.groupby("way"):
        by_data = (wide[way] - wide[base]).dropna().groupby("data")
        mean, n = by_data.mean(), by_data.size()
        spread, freedom = by_data.var().fillna(0), int((n - 1).sum())
        many = freedom > 0 and bool((n > 1).all())
        width = np.sqrt((spread / n).sum()) / len(n) * t.ppf(0.975, freedom) if many else np.nan
        if freedom == 0 and len(n) > 1:
            width = mean.sem() * t.ppf(0.975, len(n) - 1)
        means = own.groupby("data")[["regret", "top5", "tau", "cost"]].mean().mean()
        found.append({
            "way": way, **means, "difference": mean.mean(), "width": width,
            "worst": mean.max(), "data": len(n), "splits": int(n.sum()),
        })  # fmt: skip
    return pd.DataFrame(found).sort_values("regret", ignore_index=True)


def report(rows: pd.DataFrame, figure: str | Path | None = None) -> None:
    """Print all tables, and draw the diagram if a path is given."""
    if rows.empty:
        print("no rows yet: nothing to compare")
        return
    if BASE not in set(rows["way"]):  # nothing was held out
        _print_groups(rows, MEAN)
        return
    splits = rows[rows["way"] == BASE].groupby(["data", "space"])["converged"]
    print("splits, and mean number of candidates that converged")
    print(splits.agg(["size", "mean"]).round().to_string())
    _print_constants(rows)
    _print_groups(rows, BASE)
    for space in SPACES:
        print(f"\nregret by data set; {space} candidates\n")
        some = rows[rows["space"] == space]
        regrets = some.pivot_table(index="way", columns="data", values="regret")
        regrets.loc[f"tau of {FLAT}"] = some[some["way"] == FLAT].groupby("data")["tau"].mean()
        _print(regrets.reindex(index=[*MAIN, f"tau of {FLAT}"], columns=TASKS))
    if figure:
        draw(rows, figure)


def _print(means: pd.DataFrame) -> None:
    means = means.dropna(how="all").dropna(axis=1, how="all")
    print(means.to_string(float_format="{:.2f}".format, na_rep=""))


def _print_groups(rows: pd.DataFrame, base: str) -> None:
    for title, names in GROUPS.items():
        for space in SPACES:
            some = rows[rows["data"].isin(names) & (rows["space"] == space)]
            if base not in set(some["way"]):
                continue
            table = compare(some, base).set_index("way")
            for name in ("difference", "worst"):
                table[name] = table[name].map("{:+.2f}".format)
            print(f"\n{title}; {space} candidates; differences to {base}\n")
            _print(table.rename(columns={"width": "+-", "top5": "5 best", "cost": "fits"}))


def _print_constants(rows: pd.DataFrame) -> None:
    """Print the mean regret and tau by form and share on the data sets of the choice."""
    some = rows[rows["data"].isin(CHOSEN_ON) & rows["data"].isin(CLASSES)]
    means = some.groupby(["way", "data", "space"])[["regret", "tau"]].mean().groupby("way").mean()
    print("\nregret and tau by form and loss share, on the data sets of the choice: both spaces\n")
    names = [f"{form}{end}" for form in FORMS for end in ("", *(f" at {s:g}" for s in SHARES))]
    _print(means.reindex(names))


def draw(rows: pd.DataFrame, path: str | Path) -> None:
    """Draw the gains of some ways over a hold-out, with intervals, on the data sets held back."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    held = rows[rows["data"].isin(GROUPS[HELD_BACK]) & rows["way"].isin([*DRAWN, BASE])]
    fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for space, shift in zip(SPACES, (-0.12, 0.12), strict=True):
        some = held[held["space"] == space]
        if BASE not in set(some["way"]):
            continue
        found = compare(some).set_index("way").reindex(DRAWN)
        gains, places = -found["difference"], np.arange(len(DRAWN)) + shift
        ax.errorbar(gains, places, xerr=found["width"], fmt="o", label=f"{space} candidates")
    ax.set_yticks(range(len(DRAWN)), DRAWN.values())
    ax.axvline(0, color="0.7", zorder=0)
    ax.invert_yaxis()
    ax.set_xlabel("gain over the best by 20% held out, in points of accuracy (plus is good)")
    ax.legend()
    fig.savefig(path)
    plt.close(fig)
