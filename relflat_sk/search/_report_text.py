"""What a report says of a search in words: its goal, how deep the minima are, what was left out."""

import re
from typing import Any

import numpy as np
import pandas as pd
from skorch import NeuralNet

from relflat_sk.minima import is_complete, is_converged
from relflat_sk.search._trial import last_prefix, last_step, own_goals

__all__ = ["describe_depth", "describe_goal", "left_out", "parameters_of", "text_of"]


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
