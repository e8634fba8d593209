"""Rank models that are trained already: fitted estimators, checkpoints, adapters."""

import copy
import json
import pickle
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil, isfinite, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_memory
from skorch import NeuralNet
from torch import Tensor, nn
from tqdm import tqdm

from relflat_sk._models.network_of import final_estimator
from relflat_sk._network.borrowing import borrowed, unwrapped
from relflat_sk._network.network import Network, primary_output
from relflat_sk._random import draw_seed, seed_from, seeded
from relflat_sk._warnings import warn
from relflat_sk.minima import rank_minima
from relflat_sk.minima._table import PARAM_PREFIX, list_reasons, parameter_columns, table_of_rows
from relflat_sk.search._data import TrainingData, check_held_out
from relflat_sk.search._failures import KEPT, CallError, failure_record
from relflat_sk.search._goal import record_verdict
from relflat_sk.search._measure import Measuring, measure_held_out, record_measures
from relflat_sk.search._provenance import describe, describe_data, describe_measures
from relflat_sk.search._results import WRONG_LABELS, listed, warn_if_few_fit
from relflat_sk.search._space import PLAIN, label_of

_SAME_LOSS = 1e-3  # up to which share losses of a constant are those of one criterion

__all__ = ["rank_models"]


def rank_models(  # noqa: PLR0913
    models: Any,
    X: Any,
    y: Any,
    *,
    module: Any = None,
    measure: Any = "comparable_flatness",
    criterion: Any = None,
    X_test: Any = None,
    y_test: Any = None,
    sample_weight: Any = None,
    random_state: Any = None,
    memory: Any = None,
    verbose: int = 0,
) -> pd.DataFrame:
    """Rank trained models, flattest first: fitted estimators, checkpoints of a network, adapters.

    The table has the columns of ``FlatMinimaSearch.minima_``, so that `rank_minima`,
    `correlate_measures`, `granulated_kendall` and the displays take it. One model is in memory at
    a time, if `models` is an iterator, or holds paths.

    Parameters
    ----------
    models : dict, list, iterator or path
        The models, in a dict with their names. Each is a fitted model as `relative_flatness` takes
        it, or weights for `module`: a state dict; a file of `torch.save` or safetensors; a
        checkpoint of Lightning; the folder of a checkpoint of transformers, or of an adapter of
        PEFT. The path of a folder with several of these stands for all of them, in the order of
        the numbers in their names.
    X : array, data frame, tensor, dict or Dataset of n samples
        The training data, as the models take them.
    y : array of shape (n, ...)
        Labels, as in training; None for a Dataset that has them inside.
    module : nn.Module or fitted skorch net, optional
        The network that weights are loaded into, which gets its own weights back. Names of the
        weights may have a prefix, as in a checkpoint of a larger module. An adapter is put on a
        copy of `module`; if that is a ``PeftModel``, the adapter's weights are loaded into it.
    measure : str, callable, FlatnessScorer or sequence of these, default="comparable_flatness"
        The measure that ranks, and further ones: names, see `get_measure_names`, functions, or
        scorers with the layer and the arguments of a measure, as in `FlatMinimaSearch`. See Notes
        for the layers of adapters.
    criterion : torch loss, optional
        The loss; needed for bare modules only.
    X_test, y_test : as `X` and `y`, optional
        Held-out data, of the same or another type, for the columns ``test_loss``,
        ``generalization_gap`` and ``test_score``.
    sample_weight : array of shape (n,), optional
        Weight of each training sample; one if None.
    random_state : int, RandomState or None, default=None
        Seed of the probes, the same for all models.
    memory : str, path or object with the interface of joblib.Memory, optional
        A folder in which each row is kept as soon as its model is measured, so that another call
        goes on where one was interrupted or killed. A row is taken from there if the model has the
        same name, network, weights, parameters and outputs as then, and reads the same data, and if
        the measures, their arguments, the criterion, the held-out data and `random_state` are the
        same. Functions that a measure of your own calls are not compared.
        Held-out data sets are compared by their class, length and three samples. A row whose file
        is broken is measured again.
    verbose : int, default=0
        1 shows a progress bar of the models.

    Returns
    -------
    DataFrame
        One row for each model in rank order, with the columns that `relflat_sk.minima` lists and
        ``model``, its name: the key, the path or the position. Parameters that differ among the
        estimators of the kinds that have them are in columns ``param_<name>``, as texts unless
        they are plain values. ``reason`` says why a model has no value or is not compared. If the
        call ended early, ``table.attrs["ended"]`` says why.

    Raises
    ------
    TypeError
        If `models` is a single model, or `module` cannot take weights.
    ValueError
        If there are no models, no model can be measured, or an argument of the measures is not
        valid.
    KeyboardInterrupt
        On Ctrl-C before any model is measured.
    ImportError, OSError, ValueError
        If no model can be loaded: weights come without `module` or are those of another network, a
        file is missing or holds other objects than tensors, or safetensors or peft is needed and
        not installed. A model among others that cannot be loaded has a row with the reason.

    Warns
    -----
    FlatnessWarning
        If models are no minima, or cannot be measured, or have different losses, or so few reach
        the loss at which they are compared that they are compared at another one, or if flatness
        misleads: wrong labels, for example. If Ctrl-C or an error of the iterator `models` ended
        the call early: the table has the models that were measured until then.

    See Also
    --------
    FlatMinimaSearch : Trains the candidates as well.
    rank_minima : Ranks by another column of the table.

    Notes
    -----
    A network is a minimum if its training loss is lower than that of the best constant
    prediction. Estimators of scikit-learn and skorch nets have a record of their training, and
    must have ended at their goal, by their solver or on a plateau, as in a search. All minima are
    compared by a measure at equal loss, such as the default, and those of similar depth by
    others; `rank_minima` takes the table with another `depth_band`.

    The default compares models where the loss is 10% of the best constant prediction's. After a
    short fine-tuning, few models reach this loss at any temperature. If fewer than half of those
    that are better than a constant do, all are compared at the smallest share of the loss that half
    of them reach, in full per cents: a warning and ``table.attrs["at_loss"]`` say which. This takes
    a second round over the models, which an iterator does not allow; to choose the share, pass
    ``FlatnessScorer("comparable_flatness", measure_params={"at_loss": 0.3})``.

    With low-rank adapters of PEFT, the name of the adapted layer, such as ``"...query"``, is that
    of a layer with the merged weight ``W + s B A``, whose flatness compares with that of the base
    model or of a model that was fine-tuned without an adapter. The factors have names as well:
    at ``"...query.lora_A.default"``, the weight A and the curvature in A are measured, at
    ``"...query.lora_B.default"`` those of B, and at ``"...query.base_layer"`` the frozen W.
    The adapter of a model is not unique, ``B C^-1 C A`` is the same function for every invertible
    matrix C: the flatness at A and at the adapted layer stay, that at B does not.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = load_iris(return_X_y=True)
    >>> models = [LogisticRegression(C=C, max_iter=500).fit(X, y) for C in (0.5, 1.0, 2.0)]
    >>> table = rank_models(models, X, y, measure="relative_flatness")
    >>> table[["model", "param_C", "rank"]]
      model  param_C  rank
    0     0      0.5     1
    1     1      1.0     2
    2     2      2.0     3

    Checkpoints of a network, as a trainer or a loop has saved them:

    >>> import torch
    >>> from relflat_sk import FlatnessScorer
    >>> net = torch.nn.Linear(4, 3)
    >>> _ = torch.nn.init.zeros_(net.weight)
    >>> weights = torch.tensor(models[2].coef_), torch.tensor(models[2].intercept_)
    >>> steps = {
    ...     f"step {i}": {"weight": i / 4 * weights[0], "bias": i / 4 * weights[1]}
    ...     for i in (2, 3, 4)
    ... }
    >>> criterion = torch.nn.CrossEntropyLoss()
    >>> at_loss = FlatnessScorer("comparable_flatness", measure_params={"at_loss": 0.3})
    >>> table = rank_models(steps, X, y, module=net, criterion=criterion, measure=at_loss)
    >>> sorted(table["model"])
    ['step 2', 'step 3', 'step 4']
    >>> table["comparable_flatness"].round(4).nunique()  # at equal loss, the scale does not count
    1
    >>> bool(net.weight.any())
    False
    """
    measuring = Measuring(listed(measure), criterion)
    models = _find_models(models)
    check_held_out(y, X_test, y_test)
    data = TrainingData(X, y, X, y, sample_weight=sample_weight)
    seed = seed_from(random_state)
    task = _Task(data, X_test, y_test, measuring, seed, _open(memory), verbose)
    target = None if module is None else find_module(module)
    by = str(measuring.names[0])
    default = measuring.default_share(by)
    with restored(target) as restore:
        rows = task.measure_all(models, module, target, restore)
        share = None if default is None or task.ended else _share_of_half(rows, by)
        if share is not None:
            once = isinstance(models, Iterator)
            what = "Pass a list in place of an iterator, and they are" if once else "They are"
            warn(
                f"fewer than half of the models reach {default:g} of the best constant "
                f"prediction's loss, at which they are compared by default. {what} compared at "
                f"{share:g}, which half of them reach. One cause is a short training; another is "
                f"{WRONG_LABELS}"
            )
            if not once:
                measuring.take_at(by, share)
                again = task.measure_all(models, module, target, restore)
                if not task.ended:  # else those of the first round are more
                    rows = again
                    task.units["at_loss"] = share
    if task.ended:
        task.units["ended"] = task.ended
        warn(
            f"{task.ended}: the table has the {len(rows)} models that were measured until then"
            + (f", compared at {default:g} of the best constant's loss. " if share else ". ")
            + "Another call goes on from here, "
            + ("with the same memory." if memory is not None else "if both have a memory='folder'.")
        )
    return _rank(rows, measuring, task.units, warned=share is not None)


