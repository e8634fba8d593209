"""Tables and the diagram of `benchmarks.worth.selection`, from its stored rows."""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t

from benchmarks._harness.tasks import CHOSEN_ON, SPACES, TASKS
from benchmarks._harness.timing import table
from benchmarks._harness.ways import FEW, FORM, FORMS, SHARE, SHARES

BASE = "20%, log loss, refit"
MEAN = "average, as in a search"
IF_MOST_FIT = "flattest if most fit, else 20%"
REGRESSIONS = ("friedman", "diabetes")
FLAT = f"{FORM} at {SHARE:g}"
GROUPS = {
    "classification, data sets on which the constants were chosen": [
        name for name in TASKS if name in CHOSEN_ON and name not in REGRESSIONS
    ],
    "classification, held back": [
        name for name in TASKS if name not in CHOSEN_ON and name not in REGRESSIONS
    ],
    "classification, all": [name for name in TASKS if name not in REGRESSIONS],
    "classification, clean labels": [
        name for name in TASKS if name not in REGRESSIONS and "wrong" not in name
    ],
    "classification, wrong labels": [name for name in TASKS if "wrong" in name],
    "regression (points of R2)": list(REGRESSIONS),
}
# the ways of the table by data set, with their names in the diagram
MAIN = {
    FLAT: "flattest by comparable_flatness",
    "nearest to the mean of all": "nearest to the mean of all",
    "relative_flatness": "flattest",
    "relative_flatness, as in a search": "flattest, as FlatMinimaSearch ranks",
    "training loss": "lowest training loss",
    "mean confidence": "most confident",
    "gradient_norm": "smallest gradient of the head",
    "random": "at random",
    "5%, log loss, refit": "best by 5% held out",
    BASE: "best by 20% held out",
    "20%, accuracy, refit": "best by 20% held out, accuracy",
    "20%, log loss": "best by 20% held out, not refitted",
    "5-fold, log loss, refit": "best by 5 folds",
    f"flattest of {FEW} best of 5%": f"flattest of the {FEW} best, by 5% held out",
    f"flattest of {FEW} best of 20%": f"flattest of the {FEW} best, by 20% held out",
    "mean rank of flatness and 20%": "best by the mean rank of flatness and 20% held out",
    "5 flattest": "the mean of the 5 flattest",
    "5 lowest training loss": "the mean of the 5 lowest training losses",
    f"{FEW} best of 20%": f"the mean of the {FEW} best, by 20% held out, not refitted",
    f"{FEW} best of 20%, refit": f"the mean of the {FEW} best, by 20% held out",
    f"{FEW} random": f"the mean of {FEW} at random",
    "flatter half": "the mean of the flatter half",
    "better half of 20%, refit": "the mean of the better half, by 20% held out",
    "average of all": "the mean of all candidates",
}
DRAWN = [
    *("average of all", "flatter half", f"{FEW} best of 20%, refit", f"{FEW} random", "5 flattest"),
    *("nearest to the mean of all", FLAT, "random", "relative_flatness", "mean confidence"),
]

# rules of what to do by default: the way for classes, and for values
RULES = {
    "flattest, as in a search": ("relative_flatness, as in a search",) * 2,
    "flattest by comparable_flatness": (FLAT,) * 2,
    "the same if most fit, else hold-out": (IF_MOST_FIT, BASE),
    "nearest to the mean of all": ("nearest to the mean of all",) * 2,
    "mean rank; hold-out": ("mean rank of flatness and 20%", BASE),
    "5 flattest; hold-out": ("5 flattest", BASE),
    "5 flattest if most fit, else hold-out": ("5 flattest if most fit, else 20%", BASE),
    "average of all": ("average of all",) * 2,
    "average, as in a search": ("average, as in a search",) * 2,
    "5 best of 20%": (f"{FEW} best of 20%, refit",) * 2,
    "better half of 20%": ("better half of 20%, refit",) * 2,
}


def compare(rows: pd.DataFrame, base: str = BASE) -> pd.DataFrame:
    """Compare each way with another on the splits that have both; a row for each way, best first.

    Means are over data sets of the means over splits. The interval of 95% around the difference to
    the other way, of which the half width is given, is over splits, the data sets given, or over
    data sets if each has one split. "worst" is the largest difference of a data set.
    """
    wide = rows.pivot_table(index=["data", "split"], columns="way", values="error")
    found = []
    for way, own in rows.groupby("way"):
        difference = (wide[way] - wide[base]).dropna()
        by_data = difference.groupby("data")
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
    _print_splits(rows)
    _print_constants(rows)
    _print_groups(rows, BASE)
    for space in SPACES:
        _print_by_data(rows[rows["space"] == space], space)
    _print_rules(rows)
    if figure:
        draw(rows, figure)


def _print_groups(rows: pd.DataFrame, base: str) -> None:
    for title, names in GROUPS.items():
        for space in SPACES:
            some = rows[rows["data"].isin(names) & (rows["space"] == space)]
            if base in set(some["way"]):
                print(f"\n{title}; {space} candidates\n")
                print(_layout(compare(some, base), base))


