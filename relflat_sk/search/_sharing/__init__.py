"""Several processes on one study: candidates, claims, workers, storages."""

from relflat_sk.search._sharing.candidates import CandidateSampler, Draws, Grid
from relflat_sk.search._sharing.claims import Wanted, give_up, is_cut_short
from relflat_sk.search._sharing.study import open_storage
from relflat_sk.search._sharing.workers import (
    Kept,
    Sweep,
    check_data,
    check_resumable,
    in_memory,
    log_level,
    run_in_processes,
)

__all__ = [
    "CandidateSampler",
    "Draws",
    "Grid",
    "Kept",
    "Sweep",
    "Wanted",
    "check_data",
    "check_resumable",
    "give_up",
    "in_memory",
    "is_cut_short",
    "log_level",
    "open_storage",
    "run_in_processes",
]
