"""Record in a study how its minima are made, and refuse to add minima that are made otherwise.

The record is the user attribute `MADE_WITH` of the study: a dict with the parts below, each a dict
from names to descriptions. A parameter that has its default is left out, so that versions of the
library with more parameters can continue a study.

================  ================================================================================
part              content
================  ================================================================================
``estimator``     class and parameters, without those in the space
``data``          shapes and checksums of X and y
``held-out data`` shapes and checksums of X_test and y_test; may be added later
``search``        measures that are objectives, seed, and all other settings of the objective
``choices``       values of the space that Optuna knows by a label only; may be added later
``own measures``  the user's functions among the measures; may be added later
``units``         an empty unit of the loss for regressors, not compared
================  ================================================================================

Descriptions are short texts, the same in every process. Classes and functions of the user have a
checksum of their source, those of installed libraries their name only: another version of a library
may continue a study.
"""

import functools
import inspect
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import joblib
import numpy as np
import optuna
import torch
from optuna.trial import FrozenTrial, TrialState
from scipy import sparse
from sklearn.base import is_regressor
from skorch.dataset import Dataset as SkorchDataset
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from relflat_sk._network import as_row_source, copy_rows, is_row_source
from relflat_sk._random import fork_rng
from relflat_sk._warnings import warn
from relflat_sk.measures import OwnMeasure
from relflat_sk.minima import MADE_WITH, UNITS

# parameters of the objective that change its results, with the values that are left out and the
# names that users know. The number of processes and the size of a fleet are not among them: a
# fleet changes the order of sums, as another machine does
_SETTINGS: dict[str, tuple[Any, str]] = {
    "lr_scaling": (None, "lr_scaling"),
    "goal": ("auto", "goal"),
    "seed": (None, "random_state"),
    "measuring.layer": (-1, "layer"),
    "measuring.params": ({}, "measure_params"),
}
# parts to which later sessions may add, or from which they may leave out
_OPEN = ("held-out data", "choices", "own measures")
# what torch's and skorch's own data sets consist of
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    DataLoader: ("dataset", "batch_size", "drop_last"),
    SkorchDataset: ("X", "y"),
    Subset: ("dataset", "indices"),
    TensorDataset: ("tensors",),
}
# parameters that change the time that training takes, or what it shows, but not its result
_WITHOUT_EFFECT = re.compile(
    r"(^|__)(_.*|verbose|n_jobs|memory|device|num_workers|pin_memory|persistent_workers"
    r"|prefetch_factor)$"
)
_PLAIN = {type(None), bool, int, float, complex, str, bytes}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST = 300  # characters; a longer text is cut, and ends in a checksum
_DEEPEST = 6
_ROWS = 256  # rows of an array that are read at a time: it may be on disk
_READS = 8  # a sample that is changed at random is hardly ever equal in all of them

Record = dict[str, dict[str, str]]


def check_made_with(
    study: optuna.Study, objective: Any, own: int = -1, names: Sequence[str] = ()
) -> None:
    """Refuse a study whose minima were made otherwise; record in a new study how they are made."""
    attributes = study.user_attrs
    now = _record(objective, len(study.directions), names)
    then: Record = attributes.get(MADE_WITH, {})
    others = [trial for trial in study.get_trials(deepcopy=False) if trial.number != own]
    if then and any(map(_holds_result, others)):
        differences = list(_differences(then, now))
        if differences:
            raise ValueError(
                f"study {study.study_name!r} was made with something else:\n"
                + "\n".join(differences)
                + "\nIts minima cannot be compared with those of this call. Give this call a "
                "study_name of its own, or undo the difference. In cross-validation leave "
                "study_name out: every fold is a search of its own."
            )
        for part in _OPEN:  # what earlier sessions have added stays
            now[part] = then.get(part, {}) | now[part]
        now = then | now  # and so do parts that a later version has added
    elif any(_holds_result(trial) and trial.state.is_finished() for trial in others):
        warn(
            f"study {study.study_name!r} has trials, but does not say how they were made: it is of "
            "an earlier version of relflat_sk, or of another program. The search takes them to be "
            "made by this estimator on these data, and goes on."
        )
    if then != now:
        study.set_user_attr(MADE_WITH, now)


