"""Run layers so that a penalty can differentiate them, and pull vectors back through them.

A penalty at an earlier layer differentiates the network behind that layer several times. Torch's
derivatives of some layers are wrong from the third on, or slow from the second on. Within
`ExplicitLayers`, normalisations and convolutions compute what they always do, and have
derivatives that are right and fast.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from relflat_sk._losses import pull_back
from relflat_sk._network.forwards import ReplacedForwards

__all__ = ["Explicit", "ExplicitLayers"]

# a layer, and what runs it within `ExplicitLayers`: called with layer, context and input
Explicit = tuple[nn.Module, Callable[[Any, "ExplicitLayers", Tensor], Tensor]]


class ExplicitLayers(ReplacedForwards):
    """Context in which layers run so that a penalty can differentiate them."""

    def __init__(self, layers: Sequence[Explicit] = ()) -> None:
        super().__init__((layer, partial(run, layer, self)) for layer, run in layers)
        self.inputs_only = False
        self.linear = False

    def pull_back(
        self,
        of: Sequence[Tensor],
        inputs: Sequence[Any],
        vectors: Sequence[Tensor] | None = None,
        *,
        linear: bool,
    ) -> tuple[Tensor | None, ...]:
        """Pull vectors back with their graph, see `relflat_sk._losses.pull_back`."""
        self.inputs_only, self.linear = True, linear
        try:
            return pull_back(of, inputs, vectors, create_graph=True)
        finally:
            self.inputs_only = self.linear = False
