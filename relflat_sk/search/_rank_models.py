"""Rank models that are trained already: fitted estimators, and weights of a network."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import count
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from skorch import NeuralNet
from torch import Tensor, nn
from tqdm import tqdm

from relflat_sk._checks import check_kind, warn
from relflat_sk._models.network_of import final_estimator
from relflat_sk._network.borrowing import unwrapped
from relflat_sk._random import alone, draw_seed, seed_from, seeded
from relflat_sk.minima import rank_minima
from relflat_sk.minima._table import (
    PARAM_PREFIX,
    Minimum,
    list_reasons,
    parameter_columns,
    table_of_rows,
)
from relflat_sk.search._measure import Measuring, TrainingData, assess, check_held_out
from relflat_sk.search._results import warn_if_few_fit
from relflat_sk.search._space import PLAIN, label_of
from relflat_sk.search._storage import KEPT, CallError

_SAME_LOSS = 1e-3  # up to which share losses of a constant are those of one criterion

__all__ = ["rank_models"]


def rank_models(  # noqa: PLR0913
    models: Any,
    X: Any,
    y: Any,
    *,
    module: Any = None,
    load: Callable[[Any], Any] = torch.load,
    measure: Any = "comparable_flatness",
    criterion: Any = None,
    X_test: Any = None,
    y_test: Any = None,
    sample_weight: Any = None,
    random_state: Any = None,
    verbose: int = 0,
) -> pd.DataFrame:
    """Rank trained models, flattest first: fitted estimators, networks, and weights of a network.

    The table has the columns of ``FlatMinimaSearch.minima_``, so that `rank_minima`,
    `correlate_measures`, `granulated_kendall` and the displays take it. One model is in memory at
    a time, if `models` holds paths, or is a generator.

    Parameters
    ----------
    models : dict or iterable
        The models in a dict with their names, or an iterable of pairs ``(name, model)``, of models,
        or of paths, which are names as well. Each model is a fitted one, as `relative_flatness`
        takes it, a state dict for `module`, or the path of a file or folder that `load` reads.
    X : array, data frame, tensor, dict or Dataset of n samples
        The training data, as the models take them.
    y : array of shape (n, ...)
        Labels, as in training; None for a Dataset that has them inside.
    module : nn.Module or fitted skorch net, optional
        The network that state dicts are loaded into, which gets its own weights back.
    load : callable, default=torch.load
        Returns the state dict in a path, or a fitted model: ``joblib.load``, or ``from_pretrained``
        of a model of transformers.
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
        If there are no models, no model can be loaded and measured, or an argument of the measures
        is not valid. A model among others that cannot be loaded has a row with the reason.
    KeyboardInterrupt
        On Ctrl-C before any model is measured.

    Warns
    -----
    FlatnessWarning
        If models are no minima, or cannot be measured, or have different losses, or if few reach
        the loss at which they are compared, as with wrong labels. If Ctrl-C or an error of the
        iterable `models` ended the call early: the table has the models that were measured until
        then.

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
    short fine-tuning, few models reach this loss at any temperature. To choose a larger share, pass
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

    State dicts of a network:

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
    measuring = Measuring(measure, criterion)
    _check_models(models)
    check_held_out(y, X_test, y_test)
    data = TrainingData(X, y, X, y, sample_weight=sample_weight, held_out=(X_test, y_test))
    seed = draw_seed(None) if random_state is None else seed_from(random_state)
    target = nn.Module() if module is None else _find_module(module)
    reading = _Reading(data, measuring, seed, module, target, load)
    own_weights = copy.deepcopy(target.state_dict())
    rows: list[dict[str, Any]] = []
    name = ended = ""
    total = len(models) if isinstance(models, Sized) else None
    with tqdm(total=total, desc="models", unit="model", disable=not verbose) as bar:
        try:
            for name, item in _named(models):
                rows.append({"model": name, "trial": len(rows)} | reading.row(item))
                del item  # or this model would be in memory together with the next
                # which may be the module itself, or share its weights
                target.load_state_dict(own_weights)
                bar.update()
        except CallError as error:
            raise ValueError(f"{name!r}: {str(error).removesuffix(KEPT)}") from error.__cause__
        except (Exception, KeyboardInterrupt) as error:  # of an iterable, whose models are measured
            if not rows:
                raise
            ended = "interrupted"
            if isinstance(error, Exception):
                ended = f"models ended with {type(error).__name__}: {error}"
        finally:
            target.load_state_dict(own_weights)
    return _rank(rows, ended, measuring)


def _check_models(models: Any) -> None:
    """Refuse a single model, which may be iterable."""
    values = models.values() if isinstance(models, Mapping) else []
    is_single = isinstance(models, nn.Module | str | Path) or hasattr(models, "fit")
    is_single |= any(isinstance(value, Tensor) for value in values)  # weights
    if is_single or not isinstance(models, Iterable):
        raise TypeError(
            "models must be a dict or an iterable of several models or paths, got a single "
            f"{type(models).__name__}, which relflat_sk.measure takes."
        )


