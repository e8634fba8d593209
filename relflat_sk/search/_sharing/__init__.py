"""Share a study between processes: plan candidates, claim them, train them in workers."""

from relflat_sk.search._sharing.abandoned import give_up
from relflat_sk.search._sharing.candidates import CandidateSampler, Draws, Grid
from relflat_sk.search._sharing.claims import (
    Plan,
    failed_trials,
    is_cut_short,
    is_superseded,
)
from relflat_sk.search._sharing.flattest import FlattestSoFar
from relflat_sk.search._sharing.fleet import train_together
from relflat_sk.search._sharing.in_processes import n_processes
from relflat_sk.search._sharing.stopping import Stopping
from relflat_sk.search._sharing.storage_guard import StorageGuard, without_password
from relflat_sk.search._sharing.study import (
    check_resumable,
    in_memory,
    log_level,
    open_storage,
)
from relflat_sk.search._sharing.workers import Sweep, train_all

__all__ = [
    "CandidateSampler",
    "Draws",
    "FlattestSoFar",
    "Grid",
    "Plan",
    "Stopping",
    "StorageGuard",
    "Sweep",
    "check_resumable",
    "failed_trials",
    "give_up",
    "in_memory",
    "is_cut_short",
    "is_superseded",
    "log_level",
    "n_processes",
    "open_storage",
    "train_all",
    "train_together",
    "without_password",
]
