"""Render a search as one HTML page: minima, plots, correlations, settings, versions."""

import base64
import datetime
import html
import io
import platform
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata, resources
from math import isnan
from numbers import Real
from string import Template
from typing import Any

import numpy as np
import pandas as pd
from skorch import NeuralNet

from relflat_sk.minima import (
    FEWEST_MINIMA,
    column_of,
    correlate,
    curves_of,
    is_complete,
    is_converged,
    parameter_columns,
    plain_name,
)
from relflat_sk.plots import (
    FlatnessGapDisplay,
    HyperparameterDisplay,
    MinimaRankingDisplay,
    TrainingCurvesDisplay,
    color_column,
    require_matplotlib,
)
from relflat_sk.search._goal import own_goals
from relflat_sk.search._results import listed
from relflat_sk.search._study import without_password
from relflat_sk.search._weights import last_prefix, last_step

# -- words -------------------------------------------------------------------------------------


def text_of(value: Any) -> str:
    """Return a value as text, without addresses in memory."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    text = value if isinstance(value, str) else repr(value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def describe_goal(search: Any) -> str:
    """Say what the candidates were trained to."""
    model = last_step(search.estimator)
    if not isinstance(model, NeuralNet):
        loss = "" if search.goal in (None, "auto") else f", at a training loss of {search.goal:g}"
        return f"Goal: the solver ends by its own tolerance{loss}."
    goals = own_goals(model)
    if goals:
        return f"Goal: {', '.join(map(text_of, goals))}, as the estimator brings it."
    plateau = "a plateau of the training loss"
    if search.goal is None:
        return f"Goal: {plateau}."
    if search.goal == "auto":
        return (
            "Goal: a twentieth of the loss of the best constant prediction, which is a depth of "
            f"20, or {plateau}."
        )
    return f"Goal: a training loss of {search.goal:g}."


def describe_depth(minima: pd.DataFrame) -> str:
    """Say how deep the minima are that are ranked."""
    ranked = minima[is_converged(minima) & is_complete(minima) & minima["depth"].notna()]
    if not len(ranked):
        return ""
    low, high = ranked["depth"].min(), ranked["depth"].max()
    losses = ranked["train_loss"]
    return (
        f"The ranked minima have depths from {low:.3g} to {high:.3g}, which are training losses "
        f"from {losses.max():.3g} to {losses.min():.3g}."
    )


def left_out(minima: pd.DataFrame) -> list[str]:
    """List why candidates are not ranked, the most frequent reason first."""
    others = minima[~(is_converged(minima) & is_complete(minima))]
    reasons = others["reason"].where(others["reason"] != "", others["state"])
    trials = others.groupby(reasons, sort=False)["trial"].apply(list)
    trials = trials.loc[sorted(trials.index, key=lambda reason: -len(trials[reason]))]
    return [
        f"{len(numbers)} x {reason} (trial{'s' * (len(numbers) > 1)} "
        f"{', '.join(map(str, sorted(numbers)))})"
        for reason, numbers in trials.items()
    ]


def parameters_of(estimator: Any) -> dict[str, str]:
    """Return all parameters of an estimator, those of the network without a pipeline's prefix."""
    prefix = last_prefix(estimator)
    params = estimator.get_params()
    short = {name: name.removeprefix(prefix) for name in params}
    names = list(short.values())
    return {
        short[name] if names.count(short[name]) == 1 else name: text_of(value)
        for name, value in params.items()
        if name != "steps"  # the steps themselves follow, by name
    }


LIBRARIES = ("relflat_sk", "torch", "skorch", "scikit-learn", "optuna", "numpy", "pandas")


def render(search: Any) -> str:
    """Render a fitted search as an HTML page that loads nothing from elsewhere."""
    require_matplotlib()
    minima = search.minima_
    kind = type(search.estimator).__name__
    by = column_of(listed(search.measure)[0])
    page = resources.files("relflat_sk.search").joinpath("report.html").read_text(encoding="utf-8")
    return Template(page).substitute(
        title=html.escape(f"Minima of {kind}, ranked by {by}"),
        summary=_summary(search),
        minima=_minima(minima),
        plots=_plots(search, by),
        correlations=_correlations(minima),
        settings=_pairs(_settings(search)),
        estimator=_pairs(parameters_of(search.estimator)),
        versions=_pairs(_versions()),
    )


def render_short(search: Any) -> str:
    """Render goal, depths and the five flattest minima, for a notebook."""
    minima = search.minima_
    by = column_of(listed(search.measure)[0])
    columns = ["rank", "trial", *parameter_columns(minima), by, "train_loss", "converged"]
    shown = minima.head().reindex(columns=columns)  # the measure may be another one by now
    return _summary(search) + str(shown.to_html(index=False, notebook=True))


