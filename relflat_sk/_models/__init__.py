"""Users' models as a network with its loss and data."""

from relflat_sk._models.description import describe
from relflat_sk._models.language_models import IGNORED, is_causal_language_model, next_labels
from relflat_sk._models.network_of import (
    final_estimator,
    joined,
    name_layer,
    name_layers,
    to_network,
    to_network_with_source,
)
from relflat_sk._models.options import DataOptions
from relflat_sk._models.skorch_nets import CRITERION_ALONE, skorch_batches, skorch_network

__all__ = [
    "CRITERION_ALONE",
    "IGNORED",
    "DataOptions",
    "describe",
    "final_estimator",
    "is_causal_language_model",
    "joined",
    "name_layer",
    "name_layers",
    "next_labels",
    "skorch_batches",
    "skorch_network",
    "to_network",
    "to_network_with_source",
]
