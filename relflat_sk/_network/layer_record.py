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
    """Input and output of a layer in one forward pass.

    Parameters
    ----------
    name : str
        Dotted name of the layer in the network.
    layer : nn.Module
        The layer.
    calls : int
        Number of calls. The other fields are those of the last call.
    features : Tensor of shape (n, ...) or None
        The layer's input.
    version : int
        Torch's version counter of `features` at the call; another value later shows that
        they were overwritten.
    output : Tensor of shape (n, ...) or None
        The layer's output.
    node : torch.autograd.graph.Node or None
        The node at which the tail of the network starts, from which autograd reaches the
        network's output.
    output_nr : int
        Number of the layer's output among the outputs of `node`.
    offset : Tensor of shape (n, ...) or None
        For measuring: zeros added to the output, by which the loss is differentiated.
    tail_input : Tensor of shape (n, ...) or None
        For measuring: the output plus `offset`, which the tail of the network receives.
    weight : Tensor of shape (...) or None
        The layer's weight, with its graph, if a parametrization computes it whenever it is read.
    head : Head or None
        For training: how the gradients of loss and penalty in the weight are added up, if the layer
        puts out the logits of very many classes.
    """

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
        """Return features and output of a layer that was called exactly once.

        Returns
        -------
        features : Tensor of shape (n, ...)
            The layer's input.
        output : Tensor of shape (n, ...)
            The layer's output.

        Raises
        ------
        ValueError
            If the layer was not called, or more than once, or its input was overwritten.
        """
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
