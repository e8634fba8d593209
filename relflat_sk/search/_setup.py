"""Check the arguments of a search, plan its candidates and create its study."""

from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import NSGAIIISampler, NSGAIISampler
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

from relflat_sk._checks import check_integer
from relflat_sk.fleet import fleet_size
from relflat_sk.minima import check_depth_band
from relflat_sk.search._sharing import Draws, Grid, Plan, n_processes, open_storage
from relflat_sk.search._trial import Space

__all__ = [
    "check_arguments",
    "create_study",
    "listed",
    "n_objectives",
    "plan_candidates",
]


def check_arguments(search: Any) -> None:
    """Refuse arguments of a search that are not valid, before anything is trained."""
    check_integer("n_trials", search.n_trials, minimum=1, optional=True)
    check_depth_band(search.depth_band)
    fleet_size(search.fleet)
    for name, kind in (
        ("sampler", optuna.samplers.BaseSampler),
        ("pruner", optuna.pruners.BasePruner),
    ):
        value = getattr(search, name)
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be an optuna {name} or None, got {value!r}.")
    if search.study_name is not None and search.storage is None:
        raise ValueError(
            f"study_name={search.study_name!r} needs a storage: without one the study is in memory "
            "and ends with the program. Give storage='sqlite:///minima.db', for example, or leave "
            "study_name out."
        )
    if n_processes(search.n_jobs) and isinstance(search.storage, InMemoryStorage):
        raise ValueError(
            f"n_jobs={search.n_jobs} processes cannot share a storage in memory: leave storage "
            "out, or give a file, such as 'sqlite:///minima.db'."
        )


def n_objectives(search: Any) -> int:
    """Return the number of objectives of a search's study."""
    multiple = isinstance(search.sampler, NSGAIISampler | NSGAIIISampler)
    return len(listed(search.measure)) if multiple else 1


def listed(measure: Any) -> list[Any]:
    """Return the measures of a search as a list."""
    return [measure] if isinstance(measure, str) or callable(measure) else list(measure)


def plan_candidates(search: Any, space: Space) -> Plan:
    """Plan which candidates to train: the whole grid if `n_trials` allows it, otherwise draws."""
    grid = space.grid() if search.sampler is None else None
    if search.n_trials is None and grid is None:
        raise ValueError(
            "n_trials is needed with a sampler: say how many candidates to train."
            if search.sampler is not None
            else "n_trials is needed: the space has distributions or functions, so there is no "
            "finite grid to train. Say how many candidates to train."
        )
    if search.n_trials is None or (grid is not None and search.n_trials >= len(grid)):
        return Grid(grid or [], space.distributions())
    return Draws(int(search.n_trials), space.distributions())


def create_study(search: Any, folder: str) -> optuna.Study:
    """Create the study of a search, or open the one to resume."""
    storage = search.storage
    if storage is None and n_processes(search.n_jobs):
        storage = JournalStorage(JournalFileBackend(str(Path(folder) / "journal.log")))
    return optuna.create_study(
        directions=["minimize"] * n_objectives(search),
        storage=open_storage(storage),
        pruner=search.pruner or optuna.pruners.NopPruner(),
        study_name=search.study_name,
        load_if_exists=search.study_name is not None,
    )
