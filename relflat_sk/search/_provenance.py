"""Record in a study how its minima are made, and refuse to add minima that are made otherwise.

The record is the user attribute `MADE_WITH` of the study: a dict of `_PARTS` and of the table's
units, each a dict from names to descriptions. A parameter that has its default is left out, so that
versions of the library with more parameters can continue a study.

Descriptions are short texts, the same in every process. Classes and functions of the user have a
checksum of their compiled code, those of installed libraries their name only.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import joblib
import numpy as np
import optuna
import torch
from optuna.trial import TrialState
from scipy import sparse
from sklearn.base import is_regressor
from torch import nn
from torch.utils.data import Dataset

from relflat_sk._models.network_of import defaults_of
from relflat_sk._network.batches import copy_rows
from relflat_sk._random import fork_rng
from relflat_sk._warnings import warn
from relflat_sk.minima._table import MADE_WITH, UNITS
from relflat_sk.search._data import LR_SCALING

_PARTS = ("estimator", "data", "held-out data", "search", "choices", "measures")
# parts to which later sessions may add, or from which they may leave out
_OPEN = ("held-out data", "choices", "measures")
# parameters that change the time that training takes, or what it shows, but not its result
_WITHOUT_EFFECT = re.compile(
    r"(^|__)(_.*|verbose|n_jobs|memory|device|num_workers|pin_memory|persistent_workers"
    r"|prefetch_factor)$"
)
_WITH_RESULT = tuple(state for state in TrialState if state != TrialState.WAITING)
_PLAIN = {type(None), bool, int, float, complex, str, bytes}
_PLAIN_SETS = ("torch", "skorch")  # libraries whose data sets are what their attributes are
_LONGEST = 300  # characters; a longer text is cut, and ends in a checksum
_DEEPEST = 6
_ROWS = 256  # rows of an array that are read at a time: it may be on disk
_READS = 8  # a sample that is changed at random is hardly ever equal in all of them

Record = dict[str, dict[str, str]]


def check_made_with(
    study: optuna.Study, objective: Any, own: int = -1, measuring: Any = None
) -> None:
    """Refuse a study whose minima were made otherwise; record in a new study how they are made.

    A `measuring` that is not the objective's measures the same minima again.
    """
    now = _record(objective, len(study.directions), measuring)
    then: Record = study.user_attrs.get(MADE_WITH, {})
    others = [
        trial
        for trial in study.get_trials(deepcopy=False, states=_WITH_RESULT)
        if trial.number != own and (trial.state != TrialState.FAIL or "failed" in trial.user_attrs)
    ]
    if then and others:
        differences = list(_differences(then, now))
        if differences:
            raise ValueError(
                f"study {study.study_name!r} was made with something else:\n"
                + "\n".join(differences)
                + "\nIts minima cannot be compared with those of this call. Give this call a "
                "study_name of its own, or undo the difference. In cross-validation leave "
                "study_name out: every fold is a search of its own."
            )
        # what earlier sessions have added stays, and so do parts that a later version has added
        now = then | now | {part: then.get(part, {}) | now[part] for part in _OPEN}
    elif any(trial.state.is_finished() for trial in others):
        warn(
            f"study {study.study_name!r} has trials, but does not say how they were made: it is of "
            "an earlier version of relflat_sk, or of another program. The search takes them to be "
            "made by this estimator on these data, and goes on."
        )
    if then != now:
        study.set_user_attr(MADE_WITH, now)


def _differences(then: Record, now: Record) -> Iterator[str]:
    """Say what differs, one line for each name."""
    for part in _PARTS:
        one, other = then.get(part, {}), now[part]
        names = one.keys() & other.keys() if part in _OPEN else one.keys() | other.keys()
        for name in sorted(names):
            before, after = (x.get(name, "the default") for x in (one, other))
            if before != after:
                yield f"  {part}, {name}: {before} then, {after} now"


def _record(objective: Any, n_objectives: int, measuring: Any) -> Record:
    """Describe everything that changes the results; the first measures are the objectives."""
    space = objective.space
    varied = set(space.entries)
    if LR_SCALING in varied:  # the rates are those of the estimator's own batch size
        varied -= {name for name in varied if name.endswith("batch_size")}
    # the number of processes and the size of a fleet are not among the settings: a fleet changes
    # the order of sums, as another machine does
    settings = {
        "measure": ([str(name) for name in objective.names[:n_objectives]], None),
        "goal": (objective.goal, "auto"),
        "random_state": (objective.seed, None),
    }
    data = {"X": objective.X, "y": objective.y, **objective.per_sample["fit_params"]}
    held_out = {"X_test": objective.X_test, "y_test": objective.y_test}
    measures = describe_measures(objective.measuring)
    return {
        "estimator": dict(_describe_estimator(objective.estimator, varied)),
        "data": describe_data(data),
        "held-out data": describe_data({n: x for n, x in held_out.items() if x is not None}),
        "search": {n: describe(one) for n, (one, default) in settings.items() if one != default},
        "choices": space.describe_choices(),
        "measures": measures | ({} if measuring is None else describe_measures(measuring)),
        UNITS: {"loss_unit": ""} if is_regressor(objective.estimator) else {},
    }


def describe_measures(measuring: Any) -> dict[str, str]:
    """Describe how each measure is taken."""
    return {
        name: _describe_measure(measuring.measures[name], way)
        for name, way in measuring.ways.items()
    }


def _describe_measure(measure: Any, way: Any) -> str:
    """Describe the arguments of a measure, and its function if it is the user's."""
    parts = [] if isinstance(measure, str) else [describe(measure)]
    parts += [f"{key}={describe(value)}" for key, value in sorted(way.arguments().items())]
    return ", ".join(parts) or "the default"


