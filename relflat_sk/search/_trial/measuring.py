"""How the candidates of a search are measured: at which layer, with which arguments, where."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from relflat_sk._checks import check_device, check_integer, is_integer
from relflat_sk._models import DataOptions, to_network_with_source
from relflat_sk._network import Network
from relflat_sk.fleet import measure_with_others
from relflat_sk.measures import Flatness, check_arguments, check_layers, measure_network
from relflat_sk.search._trial.training_data import TrainingData

__all__ = ["Measuring"]

# arguments of measures that a search passes itself, and where users give them
_OWN = {
    "layer": "layer=...",
    "device": "device=...",
    "random_state": "random_state=...",
    "sample_weight": "fit(..., sample_weight=...)",
}


class Measuring:
    """Measures all candidates of a search in the same way."""

    def __init__(
        self,
        names: Sequence[str],
        layer: Any = -1,
        params: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if not isinstance(layer, str) and not is_integer(layer):
            raise TypeError(
                "layer must be the position of a layer or its dotted name, because every "
                f"candidate has a network of its own, got {layer!r}."
            )
        if params is not None and not isinstance(params, Mapping):
            raise TypeError(f"measure_params must be a dict or None, got {params!r}.")
        check_layers(names, layer)
        check_device(device)
        self.layer = layer
        self.params = dict(params or {})
        self.device = device
        for name, place in _OWN.items():
            if name in self.params:
                raise ValueError(f"measure_params holds {name!r}; give it as {place} instead.")
        self.batch_size = self.params.pop("batch_size", DataOptions.batch_size)
        check_integer("batch_size", self.batch_size, minimum=1)
        weight_decay = {"weight_decay"} & self.params.keys()
        check_arguments(names, {key: self.params[key] for key in self.params.keys() - weight_decay})

    def network(self, estimator: Any, data: TrainingData) -> Network:
        """Turn a trained candidate into a network with its training data."""
        options = DataOptions(
            batch_size=self.batch_size, device=self.device, sample_weight=data.sample_weight
        )
        return to_network_with_source(estimator, data.X, data.y, options)

    def __call__(
        self, network: Network, names: Sequence[str], seed: int | None
    ) -> dict[str, Flatness]:
        """Measure a network, all measures together."""
        params = {**self.params, "random_state": seed}
        found = measure_network(network, list(dict.fromkeys(names)), [self.layer], **params)
        return _by_name(found, names)

    def with_others(
        self, network: Network, names: Sequence[str]
    ) -> tuple[dict[str, Flatness], Tensor | None]:
        """Measure a network in one pass with others of a fleet that have ended with it.

        Shapes: returns outputs (n, d).
        """
        different = list(dict.fromkeys(names))
        stacked = None if self.params else measure_with_others(network, different, self.layer)
        if stacked is None:
            return {}, None
        return _by_name(stacked.found, names), stacked.outputs


def _by_name(
    found: Mapping[tuple[str, str], Flatness], names: Sequence[str]
) -> dict[str, Flatness]:
    """Return results by the names of their measures."""
    by_name = {name: result for (_, name), result in found.items()}
    return {str(name): by_name[name] for name in names}