def _print_splits(rows: pd.DataFrame) -> None:
    counts = rows[rows["way"] == BASE].groupby(["data", "space"])
    cells = [["data set", "space", "splits", "candidates that converged, mean"]]
    for (data, space), some in counts:
        cells.append([data, space, str(len(some)), f"{some['converged'].mean():.0f}"])
    print(table(cells))


def _print_constants(rows: pd.DataFrame) -> None:
    """Print the mean regret by form and share on the data sets of the choice."""
    some = rows[rows["data"].isin(CHOSEN_ON) & ~rows["data"].isin(REGRESSIONS)]
    if some.empty:
        return
    names = ", ".join(dict.fromkeys(some["data"]))
    print(f"\nregret and tau by form and loss share, on {names}: both spaces\n")
    cells = [["form", "as trained", *(f"at {share:g}" for share in SHARES)]]
    for form in FORMS:
        names = [form, *(f"{form} at {share:g}" for share in SHARES)]
        means = [_mean(some[some["way"] == name]) for name in names]
        cells.append([form, *means])
    print(table(cells))


def _mean(rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    means = rows.groupby(["data", "space"])[["regret", "tau"]].mean().mean()
    return f"{means['regret']:.2f} {means['tau']:.2f}"


def _layout(compared: pd.DataFrame, base: str) -> str:
    cells = [["way", "regret", f"minus {base}", "worst", "5 best", "tau", "fits", "splits"]]
    for row in compared.itertuples():
        cells.append([
            row.way, f"{row.regret:.2f}", f"{row.difference:+.2f} +- {row.width:.2f}",
            f"{row.worst:+.2f}", f"{row.top5:.2f}", f"{row.tau:.2f}", f"{row.cost:.2f}",
            f"{row.splits} of {row.data}",
        ])  # fmt: skip
    return table(cells)


def _print_by_data(rows: pd.DataFrame, space: str) -> None:
    print(f"\nregret by data set; {space} candidates\n")
    means = rows.pivot_table(index="data", columns="way", values="regret")
    ways = [way for way in MAIN if way in means]
    names = [name for name in TASKS if name in means.index]
    cells = [["way", *names]]
    cells += [[way, *(f"{means.loc[name, way]:.2f}" for name in names)] for way in ways]
    if FLAT in means:
        tau = rows[rows["way"] == FLAT].groupby("data")["tau"].mean()
        cells.append([f"tau of {FLAT}", *(f"{tau[name]:.2f}" for name in names)])
    if IF_MOST_FIT in means:
        own = rows[rows["way"] == IF_MOST_FIT]
        few = (own["cost"] > 1).groupby(own["data"]).sum()  # it took the hold-out
        cells.append(["splits in which few reach 0.1", *(str(few[name]) for name in names)])
    print(table(cells))


def follow(rows: pd.DataFrame, rule: tuple[str, str]) -> pd.DataFrame:
    """Return the rows of the way that a rule takes: the first for classes, else the second."""
    of_values = rows["data"].isin(REGRESSIONS)
    return rows[rows["way"] == np.where(of_values, rule[1], rule[0])]


def _print_rules(rows: pd.DataFrame) -> None:
    base = rows[rows["way"] == BASE].assign(way="base")
    for title, chosen in (("the data sets of the choice", True), ("held back", False)):
        some = rows[rows["data"].isin(CHOSEN_ON) == chosen]
        cells = [["rule", *(f"{space}, {what}" for space in SPACES for what in ("mean", "worst"))]]
        for name, rule in RULES.items():
            cells.append([name])
            for space in SPACES:
                both = pd.concat([follow(some, rule).assign(way="rule"), base])
                both = both[both["space"] == space]
                if both["way"].nunique() < 2:  # no such rows yet
                    cells[-1] += ["", ""]
                    continue
                one = compare(both, "base").set_index("way").loc["rule"]
                mean = f"{one['difference']:+.2f} +- {one['width']:.2f}"
                cells[-1] += [mean, f"{one['worst']:+.2f}"]
        print(f"\ntest error of rules minus that of {BASE}, mean and worst data set; {title}\n")
        print(table(cells))


def draw(rows: pd.DataFrame, path: str | Path) -> None:
    """Draw the gains of some ways over a hold-out, with intervals, on the data sets held back."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    names = GROUPS["classification, held back"]
    held = rows[rows["data"].isin(names) & rows["way"].isin([*DRAWN, BASE])]
    fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for space, shift in zip(SPACES, (-0.12, 0.12), strict=True):
        some = held[held["space"] == space]
        if BASE not in set(some["way"]):
            continue
        compared = compare(some).set_index("way").reindex(DRAWN)
        places = np.arange(len(DRAWN)) + shift
        ax.errorbar(
            -compared["difference"],
            places,
            xerr=compared["width"],
            fmt="o",
            label=f"{space} candidates",
        )
    ax.set_yticks(range(len(DRAWN)), [MAIN[way] for way in DRAWN])
    ax.axvline(0, color="0.7", zorder=0)
    ax.invert_yaxis()
    ax.set_xlabel("gain over the best by 20% held out, in points of accuracy (plus is good)")
    ax.legend()
    fig.savefig(path)
    plt.close(fig)