def _holds_result(trial: FrozenTrial) -> bool:
    """Return whether a trial is finished, failed by its own fault, or running."""
    if trial.state == TrialState.FAIL:
        return "failed" in trial.user_attrs
    return trial.state != TrialState.WAITING


def _differences(then: Record, now: Record) -> Iterator[str]:
    """Say what differs, one line for each name."""
    for part in ("estimator", "data", "held-out data", "search", "choices", "own measures"):
        one, other = then.get(part, {}), now[part]
        both, either = one.keys() & other.keys(), one.keys() | other.keys()
        for name in sorted(both if part in _OPEN else either):
            if one.get(name) != other.get(name):
                before, after = (x.get(name, "the default") for x in (one, other))
                yield f"  {part}, {name}: {before} then, {after} now"


def _record(objective: Any, n_objectives: int, others: Sequence[str]) -> Record:
    """Describe everything that changes the results; the first measures are the objectives."""
    space = objective.space
    # with scaled learning rates, the estimator's own batch size has a meaning if others are drawn
    kept = set() if objective.lr_scaling is None else {"batch_size"}
    held_out = {"X_test": objective.X_test, "y_test": objective.y_test}
    search = {"measure": describe([str(name) for name in objective.names[:n_objectives]])}
    for attribute, (default, name) in _SETTINGS.items():
        text = describe(attrgetter(attribute)(objective))
        if text != describe(default):
            search[name] = text
    data = {"X": objective.X, "y": objective.y, **objective.per_sample["fit_params"]}
    own = [name for name in (*objective.measures, *others) if isinstance(name, OwnMeasure)]
    return {
        "estimator": dict(_describe_estimator(objective.estimator, set(space.entries), kept)),
        "data": {name: _describe_data(one) for name, one in data.items()},
        "held-out data": {
            name: _describe_data(one) for name, one in held_out.items() if one is not None
        },
        "search": search,
        "choices": space.describe_choices(),
        "own measures": {str(name): describe(name.function) for name in own},
        UNITS: {"loss_unit": ""} if is_regressor(objective.estimator) else {},
    }