def _named(models: Any) -> Iterator[tuple[str, Any]]:
    """Yield models with their names, without keeping them."""
    numbers = count()  # `enumerate` would hold a model
    for item in models.items() if isinstance(models, Mapping) else models:
        number = next(numbers)
        name = item if isinstance(item, str | Path) else number
        if isinstance(item, tuple):
            name, item = item  # noqa: PLW2901
        yield str(name), item
        del item


@dataclass
class _Reading:
    """How all models are read and measured, on the same data."""

    data: TrainingData
    measuring: Measuring
    seed: int | None
    module: Any
    target: nn.Module  # in it, which takes weights
    load: Callable[[Any], Any]

    def row(self, item: Any) -> dict[str, Any]:
        """Load and measure one model; one that cannot be has a row with the reason."""
        minimum = Minimum(converged=False, ended_by="", reason="")
        kind, params, units = None, dict[str, Any](), dict[str, str]()
        try:
            model, has_record = self._read(item)
            kind, params = (type(model), type(final_estimator(model))), _parameters(model)
            with alone(), seeded(self.seed):  # data loaders draw from torch's random state
                network = assess(
                    minimum, model, self.data, self.measuring, self.seed, has_record=has_record
                )
            if network.loss.row is None or network.loss.row.task == "regression":
                units = {"loss_unit": ""}
        except CallError:
            raise
        except Exception as error:
            minimum.fail(error)
        state = "failed" if minimum.failed else "complete"
        return params | minimum.row() | {"state": state, "kind": kind, "units": units}

    def _read(self, item: Any) -> tuple[Any, bool]:
        """Return a model, and whether it may have a record of its training."""
        if isinstance(item, str | Path):
            item = self.load(item)
        if isinstance(item, Mapping):
            if self.module is None:
                raise ValueError("these are weights: pass module=..., their network or net")
            self.target.load_state_dict(item)
            return self.module, False
        item = getattr(item, "best_estimator_", item)  # a search may predict with a mean
        net = final_estimator(item)
        return item, not isinstance(net, NeuralNet) or bool(getattr(net, "history", None))


def _rank(rows: list[dict[str, Any]], ended: str, measuring: Measuring) -> pd.DataFrame:
    """Return the ranked table; warn of models that are no minima or have no value."""
    if not rows:
        raise ValueError("there are no models to rank: models is empty.")
    if all(row["state"] == "failed" for row in rows):
        reasons = list_reasons(pd.DataFrame(rows))
        raise ValueError(f"none of {len(rows)} models can be measured:\n{reasons}")
    attributes = {"ended": ended} if ended else {}
    if ended:
        warn(f"{ended}: the table has the {len(rows)} models that were measured until then.")
    for row in rows:
        attributes |= row.pop("units")
    names, kinds = ([row.pop(name) for row in rows] for name in ("model", "kind"))
    _check_constants(names, [row.get("constant_loss", nan) for row in rows])
    table = table_of_rows(rows, attributes)
    same = [name for name in parameter_columns(table) if not _differs(name, rows, kinds)]
    table = table.drop(columns=same)
    table.insert(1, "model", names)
    no_minima = table[~table["converged"]]
    if len(no_minima):
        warn(
            f"{len(no_minima)} of {len(table)} models are no minima, and rank behind all "
            f"others. Reasons:\n{list_reasons(no_minima)}"
        )
    warn_if_few_fit(table, measuring)
    return rank_minima(table, measuring.ranking[0], depth_band=measuring.depth_band)


def _find_module(model: Any) -> nn.Module:
    """Find the module that takes the weights: itself, or that of a fitted net."""
    net = final_estimator(model)
    # a compiled one names its weights otherwise
    module: nn.Module = unwrapped(getattr(net, "module_", net))
    is_module, kind = isinstance(module, nn.Module), "a torch module or a fitted skorch net"
    check_kind(is_module, "module", module, f"{kind}, which takes the weights")
    return module


def _parameters(model: Any) -> dict[str, Any]:
    """Return the parameters of an estimator that can be columns, as their names."""
    params = model.get_params() if isinstance(model, BaseEstimator) else {}
    return {
        # nan stays a number
        f"{PARAM_PREFIX}{name}": value if isinstance(value, float) else label_of(value)
        for name, value in params.items()
        if _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    """Return whether a value is plain, a class or a function, or a sequence of these."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (*PLAIN, np.generic)) or hasattr(value, "__name__")


def _differs(name: str, rows: list[dict[str, Any]], kinds: list[Any]) -> bool:
    """Return whether a parameter differs among the models of the kinds that have it."""
    having = {kind for kind, row in zip(kinds, rows, strict=True) if name in row}
    comparable = [row for kind, row in zip(kinds, rows, strict=True) if kind in having]
    return len({repr(row[name]) if name in row else None for row in comparable}) > 1


def _check_constants(names: list[str], constant_losses: list[float]) -> None:
    """Warn of models whose losses are not the same."""
    finite = {
        loss: name for loss, name in zip(constant_losses, names, strict=True) if isfinite(loss)
    }
    if finite and max(finite) - min(finite) > _SAME_LOSS * abs(max(finite)):
        ends = [f"{loss:.4g} of {finite[loss]!r}" for loss in (min(finite), max(finite))]
        warn(
            f"the loss of a constant differs among the models, from {' to '.join(ends)}. They have "
            "different losses, weights of classes or units: rank those of each by themselves."
        )
