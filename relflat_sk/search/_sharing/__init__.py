"""Share a study between processes: plan candidates, claim them, train them in workers."""

from relflat_sk.search._sharing.candidates import CandidateSampler, Draws, Grid
from relflat_sk.search._sharing.claims import Plan, is_cut_short
from relflat_sk.search._sharing.flattest import FlattestSoFar
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
    "Sweep",
    "check_resumable",
    "in_memory",
    "is_cut_short",
    "log_level",
    "open_storage",
    "train_all",
]
