"""Train the candidates of a process together, as far as their nets can be stacked."""

import logging
from collections.abc import Callable
from typing import Any

import optuna

from relflat_sk.fleet import Fleet, fleet_size
from relflat_sk.search._optuna_internals import is_shared_by_threads
from relflat_sk.search._trial import isolated
from relflat_sk.training import RelativeFlatnessRegularizedNet

__all__ = ["train_together"]

_LOG = logging.getLogger("relflat_sk")


def train_together(
    train: Callable[[], bool],
    study: optuna.Study,
    estimator: Any,
    fleet: int | str | None,
    n_threads: int | None,
) -> None:
    """Train candidates until there is none left, several at a time."""
    size = fleet_size(fleet)
    reason = None if size is None else _why_not(study, estimator)
    if size is None or reason is not None:
        if reason is not None:
            _LOG.log(logging.INFO if fleet == "auto" else logging.WARNING, reason)
        while train():
            pass
        return
    with isolated(n_threads):
        Fleet(size, auto=fleet == "auto").run(train)


def _why_not(study: optuna.Study, estimator: Any) -> str | None:
    """Return why candidates are trained one by one, before any is trained."""
    parts = [estimator, *estimator.get_params().values()]
    if not any(isinstance(part, RelativeFlatnessRegularizedNet) for part in parts):
        return f"trained one by one: {type(estimator).__name__} holds no net of relflat_sk"
    if not is_shared_by_threads(study):
        return "trained one by one: an SQLite database in memory has one thread"
    return None