@dataclass
class _Task:
    """How each of the models is measured, and on which data."""

    data: TrainingData
    X_test: Any
    y_test: Any
    measuring: Measuring
    seed: int | None
    memory: Any
    verbose: int
    units: dict[Any, Any] = field(default_factory=dict)  # attributes of the table
    unread: list[Exception] = field(default_factory=list)  # why models cannot be loaded
    ended: str = ""  # why there are no further models

    def __post_init__(self) -> None:
        if self.seed is None:  # another call that goes on from the memory has the same one
            kept = self.memory is not None
            self.seed = zlib.crc32(self.description().encode()) >> 1 if kept else draw_seed(None)

    @cached_property
    def given(self) -> dict[str, str]:
        """Descriptions of the data, which are read once for all models."""
        data = {"X": self.data.X, "y": self.data.y, "weights": self.data.sample_weight}
        return describe_data(data | {"X_test": self.X_test, "y_test": self.y_test})

    def description(self) -> str:
        """Describe what changes the rows, beside the models."""
        return repr([self.given, describe_measures(self.measuring), self.seed])

    def seen(self, network: Network) -> Iterator[str]:
        """Describe a network, its loss, and all that it reads and returns.

        The outputs tell networks apart whose functions or hooks differ, which have no description.
        """
        yield from (describe(network.module), describe(network.loss.criterion))
        with seeded(self.seed), borrowed(network.module), torch.no_grad():
            for one in network.batches():
                yield describe([one.x, one.y, one.weight, primary_output(network(one.x))])

    def measure_all(
        self, models: Any, module: Any, target: nn.Module | None, restore: Callable[[], Any]
    ) -> list[dict[str, Any]]:
        """Measure one model after the other, and return their rows of the table."""
        rows: list[dict[str, Any]] = []
        total = len(models) if isinstance(models, Sized) else None
        with tqdm(total=total, desc="models", unit="model", disable=not self.verbose) as bar:
            try:
                for label, item in self._named(models):
                    row = self.measure(label, item, module, target)
                    rows.append({"model": label, "trial": len(rows)} | row)
                    del item  # or this model would be in memory together with the next
                    restore()  # the next one may be the module itself, or share its weights
                    bar.update()
            except KeyboardInterrupt:
                if not rows:
                    raise
                self.ended = "interrupted"
        if not rows:
            raise ValueError("there are no models to rank: models is empty.")
        if all(row["kind"] is None for row in rows):
            raise self.unread[0]
        return rows

    def _named(self, models: Any) -> Iterator[tuple[str, Any]]:
        """Yield models with their names, without keeping them; end where an iterator fails."""
        if isinstance(models, Mapping):
            yield from ((str(name), model) for name, model in models.items())
            return
        number = 0
        try:
            for item in models:
                yield str(item if isinstance(item, str | Path) else number), item
                del item
                number += 1
        except Exception as error:
            if not number:
                raise
            self.ended = f"models ended with {type(error).__name__}: {error}"

    def measure(
        self, label: str, item: Any, module: Any, target: nn.Module | None
    ) -> dict[str, Any]:
        """Load and measure one model, and return its row of the table."""
        record: dict[str, Any] = {"kind": None, "state": "complete", "ended_by": "", "reason": ""}
        try:
            model, has_record = _load(label, item, module, target)
            params = _parameters(model)
            record |= params | {"kind": (type(model), type(final_estimator(model)))}
            with seeded(self.seed):  # data loaders draw from torch's random state
                networks = self.measuring.networks(model, self.data)
                network = next(iter(networks.values()))
                if network.loss.row is None or network.loss.row.task == "regression":
                    self.units["loss_unit"] = ""
                measure = partial(_measure_model, self, model, networks, has_record)
                if self.memory is not None:
                    key = repr([label, has_record, params, self.description(), *self.seen(network)])
                    measure = partial(self.memory.cache(_call, ignore=["measure"]), key, measure)
                record |= measure()
        except CallError as error:
            raise ValueError(f"{label!r}: {str(error).removesuffix(KEPT)}") from error.__cause__
        except Exception as error:
            if record["kind"] is None:
                self.unread.append(error.with_traceback(None))
            record |= failure_record(error) | {"state": "failed", "converged": False}
        record.pop("failed", None)
        return record