def describe_data(data: Mapping[str, Any]) -> dict[str, str]:
    """Describe data by shapes and checksums."""
    return {name: digest(one) or describe(one) for name, one in data.items()}


def _describe_estimator(
    estimator: Any, varied: set[str], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Describe an estimator and those in it, without the parameters that a space varies."""
    yield prefix.removesuffix("__") or "class", describe(type(estimator))
    changed = _changed_params(estimator, 0)
    for name, value in estimator.get_params(deep=False).items():
        inner = {name: value}
        if isinstance(value, list) and any(isinstance(x, tuple) and _fits(x[1]) for x in value):
            inner = {step: one for step, one, *_ in value}  # of a pipeline
            names = [[step, *columns] if columns else step for step, _, *columns in value]
            changed |= {name: describe(names)} | {k: describe(x) for k, x in inner.items()}
            inner = {name: names} | inner
        for part, one in inner.items():
            if _fits(one) and prefix + part not in varied:
                yield from _describe_estimator(one, varied, f"{prefix}{part}__")
            elif part in changed and prefix + part not in varied:
                yield prefix + part, changed[part]


def _fits(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "get_params") and hasattr(value, "fit")


def _changed_params(estimator: Any, depth: int) -> dict[str, str]:
    """Describe the parameters of an estimator or callback that differ from their defaults."""
    defaults, found = defaults_of(type(estimator)), {}
    for name, value in sorted(estimator.get_params(deep=False).items()):
        text = "" if _WITHOUT_EFFECT.search(name) else describe(value, depth)
        if text and not (name in defaults and text == describe(defaults[name], depth)):
            found[name] = text
    return found


# -- data --------------------------------------------------------------------------------------


def digest(data: Any) -> str | None:
    """Return shape and checksum of arrays, data frames and tensors; None for other data."""
    if sparse.issparse(data):
        matrix = data.tocsr()
        parts = [matrix.data, matrix.indices, matrix.indptr]
        return f"{data.shape} {' '.join(map(_checksum, parts))}"
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu()
        # numpy has no bfloat16
        data = (data if data.dtype != torch.bfloat16 else data.view(torch.int16)).numpy()
    if not (hasattr(data, "__array__") or isinstance(data, list)):
        return None
    try:
        array: Any = np.asarray(data)
    except (TypeError, ValueError):  # no numbers; lists of unequal length
        return None
    if not array.ndim:
        return None
    if array.dtype == object:
        array = array.astype(str)
    starts = range(0, len(array), _ROWS)
    blocks = [_checksum(copy_rows(array, slice(start, start + _ROWS))) for start in starts]
    return f"{array.shape} {_checksum(blocks)}"


# -- values, classes and functions ---------------------------------------------------------------


def describe(value: Any, depth: int = 0) -> str:
    """Describe a value, such as a parameter of an estimator."""
    text = _describe(value, depth)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({_checksum(text)})"


def _describe(value: Any, depth: int) -> str:  # noqa: PLR0911
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(describe(x, depth + 1) for x in value if not _is_logger(x)) + "]"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(describe(one, depth + 1) for one in value)) + "}"
    if isinstance(value, Mapping):
        items = sorted((repr(key), describe(one, depth + 1)) for key, one in value.items())
        return "{" + ", ".join(f"{key}: {one}" for key, one in items) + "}"
    found = None if isinstance(value, Dataset) else digest(value)
    if found is not None:
        return f"{type(value).__name__} of shape {found}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return _describe_code(value, depth)
    if depth > _DEEPEST:
        return _describe_code(type(value))
    if hasattr(value, "get_params"):
        held = _changed_params(value, depth + 1)
    else:
        held = {key: describe(one, depth + 1) for key, one in _contents(value).items()}
    parts = ", ".join(f"{key}={one}" for key, one in sorted(held.items()))
    return f"{_describe_code(type(value))}({parts})"


def _is_logger(value: Any) -> bool:
    """Return whether a value in a list is a callback of skorch that only shows or notes."""
    one = value[1] if isinstance(value, tuple) and len(value) == 2 else value
    return type(one).__module__ == "skorch.callbacks.logging"


def _contents(value: Any) -> dict[str, Any]:
    """Return what an object holds that matters; without attributes, what pickle would store."""
    if isinstance(value, nn.Module):
        held = {name: [type(one), _plain_values(vars(one))] for name, one in value.named_modules()}
        return {"modules": held, "weights": value.state_dict()}
    if isinstance(value, Dataset) and type(value).__module__.partition(".")[0] not in _PLAIN_SETS:
        return _samples(value)
    if getattr(value, "__dict__", None):
        return {key: one for key, one in vars(value).items() if not _WITHOUT_EFFECT.search(key)}
    try:
        _, *stored = value.__reduce_ex__(2)
    except TypeError:  # a lock, a file
        return {}
    return dict(zip(("arguments", "state"), stored, strict=False))


def _samples(data: Any) -> dict[str, Any]:
    """Return length and three samples of a data set; none if they are random."""
    found = {"length": len(data)} if hasattr(data, "__len__") else {}
    try:
        rows = 0, len(data) // 2, len(data) - 1
        with fork_rng(None):
            reads = [describe([data[row] for row in rows]) for _ in range(_READS)]
    except Exception:  # the user's code, which training will call again
        return found
    return found | ({"samples": reads[0]} if len(set(reads)) == 1 else {})


def _describe_code(code: Any, depth: int = 0) -> str:
    """Name a class or function; those of the user have a checksum of their code.

    A library is known by its top folder, since its modules may move, and the user's own code by
    no folder, since a script that runs is a module of another name than one that is imported.
    """
    if isinstance(code, MethodType):
        return f"{describe(code.__self__, depth + 1)}.{code.__name__}"
    name = str(getattr(code, "__qualname__", code.__name__)).rpartition("<locals>.")[2]
    if _is_installed(code):
        return f"{_module_of(code).partition('.')[0]}.{name}"
    compiled = _compiled(code)
    return f"{name} (code {_checksum(compiled)})" if compiled else name


def _module_of(code: Any) -> str:
    # ufuncs of numpy 1 and of scipy have no module, their type has
    return getattr(code, "__module__", None) or type(code).__module__


def _is_installed(code: Any) -> bool:
    """Return whether a class or function is a library's."""
    module = _module_of(code)
    top = module.partition(".")[0]
    if top == __name__.partition(".")[0] or (top in sys.stdlib_module_names and top != "__main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _compiled(code: Any) -> list[Any]:
    """List what the user's function, or a class and its bases, were compiled to.

    A class that cloudpickle makes again, as of a notebook, has no source.
    """
    if isinstance(code, FunctionType):
        defaults = (*(code.__defaults__ or ()), *sorted((code.__kwdefaults__ or {}).items()))
        held = {**inspect.getclosurevars(code).nonlocals, "defaults": defaults}
        return [_bytecode(code.__code__), _plain_values(held)]
    found = []
    for kind in code.__mro__ if isinstance(code, type) else ():
        for key, value in sorted(vars(kind).items()) if not _is_installed(kind) else ():
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(inner, FunctionType):
                found.append([key, _compiled(inner)])
            elif type(value) in {bool, int, float, str} and not key.startswith("__"):
                found.append([key, repr(value)])
    return found


def _bytecode(code: CodeType) -> list[Any]:
    constants = [_bytecode(x) if isinstance(x, CodeType) else describe(x) for x in code.co_consts]
    return [code.co_code, code.co_names, constants]


def _plain_values(held: Mapping[str, Any]) -> list[str]:
    """Describe those values that nothing changes in place: numbers, texts, tuples of these."""
    hidden = {name for name in held if name[0] == "_" or name == "training"}
    plain = {name: one for name, one in held.items() if name not in hidden and _is_plain(one)}
    return [f"{name}={value!r}" for name, value in sorted(plain.items())]


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN


def _checksum(value: Any) -> str:
    return str(joblib.hash(value))[:8]