def _describe_estimator(
    estimator: Any, varied: set[str], kept: set[str], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Describe an estimator and those in it, without the parameters that a space varies.

    Parameters whose last name is in `kept` are described all the same.
    """
    yield prefix.removesuffix("__") or "class", describe(type(estimator))
    changed = _changed_params(estimator, 0)
    for name, value in estimator.get_params(deep=False).items():
        if prefix + name in varied and name not in kept:
            continue
        if _fits(value):
            yield from _describe_estimator(value, varied, kept, f"{prefix}{name}__")
        elif _is_named_estimators(value):  # the steps of a pipeline
            yield prefix + name, describe([one[0] for one in value])
            for inner, one, *others in value:
                if _fits(one) and prefix + inner not in varied:
                    yield from _describe_estimator(one, varied, kept, f"{prefix}{inner}__")
                    yield f"{prefix}{name} {inner}", describe(others)
                elif prefix + inner not in varied:
                    yield f"{prefix}{name} {inner}", describe([one, *others])
        elif name in changed:
            yield prefix + name, changed[name]


def _fits(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "get_params") and hasattr(value, "fit")


def _is_named_estimators(value: Any) -> bool:
    named = [one for one in value if isinstance(one, tuple)] if isinstance(value, list) else []
    return any(len(one) > 1 and _fits(one[1]) for one in named)


def _changed_params(estimator: Any, depth: int) -> dict[str, str]:
    """Describe the parameters of an estimator or callback that differ from their defaults."""
    defaults: dict[str, Any] = {}
    for kind in reversed(type(estimator).__mro__):
        if "__init__" in vars(kind) and kind is not object:
            defaults |= inspect.signature(kind).parameters
    found = {
        name: describe(value, depth)
        for name, value in sorted(estimator.get_params(deep=False).items())
        if not _WITHOUT_EFFECT.search(name)
    }
    return {
        name: text
        for name, text in found.items()
        if name not in defaults or text != describe(defaults[name].default, depth)
    }


# -- data --------------------------------------------------------------------------------------


def digest(data: Any) -> str | None:
    """Return shape and checksum of arrays, data frames and tensors; None for other data."""
    if sparse.issparse(data):
        matrix = data.tocsr()
        parts = [matrix.data, matrix.indices, matrix.indptr]
        return f"{data.shape} {' '.join(map(_checksum, parts))}"
    if isinstance(data, Mapping):
        found = {str(key): digest(one) for key, one in sorted(data.items())}
        return None if None in found.values() else str(found)
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu()
        # numpy has no bfloat16
        data = (data if data.dtype != torch.bfloat16 else data.view(torch.int16)).numpy()
    on_disk = is_row_source(data)
    if not (on_disk or hasattr(data, "__array__") or isinstance(data, list)):
        return None
    try:
        array: Any = as_row_source(data) if on_disk else np.asarray(data)
    except (TypeError, ValueError):  # no numbers; lists of unequal length
        return None
    if not array.ndim:
        return None
    if array.dtype == object:
        array = array.astype(str)
    starts = range(0, len(array), _ROWS)
    blocks = [_checksum(copy_rows(array, slice(start, start + _ROWS))) for start in starts]
    return f"{array.shape} {_checksum(blocks)}"


def _describe_data(data: Any) -> str:
    """Describe data by shape and checksum, or else by class, length and, if known, contents."""
    found = digest(data)
    if found is not None or data is None:
        return str(found)
    if isinstance(data, bool | int | float | str):  # an argument of `fit`, such as epochs
        return describe(data)
    length = f" of length {len(data)}" if hasattr(data, "__len__") else ""
    parts = list(map(_describe_data, _parts(data))) or _describe_samples(data)
    return _with_contents(type(data).__name__ + length, parts)


def _parts(data: Any) -> list[Any]:
    """List what data of a known class consist of; another class may change what it holds."""
    if isinstance(data, tuple):
        return list(data)
    if isinstance(data, Mapping):
        return [part for name in sorted(data, key=str) for part in (str(name), data[name])]
    return [getattr(data, name) for name in _ATTRIBUTES.get(type(data), ())]


def _describe_samples(data: Any) -> list[str]:
    """Describe the first, the middle and the last sample of a data set, if they are not random."""
    if not isinstance(data, Dataset) or isinstance(data, IterableDataset):
        return []
    # samples may draw from the global random states
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        n = len(data)  # type: ignore[arg-type]
        rows = sorted({0, n // 2, n - 1})
        with fork_rng(None):
            reads = [[describe(data[row]) for row in rows] for _ in range(_READS)]
    except Exception:  # the user's code, which training will call again
        return []
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)
    return reads[0] if all(read == reads[0] for read in reads) else []


# -- values, classes and functions ---------------------------------------------------------------


def describe(value: Any, depth: int = 0) -> str:
    """Describe a value, such as a parameter of an estimator."""
    text = _describe(value, depth)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({_checksum(text)})"


def _describe(value: Any, depth: int) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, Mapping | list | tuple | Set):
        return _describe_container(value, depth + 1)
    if isinstance(value, nn.Module):
        return _describe_module(value)
    found = digest(value)
    if found is not None:
        return f"{type(value).__name__} of shape {found}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return _describe_code(value, depth)
    return _describe_object(value, depth)


def _describe_container(value: Any, depth: int) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(describe(one, depth) for one in value if _matters(one)) + "]"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(describe(one, depth) for one in value)) + "}"
    items = sorted((repr(key), describe(one, depth)) for key, one in value.items())
    return "{" + ", ".join(f"{key}: {one}" for key, one in items) + "}"


def _matters(value: Any) -> bool:
    """Return whether a value in a list changes training; skorch's loggers do not."""
    one = value[1] if isinstance(value, tuple) and len(value) == 2 else value
    return type(one).__module__ != "skorch.callbacks.logging"


def _describe_module(module: nn.Module) -> str:
    """Describe a network by its class, its weights, and the numbers and texts in its modules."""
    parts = [_ADDRESS.sub("", repr(module))]
    parts += [f"{name} {digest(one)}" for name, one in module.state_dict().items()]
    for name, part in module.named_modules():
        if not _is_installed(type(part)):
            own = {key: one for key, one in vars(part).items() if key != "training"}
            parts += [f"{name}.{text}" for text in _plain_values(own.items())]
    return _with_contents(_describe_code(type(module), 0), parts)


def _describe_object(value: Any, depth: int) -> str:
    """Describe any other object by its class and its parameters or public attributes."""
    name = _describe_code(type(value), depth)
    if isinstance(value, functools.partial):
        return describe(["partial", value.func, *value.args, value.keywords], depth + 1)
    if isinstance(value, np.random.RandomState | np.random.Generator):
        return f"{name}({_checksum(value)})"
    if isinstance(value, torch.Generator):
        return f"{name}({digest(value.get_state())})"
    if depth > _DEEPEST:
        return name
    if hasattr(value, "get_params"):
        params = _changed_params(value, depth + 1)
    elif getattr(value, "__dict__", None) and not isinstance(value, Path):
        params = {
            key: describe(one, depth + 1)
            for key, one in sorted(vars(value).items())
            if not key.startswith("_")
        }
    else:
        return f"{name}({_ADDRESS.sub('', repr(value))})"
    return f"{name}({', '.join(f'{key}={one}' for key, one in params.items())})"


def _describe_code(code: Any, depth: int) -> str:
    """Name a class or function; those of the user have a checksum of their source.

    A library is known by its top folder, since its modules may move, and the user's own code by
    no folder, since a script that runs is a module of another name than one that is imported.
    """
    if isinstance(code, MethodType):
        return f"{describe(code.__self__, depth + 1)}.{code.__name__}"
    name = str(getattr(code, "__qualname__", code.__name__)).rpartition("<locals>.")[2]
    if _is_installed(code):
        return f"{_module_of(code).partition('.')[0]}.{name}"
    source = list(_sources(code))
    text = f"{name} (source {_checksum(source)})" if source else name
    if not isinstance(code, FunctionType):
        return text
    held = dict(inspect.getclosurevars(code).nonlocals)
    defaults = (*(code.__defaults__ or ()), *(code.__kwdefaults__ or {}).items())
    if defaults:
        held["defaults"] = defaults
    return _with_contents(text, list(_plain_values(held.items())))


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


def _sources(code: Any) -> Iterator[str]:
    """Yield the source of a user's function, or of the methods of a class and its bases.

    A class is read method by method, which also works in notebooks.
    """
    if isinstance(code, FunctionType) and code.__name__ == "<lambda>":
        yield str(_bytecode(code.__code__))  # its lines hold other arguments, too
    elif isinstance(code, FunctionType):
        with suppress(OSError, TypeError):  # typed at a prompt
            yield inspect.getsource(code)
    for kind in code.__mro__ if isinstance(code, type) else ():
        for key, value in sorted(vars(kind).items()) if not _is_installed(kind) else ():
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(inner, FunctionType):
                yield from (f"{key} {source}" for source in _sources(inner))
            elif type(value) in {bool, int, float, str} and not key.startswith("__"):
                yield f"{key} {value!r}"


def _bytecode(code: CodeType) -> list[Any]:
    constants = [_bytecode(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts]
    return [code.co_code, code.co_names, constants]


def _plain_values(named: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Describe those values that nothing changes in place: numbers, texts, tuples of these."""
    for name, value in sorted(named):
        if not name.startswith("_") and _is_plain(value):
            yield f"{name}={value!r}"


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN


def _checksum(value: Any) -> str:
    return str(joblib.hash(value))[:8]


def _with_contents(text: str, parts: Sequence[str]) -> str:
    """Append a checksum of what a value holds to its description."""
    return f"{text} (contents {_checksum(list(parts))})" if parts else text
