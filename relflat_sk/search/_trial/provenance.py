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
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from sklearn.base import is_regressor
from skorch.dataset import Dataset as SkorchDataset
from torch.utils.data import DataLoader, Subset, TensorDataset

from relflat_sk._warnings import warn
from relflat_sk.measures import OwnMeasure
from relflat_sk.minima import MADE_WITH, UNITS
from relflat_sk.search._trial.description import changed_params, describe, same, with_contents
from relflat_sk.search._trial.digests import digest
from relflat_sk.search._trial.samples import describe_samples
from relflat_sk.search._trial.weight_files import check_store

__all__ = ["MADE_WITH", "check_made_with", "check_study_of"]

_OLD_DATA = "data"  # studies of earlier versions have the data only

# parameters of the objective that change its results, with the values that are left out. The number
# of processes and the size of a fleet are not among them: a fleet changes the order of sums, as
# another machine does, and trials record whether they were in one (`IN_FLEET`)
SETTINGS: dict[str, Any] = {
    "lr_scaling": None,
    "goal": "auto",
    "seeds.base": None,
    "measuring.layer": -1,
    "measuring.params": {},
}
# as the user knows them
_NAMES = {
    "seeds.base": "random_state",
    "measuring.layer": "layer",
    "measuring.params": "measure_params",
}

Record = dict[str, dict[str, str]]

# what torch's and skorch's own data sets consist of
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    DataLoader: ("dataset", "batch_size", "drop_last"),
    SkorchDataset: ("X", "y"),
    Subset: ("dataset", "indices"),
    TensorDataset: ("tensors",),
}

# parts to which later sessions may add, or from which they may leave out
_OPEN = ("held-out data", "choices", "own measures")


def check_made_with(
    study: optuna.Study, objective: Any, own: int = -1, names: Sequence[str] = ()
) -> None:
    """Refuse a study whose minima were made otherwise; record in a new study how they are made."""
    attributes = study.user_attrs
    now = _record(objective, len(study.directions), names)
    then: Record = attributes.get(MADE_WITH, {})
    others = [trial for trial in study.get_trials(deepcopy=False) if trial.number != own]
    used = any(map(_holds_result, others))
    if not then:
        used = any(_holds_result(trial) and trial.state.is_finished() for trial in others)
        then = _adopt(study, attributes, now) if used else {}
    if used:
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
    if attributes.get(MADE_WITH) != now:
        study.set_user_attr(MADE_WITH, now)


def check_study_of(trial: Any, objective: Any) -> None:
    """Check the study of a trial as `check_made_with` does, and the store, once for each study."""
    study = getattr(trial, "study", None)
    if study is not None and study.study_name not in objective.checked:
        check_made_with(study, objective, own=trial.number)
        check_store(objective.artifact_store)
        objective.checked.add(study.study_name)


def _record(objective: Any, n_objectives: int, others: Sequence[str]) -> Record:
    """Describe everything that changes the results; the first measures are the objectives."""
    space = objective.space
    fixed = set() if objective.lr_scaling is None else {"batch_size"}
    held_out = {"X_test": objective.X_test, "y_test": objective.y_test}
    search = {"measure": describe([str(name) for name in objective.names[:n_objectives]])}
    own = [name for name in (*objective.measures, *others) if isinstance(name, OwnMeasure)]
    for name, default in SETTINGS.items():
        value = attrgetter(name)(objective)
        if describe(value) != describe(default):
            search[_NAMES.get(name, name)] = describe(value)
    data = {"X": objective.X, "y": objective.y, **objective.per_sample["fit_params"]}
    return {
        "estimator": dict(_describe_estimator(objective.estimator, set(space.entries), fixed)),
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
    estimator: Any, varied: set[str], fixed: set[str], prefix: str = ""
) -> Iterable[tuple[str, str]]:
    """Describe an estimator and the estimators in it, parameter by parameter.

    Parameters that the space varies are left out, except those whose last name is in `fixed`:
    with scaled learning rates, the estimator's own batch size still has a meaning.
    """
    yield prefix.removesuffix("__") or "class", describe(type(estimator))
    children = dict(_children(estimator))
    changed = changed_params(estimator)
    for name, text in changed.items():
        if name not in children and (prefix + name not in varied or name in fixed):
            yield prefix + name, text
    for name, child in children.items():
        if isinstance(child, list):  # steps of a pipeline, by name
            yield prefix + name, describe([one[0] for one in child])
            for one in child:
                if f"{prefix}{one[0]}" in varied:
                    continue
                if hasattr(one[1], "get_params"):
                    yield from _describe_estimator(one[1], varied, fixed, f"{prefix}{one[0]}__")
                yield f"{prefix}{name} {one[0]}", describe([x for x in one[1:] if not _fits(x)])
        elif prefix + name not in varied:
            yield from _describe_estimator(child, varied, fixed, f"{prefix}{name}__")


def _children(estimator: Any) -> Iterable[tuple[str, Any]]:
    """Find the parameters of an estimator that are estimators, or lists of named estimators."""
    for name, value in estimator.get_params(deep=False).items():
        named = [one for one in value if isinstance(one, tuple)] if isinstance(value, list) else []
        if _fits(value) or any(len(one) > 1 and _fits(one[1]) for one in named):
            yield name, value


def _fits(value: Any) -> bool:
    is_object = not isinstance(value, type)
    return is_object and hasattr(value, "get_params") and hasattr(value, "fit")


def _describe_data(data: Any) -> str:
    """Describe data by shape and checksum, or else by class, length and, if known, contents."""
    found = digest(data)
    if found is not None or data is None:
        return str(found)
    if isinstance(data, bool | int | float | str):  # an argument of `fit`, such as epochs
        return describe(data)
    length = f" of length {len(data)}" if hasattr(data, "__len__") else ""
    parts = list(map(_describe_data, _parts(data))) or describe_samples(data)
    return with_contents(type(data).__name__ + length, parts)


def _parts(data: Any) -> list[Any]:
    """List what data of a known class consist of; another class may change what it holds."""
    if isinstance(data, tuple):
        return list(data)
    if isinstance(data, Mapping):
        return [part for name in sorted(data, key=str) for part in (str(name), data[name])]
    return [getattr(data, name) for name in _ATTRIBUTES.get(type(data), ())]


def _holds_result(trial: FrozenTrial) -> bool:
    """Return whether a trial is finished, failed by its own fault, or running."""
    if trial.state == TrialState.FAIL:
        return "failed" in trial.user_attrs
    return trial.state != TrialState.WAITING


def _adopt(study: optuna.Study, attributes: Mapping[str, Any], now: Record) -> Record:
    """Take over a study without a record, as far as it is known to be of the same data."""
    warn(
        f"study {study.study_name!r} has trials, but does not say how they were made: it is of an "
        "earlier version of relflat_sk, or of another program. The search takes them to be made "
        "by this estimator on these data, and goes on."
    )
    old = attributes.get(_OLD_DATA, [None, None])
    known = {name: text for name, text in zip("Xy", old, strict=True) if text is not None}
    return now | {"data": now["data"] | known}


def _differences(then: Record, now: Record) -> Iterable[str]:
    """Say what differs, one line for each name."""
    for part in ("estimator", "data", "held-out data", "search", "choices", "own measures"):
        one, other = then.get(part, {}), now[part]
        names = one.keys() | other.keys()
        if part in _OPEN:
            names = one.keys() & other.keys()
        for name in sorted(names):
            if not same(one.get(name), other.get(name)):
                before, after = (x.get(name, "the default") for x in (one, other))
                yield f"  {part}, {name}: {before} then, {after} now"
