"""Users' models as a network with its loss and data."""

from relflat_sk._models.network_of import (
    CRITERION_ALONE,
    IGNORED,
    DataOptions,
    describe,
    final_estimator,
    is_causal_language_model,
    joined,
    name_layer,
    name_layers,
    next_labels,
    skorch_batches,
    skorch_network,
    to_network,
    to_network_with_source,
    unwrap,
)