def _summary(search: Any) -> str:
    """Say what was found, what was trained to, and which candidates were left out."""
    minima = search.minima_
    n_ranked = int((is_converged(minima) & is_complete(minima)).sum())
    seconds = minima["seconds"].sum()
    first = f"trial {minima['trial'].iloc[0]}, with " + ", ".join(
        f"{plain_name(name)} = {text_of(minima[name].iloc[0])}"
        for name in parameter_columns(minima)
    )
    found = (
        f"{n_ranked} of them are minima that are ranked. The flattest is {first}."
        if n_ranked
        else f"None of them is a minimum. The deepest is {first}."
    )
    parts = [
        f"{len(minima)} candidates were each trained once on all the data, in {seconds:.4g} s "
        f"altogether; {found}",
        describe_goal(search),
        describe_depth(minima),
    ]
    items = "".join(f"<li>{html.escape(reason)}</li>" for reason in left_out(minima))
    reasons = f"<p>Left out of the ranking:</p><ul>{items}</ul>" if items else ""
    return "".join(f"<p>{html.escape(part)}</p>" for part in parts if part) + reasons


# -- tables ------------------------------------------------------------------------------------


def _minima(minima: pd.DataFrame) -> str:
    """Render the table of minima, rank and trial first."""
    first = ["rank", "trial"]
    table = minima[[*first, *(name for name in minima.columns if name not in first)]]
    good = is_converged(minima) & is_complete(minima)
    return _table(table, ["" if is_good else "poor" for is_good in good])


def _table(table: pd.DataFrame, classes: list[str] | None = None) -> str:
    """Render a table whose columns can be sorted; `classes` are the CSS classes of its rows."""
    header = "".join(
        f'<th scope="col"><button type="button">{html.escape(str(name))}</button></th>'
        for name in table.columns
    )
    rows = [
        f'<tr class="{kind}">{"".join(map(_cell, values))}</tr>'
        for kind, values in zip(
            classes or [""] * len(table), table.astype(object).to_numpy(), strict=True
        )
    ]
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(value: Any) -> str:
    """Render a value in short; columns are sorted by the full value in ``data-value``."""
    if value is None or (isinstance(value, float) and isnan(value)):
        return '<td data-value=""></td>'
    if isinstance(value, Real) and not isinstance(value, bool):
        shown = f"{value:d}" if isinstance(value, int) else f"{float(value):.4g}"
        return f'<td class="number" data-value="{float(value)!r}">{shown}</td>'
    text = html.escape(text_of(value))
    return f'<td class="{_width(text)}" data-value="{text}">{text}</td>'


def _width(text: str) -> str:
    return "long" if len(text) > 40 else ""


def _pairs(values: Mapping[str, str]) -> str:
    """Render names and values as a table of two columns."""
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td class="{_width(value)}">'
        f"{html.escape(value)}</td>"
        "</tr>"
        for name, value in values.items()
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _correlations(minima: pd.DataFrame) -> str:
    """Render the correlations with the gap; empty if too few minima have one."""
    if not _has_gap(minima):
        return ""
    table = correlate(minima, random_state=0)
    return (
        "<h2>Correlation with the generalization gap</h2><p>Over all minima with a gap, with 95% "
        f'bootstrap intervals.</p><div class="scroll">{_table(table)}</div>'
    )


def _has_gap(minima: pd.DataFrame) -> bool:
    known = minima["generalization_gap"].notna() & is_converged(minima) & is_complete(minima)
    return int(known.sum()) >= FEWEST_MINIMA


# -- plots -------------------------------------------------------------------------------------


def _plots(search: Any, by: str) -> str:
    """Render the plots for which there is something to draw."""
    minima = search.minima_
    drawn: dict[str, Callable[..., Any]] = {}
    if is_converged(minima).any():
        ranking = MinimaRankingDisplay.from_minima
        drawn["Minima by rank"] = partial(ranking, search, by, random_state=0)
        if color_column(minima, "auto") is not None:
            against = HyperparameterDisplay.from_minima
            drawn["Flatness against a hyper-parameter"] = partial(against, search, measure=by)
    if _has_gap(minima):
        gap = FlatnessGapDisplay.from_minima
        drawn["Generalization gap against flatness"] = partial(gap, search, by, random_state=0)
    if curves_of(search):
        drawn["Training losses"] = partial(TrainingCurvesDisplay.from_minima, search)
    images = "".join(_image(name, draw) for name, draw in drawn.items())
    return f'<h2>Plots</h2><div class="plots">{images}</div>' if images else ""


def _image(name: str, draw: Callable[..., Any]) -> str:
    """Draw into new axes, and render the figure as an image within the page."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an optional dependency)

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    draw(ax=figure.subplots())
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(name)}" src="data:image/svg+xml;base64,{data}">'


# -- settings and versions ---------------------------------------------------------------------


def _settings(search: Any) -> dict[str, str]:
    params = search.get_params(deep=False)
    del params["estimator"]  # has a table of its own
    if params["storage"] is not None:
        params["storage"] = without_password(params["storage"], unread="a storage by URL")
    shown = {name: text_of(value) for name, value in params.items()}
    return {**shown, "study": search.study_.study_name}


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    found |= {name: metadata.version(name) for name in LIBRARIES}
    return {**found, "written": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"}