def _open(memory: Any) -> Any:
    """Return the memory of a path, or a memory itself."""
    if memory is None:
        return None
    try:
        return check_memory(str(memory) if isinstance(memory, Path) else memory)
    except OSError as error:
        raise ValueError(
            f"memory must be a folder that rows can be written to, got {str(memory)!r}, which is "
            f"none ({type(error).__name__}: {error}). Pass another path; a folder that does not "
            "exist is made."
        ) from error


def _call(key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure a model, of which `key` tells whether it was measured before."""
    return measure()


def _measure_model(
    task: _Task, model: Any, networks: Mapping[Any, Network], has_record: bool
) -> dict[str, Any]:
    """Measure a model, and return the part of its row that a memory keeps."""
    record: dict[str, Any] = {}
    ranking = task.measuring.names[:1]
    found = record_measures(record, networks, task.seed, task.measuring, ranking)
    if found:
        held_out = task.X_test, task.y_test, task.measuring.criterion
        record |= measure_held_out(model, record["train_loss"], task.data, *held_out)
        trained = model if has_record else next(iter(networks.values())).module
        record_verdict(record, trained, None, found, ranking)
        record["lowest"] = found[ranking[0]].lowest
    return record


def _find_models(models: Any) -> Any:
    """Return models to iterate over, the checkpoints in a folder in place of its path."""
    if isinstance(models, nn.Module) or hasattr(models, "fit") or is_weights(models):
        raise TypeError(
            f"models is a single {type(models).__name__}: pass a list of models, or a dict with "
            "their names. To measure one model, use relflat_sk.measure."
        )
    if isinstance(models, str | Path):
        return list_checkpoints(Path(models))
    if not isinstance(models, Iterable):
        raise TypeError(
            "models must be a dict, a list or an iterator of models, or the path of a folder of "
            f"checkpoints, got {type(models).__name__}."
        )
    return models


def _load(label: str, item: Any, module: Any, target: nn.Module | None) -> tuple[Any, bool]:
    """Return a model, and whether it may have a record of its training."""
    is_path = isinstance(item, str | Path)
    if not is_path and not isinstance(item, Mapping):
        item = getattr(item, "best_estimator_", item)  # a search may predict with a mean
        net = final_estimator(item)
        return item, not isinstance(net, NeuralNet) or bool(getattr(net, "history", None))
    if target is None:
        raise ValueError(
            f"{label!r} are weights, and need the network that they belong to: pass module=..., a "
            "torch module or a fitted skorch net."
        )
    if is_path and (Path(item) / ADAPTER).exists():
        adapted = load_adapter(target, Path(item))
        return (module if adapted is target else adapted), False
    load_into(target, read_weights(Path(item)) if is_path else item, label)
    return module, False


def _parameters(model: Any) -> dict[str, Any]:
    """Return the parameters of an estimator that can be columns, as their names."""
    params = model.get_params() if isinstance(model, BaseEstimator) else {}
    return {
        # nan stays a number
        f"{PARAM_PREFIX}{name}": one if isinstance(one, float) else label_of(one)
        for name, one in params.items()
        if _is_plain(one)
    }


def _is_plain(value: Any) -> bool:
    """Return whether a value is plain, a class or a function, or a sequence of these."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (*PLAIN, np.generic)) or hasattr(value, "__name__")


def _differs(name: str, rows: list[dict[str, Any]], kinds: list[Any]) -> bool:
    """Return whether a parameter differs among the models of the kinds that have it."""
    having = {kind for kind, row in zip(kinds, rows, strict=True) if name in row}
    own = [row for kind, row in zip(kinds, rows, strict=True) if kind in having]
    return len({repr(row[name]) if name in row else None for row in own}) > 1


def _share_of_half(rows: list[dict[str, Any]], by: str) -> float | None:
    """Find a share of the loss that half of the models reach; None if they reach the present one.

    Models that are no better than a constant do not count.
    """
    lowest = [
        row["lowest"] if isnan(row[by]) else 0.0
        for row in rows
        if row.get("depth", 0.0) > 1 and not (isnan(row[by]) and isnan(row["lowest"]))
    ]
    half = sorted(lowest)[(len(lowest) - 1) // 2] if lowest else 0.0
    return ceil(100 * half) / 100 if 0 < half <= 0.99 else None


def _rank(
    rows: list[dict[str, Any]], measuring: Measuring, units: dict[Any, Any], warned: bool
) -> pd.DataFrame:
    """Return the ranked table; warn of models that are no minima or have no value."""
    labels = [row.pop("model") for row in rows]
    kinds = [row.pop("kind") for row in rows]
    constants = [row.get("constant_loss", nan) for row in rows]
    for row in rows:
        row.pop("lowest", None)
    if all(row["state"] == "failed" for row in rows):
        reasons = list_reasons(pd.DataFrame(rows))
        raise ValueError(f"none of {len(rows)} models can be measured:\n{reasons}")
    table = table_of_rows(rows, units)
    same = [name for name in parameter_columns(table) if not _differs(name, rows, kinds)]
    table = table.drop(columns=same)
    table.insert(1, "model", labels)
    others = table[~table["converged"]]
    if len(others):
        warn(
            f"{len(others)} of {len(table)} models are no minima, and rank behind all others. "
            f"Reasons:\n{list_reasons(others)}"
        )
    known = {one: label for one, label in zip(constants, labels, strict=True) if isfinite(one)}
    if known and max(known) - min(known) > _SAME_LOSS * abs(max(known)):
        ends = [f"{one:.4g} of {known[one]!r}" for one in (min(known), max(known))]
        warn(
            f"the loss of the best constant prediction differs among the models, from {ends[0]} "
            f"to {ends[1]}. They have different losses, weights of classes or units of the target, "
            "and flatness does not compare them. Rank the models of each loss by themselves."
        )
    by = str(measuring.names[0])
    band = measuring.depth_band(by)
    if not warned:
        warn_if_few_fit(table, by, band)
    return rank_minima(table, by, depth_band=band)


# -- checkpoints: their weights go into a network, which then gets its own again -------


Weights = Mapping[str, Any]

ADAPTER = "adapter_config.json"  # in the folder of an adapter of PEFT
# the files with the weights in a folder of transformers
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_FILES = (*_WHOLE, *(f"{name}.index.json" for name in _WHOLE))
_SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors")
# the entries of files that hold more than weights, as of Lightning and of usual loops
_ENTRIES = ("state_dict", "model_state_dict", "model")
_FEW = 5  # names in an error


def is_weights(item: Any) -> bool:
    """Return whether something is a state dict."""
    return isinstance(item, Mapping) and any(isinstance(one, Tensor) for one in item.values())


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, in the order of their steps; a checkpoint is its own."""
    if not folder.is_dir():
        return [folder]
    inside = sorted(folder.iterdir(), key=_by_numbers)
    found = [one for one in inside if one.is_dir() and _is_checkpoint(one)]
    if not found and not _is_checkpoint(folder):
        found = [one for one in inside if one.suffix in _SUFFIXES]
    if not found and not _is_checkpoint(folder):
        raise ValueError(
            f"there are no checkpoints in {str(folder)!r}. Expected files that end with "
            f"{', '.join(_SUFFIXES)}, or folders with {', '.join((*_FILES, ADAPTER))}."
        )
    return found or [folder]


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).exists() for name in (*_FILES, ADAPTER))


def _by_numbers(path: Path) -> list[tuple[str, int]]:
    """Return a key that sorts step 90 before step 100."""
    parts = re.findall(r"(\D*)(\d*)", path.name)
    return [(text, int(number or 0)) for text, number in parts]


# -- reading ---------------------------------------------------------------------------------------


def read_weights(path: Path) -> Weights:
    """Read the weights from a file, or from a folder of transformers, without running code."""
    if not path.is_dir():
        return _read_file(path)
    name = next((name for name in _FILES if (path / name).exists()), None)
    if name is None:
        raise ValueError(
            f"{str(path)!r} is no checkpoint: it has none of the files {', '.join(_FILES)}."
        )
    if not name.endswith(".json"):
        return _read_file(path / name)
    index = json.loads((path / name).read_text(encoding="utf-8"))
    parts = [_read_file(path / part) for part in sorted(set(index["weight_map"].values()))]
    return {name: tensor for part in parts for name, tensor in part.items()}


def _read_file(path: Path) -> Weights:
    """Read the weights from one file."""
    if path.suffix == ".safetensors":
        try:
            from safetensors import SafetensorError  # noqa: PLC0415
            from safetensors.torch import load_file  # noqa: PLC0415
        except ImportError as error:
            raise ImportError(
                f"{str(path)!r} needs safetensors, which is not installed. Install it with: pip "
                "install safetensors"
            ) from error
        try:
            loaded: Weights = load_file(path)
        except SafetensorError as error:
            raise _unreadable(path, "safetensors") from error
        return loaded
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        kinds = []
        with suppress(ValueError):  # an older format, whose types cannot be listed
            kinds = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        listed = f" ({', '.join(kinds)})" if kinds else ""
        raise ValueError(
            f"{str(path)!r} holds other objects than tensors{listed}, and loading these may run "
            "code. If you trust the file, call rank_models within "
            "torch.serialization.safe_globals([...]) with these types, or pass the state dict in "
            "what torch.load(path, weights_only=False) returns."
            + " It may be no file of torch.save, too."
            * (not kinds)
        ) from error
    except (EOFError, KeyError, RuntimeError) as error:
        raise _unreadable(path, "torch.save") from error
    inside = found if isinstance(found, Mapping) else {}
    found = next((inside[name] for name in _ENTRIES if is_weights(inside.get(name))), found)
    if not is_weights(found):
        raise ValueError(
            f"{str(path)!r} holds no state dict, but {type(found).__name__}. Save "
            "module.state_dict(), or pass the state dict itself."
        )
    weights: Weights = found
    return weights


def _unreadable(path: Path, kind: str) -> ValueError:
    """Return the error for a broken file."""
    return ValueError(
        f"{str(path)!r} cannot be read: it is no file of {kind}, or was not written to its end. "
        "Remove it, or save it again."
    )


# -- loading ---------------------------------------------------------------------------------------


def find_module(model: Any) -> nn.Module:
    """Find the module of `rank_models` that takes the weights: itself, or that of a fitted net."""
    inside = final_estimator(model)
    # a compiled one names its weights otherwise
    module = unwrapped(getattr(inside, "module_", inside))
    if not isinstance(module, nn.Module):
        raise TypeError(
            "module must be a torch module or a fitted skorch net, which takes the weights, got "
            f"{type(module).__name__}."
        )
    return module


@contextmanager
def restored(module: nn.Module | None) -> Iterator[Callable[[], Any]]:
    """Yield what gives a module its own weights back; call it at the end, also after an exception.

    It does nothing without a module.
    """
    own = {} if module is None else copy.deepcopy(module.state_dict())
    restore = partial(module.load_state_dict, own) if module is not None else lambda: None
    try:
        yield restore
    finally:
        restore()


def load_into(module: nn.Module, weights: Weights, name: str) -> None:
    """Load weights into a module; those of a larger module that contains it are found by name."""
    own = module.state_dict(keep_vars=True)
    prefix = _find_prefix(own.keys(), weights.keys(), name)
    part = {
        key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)
    }
    # transformers saves one of the names of a tied weight
    held = {id(own[key]) for key in part.keys() & own.keys()}
    missing = [key for key in own if key not in part and id(own[key]) not in held]
    check_names(name, missing, [key for key in part if key not in own])
    try:
        module.load_state_dict(part, strict=False)
    except RuntimeError as error:
        raise ValueError(f"the weights of {name!r} do not fit module: {error}") from error


def check_names(name: str, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Refuse weights of another network."""
    if missing or unexpected:
        listed = " and ".join(
            f"{what} {len(names)}: {', '.join(map(repr, sorted(names)[:_FEW]))}"
            + ", ..." * (len(names) > _FEW)
            for what, names in (("lack", missing), ("have further", unexpected))
            if names
        )
        raise ValueError(
            f"the weights of {name!r} are not those of module: they {listed}. Pass the module that "
            "was trained, with the same sizes."
        )


def _find_prefix(own: Collection[str], names: Collection[str], name: str) -> str:
    """Find what stands before a module's names in the weights of one that contains it."""
    prefixes: Counter[str] = Counter()
    for key in names:
        starts = [0, *(match.end() for match in re.finditer(r"\.", key))]
        prefixes.update(key[:start] for start in starts if key[start:] in own)
    most = max(prefixes.values(), default=0)
    found = [prefix for prefix, count in prefixes.items() if count == most]
    if len(found) > 1 and "" not in found:
        raise ValueError(
            f"the weights of {name!r} fit module in several ways, under the names {found}. Load "
            "the file, and pass a state dict with the names of the module."
        )
    return "" if "" in found or not found else found[0]


# -- adapters of PEFT ------------------------------------------------------------------------------


def load_adapter(module: nn.Module, folder: Path) -> nn.Module:
    """Load an adapter of PEFT into its module, or put it on a copy of the base model."""
    try:
        import peft  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            f"{str(folder)!r} is an adapter of PEFT, which is not installed. Install it with: pip "
            'install "relflat_sk[peft]"'
        ) from error
    weights = peft.load_peft_weights(str(folder), device="cpu")
    if isinstance(module, peft.PeftModel):
        adapted: nn.Module = module
        name = module.active_adapter
    else:
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(module), str(folder))
        name = "default"
    own = peft.get_peft_model_state_dict(adapted, adapter_name=name)
    check_names(str(folder), own.keys() - weights.keys(), weights.keys() - own.keys())
    if adapted is module:
        peft.set_peft_model_state_dict(module, weights, adapter_name=name)
    return adapted
