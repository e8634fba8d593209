"""Input, output and weight of a layer in one forward pass, as a `Recorder` keeps them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from relflat_sk._losses import Head
from relflat_sk._network.layer_maps import LayerMap
from relflat_sk._network.layers import layer_map

__all__ = ["LayerRecord"]


@dataclass(slots=True)
class LayerRecord:
    """Input and output of a layer in one forward pass. Shapes: `weight` (...)."""

    name: str
    layer: nn.Module
    calls: int = 0
    features: Tensor | None = None
    version: int = 0
    output: Tensor | None = None
    node: Any = None
    output_nr: int = 0
    offset: Tensor | None = None
    tail_input: Tensor | None = None
    weight: Tensor | None = None
    head: Head | None = None

    @property
    def map(self) -> LayerMap:
        """The layer as a linear map of the weight that it had in its call."""
        return layer_map(self.layer, self.weight)

    def check(self) -> tuple[Tensor, Tensor]:
        """Return features and output of a layer that was called exactly once."""
        if self.calls != 1 or self.features is None or self.output is None:
            raise ValueError(
                f"layer {self.name!r} was called {self.calls} times in one forward pass; only a "
                "layer that is called exactly once can be measured. Measure another layer."
            )
        if self.features._version != self.version:
            raise ValueError(
                f"the input that layer {self.name!r} received was overwritten in place later in "
                "the forward pass. Replace the in-place operation, or measure another layer."
            )
        return self.features, self.output
