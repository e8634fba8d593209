"""Render a search as one HTML page: minima, plots, correlations, settings, versions."""

import base64
import datetime
import html
import io
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata, resources
from numbers import Real
from string import Template
from typing import Any

import numpy as np
import pandas as pd

from relflat_sk.measures._scorer import read_measure
from relflat_sk.minima import correlate_measures
from relflat_sk.minima._correlation import FEWEST_MINIMA
from relflat_sk.minima._table import column_of, curves_of, parameter_columns, plain_name
from relflat_sk.plots import (
    FlatnessGapDisplay,
    HyperparameterDisplay,
    MinimaRankingDisplay,
    TrainingCurvesDisplay,
)
from relflat_sk.plots._base import color_column, require_matplotlib
from relflat_sk.search._measure import listed
from relflat_sk.search._results import trial_at
from relflat_sk.search._space import plain_repr
from relflat_sk.search._storage import without_password

LIBRARIES = ("relflat_sk", "torch", "skorch", "scikit-learn", "optuna", "numpy", "pandas")


def render(search: Any) -> str:
    """Render a fitted search as an HTML page that loads nothing from elsewhere."""
    require_matplotlib()
    minima, by = search.minima_, _ranking_column(search)
    page = resources.files("relflat_sk.search").joinpath("report.html").read_text(encoding="utf-8")
    # without the callbacks that skorch adds to nets
    params = {n: x for n, x in search.estimator.get_params().items() if "callbacks__" not in n}
    params.pop("steps", None)
    versions = {"Python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in LIBRARIES}
    versions["written"] = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    columns = ["rank", "trial", *minima.columns.drop(["rank", "trial"])]
    return Template(page).substitute(
        title=html.escape(f"Minima of {type(search.estimator).__name__}, ranked by {by}"),
        summary=_summary(search),
        minima=_table(minima[columns], np.where(minima["comparable"], "", "grey")),
        plots=_plots(search, by),
        correlations=_correlations(minima),
        settings=_pairs(_settings(search)),
        estimator=_pairs(params),
        versions=_pairs(versions),
    )


def render_short(search: Any) -> str:
    """Render goal, depths and the five flattest minima, for a notebook."""
    minima, by = search.minima_, _ranking_column(search)
    columns = ["rank", "trial", *parameter_columns(minima), by, "train_loss", "converged"]
    shown = minima.head().reindex(columns=columns)  # the measure may be another one by now
    return _summary(search) + str(shown.to_html(index=False, notebook=True))


def _ranking_column(search: Any) -> str:
    return column_of(read_measure(listed(search.measure)[0]).measure)


def _settings(search: Any) -> dict[str, Any]:
    """Return the parameters of a search, without its estimator, which has a table of its own."""
    params = search.get_params(deep=False)
    del params["estimator"]
    if params["storage"] is not None:
        params["storage"] = without_password(params["storage"])
    return {**params, "study": search.study_.study_name}


# -- words -------------------------------------------------------------------------------------


def _summary(search: Any) -> str:
    """Say what was found, what was trained to, and which candidates were left out."""
    minima = search.minima_
    ranked, first = minima[minima["comparable"]], minima.iloc[0]
    params = [f"{plain_name(n)} = {text_of(first[n])}" for n in parameter_columns(minima)]
    outcome = f"{len(ranked)} of them are minima that are ranked. The flattest is"
    if not len(ranked):
        outcome = "None of them is a minimum. The deepest is"
    counts = minima.loc[minima["converged"], "ended_by"].value_counts()
    ends = ", ".join(f"{what} {n}" for what, n in counts.items()) or "nothing"
    parts = [
        f"{len(minima)} candidates were each trained once on all the data, in "
        f"{minima['seconds'].sum():.4g} s altogether; {outcome} trial {first['trial']}, with "
        f"{', '.join(params)}.{_say_what_predicts(search)}",
        f"Goal of the search: {search.goal!r}. What ended the training of minima: {ends}.",
    ]
    depths, losses = ranked["depth"], ranked["train_loss"]
    if depths.notna().any():
        parts.append(
            f"The ranked minima have depths from {depths.min():.3g} to {depths.max():.3g}, which "
            f"are training losses from {losses.max():.3g} to {losses.min():.3g}."
        )
    items = "".join(f"<li>{html.escape(reason)}</li>" for reason in _left_out(minima))
    reasons = f"<p>Left out of the ranking:</p><ul>{items}</ul>" if items else ""
    return "".join(f"<p>{html.escape(part)}</p>" for part in parts) + reasons


def _say_what_predicts(search: Any) -> str:
    """Say whether the search predicts with the mean of networks or with one."""
    if hasattr(search, "ensemble_"):
        trials = sorted(int(name.removeprefix("trial")) for name, _ in search.ensemble_.estimators)
        numbers = ", ".join(map(str, trials))
        return f" The search predicts with the mean of {len(trials)}: trials {numbers}."
    if not hasattr(search, "best_estimator_"):
        return ""
    best = trial_at(search.minima_, search.best_index_)
    is_first = best == search.minima_["trial"].iloc[0]
    return f" The search predicts with {'this one' if is_first else f'trial {best}'}."


def _left_out(minima: pd.DataFrame) -> list[str]:
    """List why candidates are not ranked, the most frequent reason first."""
    unranked = minima[~minima["comparable"]]
    reasons = unranked["reason"].where(unranked["reason"] != "", unranked["state"])
    trials = unranked.groupby(reasons, sort=False)["trial"].apply(sorted)
    return [
        f"{len(numbers)} x {reason} (trial{'s' * (len(numbers) > 1)} "
        f"{', '.join(map(str, numbers))})"
        for reason, numbers in sorted(trials.items(), key=lambda item: -len(item[1]))
    ]


def text_of(value: Any) -> str:
    """Return a value as text, without addresses in memory."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, str) else plain_repr(value)


# -- tables ------------------------------------------------------------------------------------


def _table(table: pd.DataFrame, kinds: Iterable[str]) -> str:
    """Render a table whose columns the page sorts; `kinds` are CSS classes, one for each row."""
    rows = zip(table.astype(object).to_numpy(), kinds, strict=True)
    cells = [[_cell(value, kind) for value in row] for row, kind in rows]
    names = [html.escape(str(name)) for name in table.columns]
    return _html(pd.DataFrame(cells, columns=names), index=False)


def _pairs(values: Mapping[str, Any]) -> str:
    """Render names and values as a table of two columns."""
    cells = {html.escape(name): _cell(text_of(value)) for name, value in values.items()}
    return _html(pd.Series(cells).to_frame(), header=False)


def _html(cells: pd.DataFrame, **settings: Any) -> str:
    with pd.option_context("display.max_colwidth", None):
        return str(cells.to_html(border=0, escape=False, **settings))


def _cell(value: Any, kind: str = "") -> str:
    """Render a value in short; columns are sorted by the full value."""
    if pd.isna(value):
        return '<data value=""></data>'
    if isinstance(value, Real) and not isinstance(value, bool):
        shown = f"{value:d}" if isinstance(value, int) else f"{float(value):.4g}"
        return f'<data class="number {kind}" value="{float(value)!r}">{shown}</data>'
    text = html.escape(text_of(value))
    width = "long" if len(text) > 40 else ""
    return f'<data class="{width} {kind}" value="{text}">{text}</data>'


def _correlations(minima: pd.DataFrame) -> str:
    """Render the correlations with the gap; empty if too few minima have one."""
    if not _has_gap(minima):
        return ""
    table = correlate_measures(minima, random_state=0)
    return (
        "<h2>Correlation with the generalization gap</h2><p>Over all minima with a gap, with 95% "
        f'bootstrap intervals.</p><div class="scroll">{_table(table, [""] * len(table))}</div>'
    )


def _has_gap(minima: pd.DataFrame) -> bool:
    has_gap = minima["generalization_gap"].notna() & minima["comparable"]
    return int(has_gap.sum()) >= FEWEST_MINIMA


# -- plots -------------------------------------------------------------------------------------


def _plots(search: Any, by: str) -> str:
    """Render the plots for which there is something to draw."""
    minima, images = search.minima_, []
    if minima["comparable"].any():
        ranking = MinimaRankingDisplay.from_minima
        images.append(_image("Minima by rank", ranking, search, by, random_state=0))
        if color_column(minima, "auto") is not None:
            against = HyperparameterDisplay.from_minima
            name = "Flatness against a hyper-parameter"
            images.append(_image(name, against, search, measure=by))
    if _has_gap(minima):
        gap, name = FlatnessGapDisplay.from_minima, "Generalization gap against flatness"
        images.append(_image(name, gap, search, by, random_state=0))
    if curves_of(search):
        images.append(_image("Training losses", TrainingCurvesDisplay.from_minima, search))
    return f'<h2>Plots</h2><div class="plots">{"".join(images)}</div>' if images else ""


def _image(name: str, draw: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Draw into new axes, and render the figure as an image within the page."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an optional dependency)

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    draw(*args, ax=figure.subplots(), **kwargs)
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(name)}" src="data:image/svg+xml;base64,{data}">'
