"""Record in a study how its minima are made, and refuse to add minima that are made otherwise.

The record is a user attribute of the study: a short text for each parameter of the estimator, each
part of the data, each measure and each setting. Classes and functions of the user have a checksum
of their source: an edited comment counts.
"""

import inspect
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import optuna
import torch
from optuna.trial import TrialState
from sklearn.base import is_regressor

from relflat_sk._warnings import warn
from relflat_sk.minima._table import UNITS
from relflat_sk.search._data import LR_SCALING
from relflat_sk.search._measure import Measuring
from relflat_sk.search._recipe import Recipe
from relflat_sk.search._space import PLAIN, plain_repr

MADE_WITH = "made_with"  # user attribute of a study
# parts of the record to which later sessions may add
_OPEN = ("X_test", "y_test", "measure ")
# parameters that change the time that training takes, or what it shows, but not its result
_WITHOUT_EFFECT = re.compile(
    r"(^|__)(_.*|verbose|n_jobs|memory|device|num_workers|pin_memory|persistent_workers"
    r"|prefetch_factor|train_split|callbacks__.*)$"
)
_DEEPEST, _LONG = 6, 100


def check_made_with(
    study: optuna.Study,
    recipe: Recipe,
    *,
    direction: str = "minimize",
    current: int = -1,  # a trial that has begun by now
    also: Measuring | None = None,  # further measures
) -> None:
    """Refuse a study whose minima were made otherwise; record in a new study how they are made."""
    directions = [direction.name.lower() for direction in study.directions]
    if directions != (needed := [direction] * len(recipe.task.ranking)):
        raise ValueError(
            f"the directions of study {study.study_name!r} are {directions}, and must be {needed}. "
            "Create it so, or give this call a study_name of its own."
        )
    now, then = _record(recipe), study.user_attrs.get(MADE_WITH, {})
    now |= {} if also is None else _measures(also)
    of_results = TrialState.COMPLETE, TrialState.PRUNED
    has_results = any(
        trial.state in of_results or "failed" in trial.user_attrs
        for trial in study.get_trials(deepcopy=False)
        if trial.number != current
    )
    if has_results and not then:
        raise ValueError(
            f"study {study.study_name!r} does not say how its minima were made, as of an earlier "
            "version. rank_minima(study) shows them. Give this call a study_name of its own."
        )
    if has_results:
        both = now.keys() & then.keys()
        differences = [
            f"  {name}: {then.get(name, 'nothing')} then, {now.get(name, 'nothing')} now"
            for name in sorted(now.keys() | then.keys())
            if then.get(name) != now.get(name) and (name in both or not name.startswith(_OPEN))
        ]
        if differences:
            raise ValueError(
                f"study {study.study_name!r} was made with something else:\n"
                + "\n".join(differences)
                + "\nGive this call a study_name of its own, or undo the difference. In "
                "cross-validation leave study_name out: every fold is a search of its own."
            )
        now = then | now
    if then != now:
        study.set_user_attr(MADE_WITH, now)
        study.set_user_attr(UNITS, {"loss_unit": ""} if is_regressor(recipe.task.estimator) else {})


def _record(recipe: Recipe) -> dict[str, str]:
    """Describe everything that changes the results."""
    task, space = recipe.task, recipe.space
    varied = set(space.entries)
    if LR_SCALING in varied:  # the rates are those of the estimator's own batch size
        varied -= {name for name in varied if name.endswith("batch_size")}
    params = task.estimator.get_params()
    data = {"X": task.X, "y": task.y, "X_test": task.X_test, "y_test": task.y_test}
    parts = {
        "estimator": type(task.estimator),
        **{n: x for n, x in params.items() if n not in varied and not _WITHOUT_EFFECT.search(n)},
        **{name: value for name, value in data.items() if value is not None},
        **{f"fit {name}": value for name, value in task.fit_params.items()},
        "search objectives": list(task.ranking),
        "search goal": task.goal,
        "search random_state": recipe.seed,
        **{f"space {name}": entry for name, entry in space.described().items()},
    }
    return {name: describe(part) for name, part in parts.items()} | _measures(task.measuring)


def _measures(measuring: Measuring) -> dict[str, str]:
    """Describe how each measure is taken, and the functions of the user."""
    return {
        f"measure {name}": describe([measuring.measures[name], way.arguments()])
        for name, way in measuring.ways.items()
    }


def describe(value: Any, depth: int = 0) -> str:
    """Describe a value in a short text, the same in every process."""
    text = _describe(value, depth)
    return text if len(text) <= 200 else f"{text[:200]}... ({joblib.hash(text)[:8]})"


def _describe(value: Any, depth: int) -> str:  # noqa: C901, PLR0911
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().double().numpy()
    if isinstance(value, np.ndarray):
        return f"{value.shape} {_hash(np.ascontiguousarray(value))}"
    if inspect.isclass(value) or inspect.isroutine(value):
        return _describe_code(value)
    if depth > _DEEPEST:
        return _describe_code(type(value))
    if isinstance(value, Mapping):
        items = (f"{key!r}: {describe(item, depth + 1)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple) and len(value) < _LONG:
        return "[" + ", ".join(describe(item, depth + 1) for item in value) + "]"
    if hasattr(value, "get_params"):  # those of estimators have a name of their own
        held = {} if hasattr(value, "fit") else value.get_params(deep=False)
    elif isinstance(value, torch.nn.Module):
        plain = {n: x for n, x in vars(value).items() if isinstance(x, PLAIN) and n != "training"}
        held = {**plain, "layers": plain_repr(value), **value.state_dict()}
    elif hasattr(value, "shape") or not getattr(value, "__dict__", None):
        return f"{type(value).__name__} {getattr(value, 'shape', '')} {_hash(value)}"
    else:
        held = {name: x for name, x in vars(value).items() if not name.startswith("_")}
    return _describe_code(type(value)) + (describe(held, depth + 1) if held else "")


def _hash(value: Any) -> str:
    """Return a checksum of a value's contents, or of its text if they cannot be read."""
    try:
        return str(joblib.hash(value))[:8]
    except Exception as error:  # pickling runs code of any class
        text = plain_repr(value)
        warn(
            f"{text} cannot be pickled ({type(error).__name__}: {error}). So a search that is "
            "resumed notices another one only if its repr is another one."
        )
        return str(joblib.hash(text))[:8]


def _describe_code(code: Any) -> str:
    """Name a class or function; those of the user have a checksum of their source."""
    name = str(getattr(code, "__qualname__", code)).rpartition("<locals>.")[2]
    parts = code.__mro__ if inspect.isclass(code) else [code]
    sources = [_source(part) for part in parts if not _is_installed(part)]
    return f"{name} ({joblib.hash(sources)[:8]})" if sources else name


def _is_installed(code: Any) -> bool:
    """Return whether a class or function is a library's."""
    module = getattr(code, "__module__", None) or type(code).__module__
    top = module.partition(".")[0]
    if top == __name__.partition(".")[0] or (top in sys.stdlib_module_names and top != "__main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


# Python's parser, by which `inspect` finds a class, fails in several threads at once
_PARSER = threading.Lock()


def _source(code: Any) -> str:
    """Return the source of a class or function, or its text if there is none."""
    try:
        with _PARSER:
            return inspect.getsource(code)
    except (OSError, TypeError):  # typed at a prompt
        return plain_repr(code)
