"""Users' models as a network with its loss."""

from relflat_sk._models.network_of import (
    CRITERION_ALONE,
    DataOptions,
    final_estimator,
    skorch_batches,
    skorch_network,
    to_network,
)

__all__ = [
    "CRITERION_ALONE",
    "DataOptions",
    "final_estimator",
    "skorch_batches",
    "skorch_network",
    "to_network",
]
