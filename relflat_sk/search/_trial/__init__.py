"""One trial of a search: a candidate is trained on all the data, measured and recorded."""

from relflat_sk.search._trial.continuation import check_space, new_choices
from relflat_sk.search._trial.failures import CallError, explain, has_storage_failed
from relflat_sk.search._trial.goal import own_goals
from relflat_sk.search._trial.isolation import isolated
from relflat_sk.search._trial.objective import IN_FLEET, MinimaObjective
from relflat_sk.search._trial.provenance import MADE_WITH, check_made_with
from relflat_sk.search._trial.recording import measure_held_out
from relflat_sk.search._trial.space import Space
from relflat_sk.search._trial.verdict import NO_MEASURE, SATURATED
from relflat_sk.search._trial.weight_files import (
    ARTIFACT,
    DamagedWeightsError,
    check_saved,
    check_store,
    replace_weights,
)
from relflat_sk.search._trial.weights import last_prefix, last_step

__all__ = [
    "ARTIFACT",
    "IN_FLEET",
    "MADE_WITH",
    "NO_MEASURE",
    "SATURATED",
    "CallError",
    "DamagedWeightsError",
    "MinimaObjective",
    "Space",
    "check_made_with",
    "check_saved",
    "check_space",
    "check_store",
    "explain",
    "has_storage_failed",
    "isolated",
    "last_prefix",
    "last_step",
    "measure_held_out",
    "new_choices",
    "own_goals",
    "replace_weights",
]
