"""A fully connected ReLU network as a chain of matrices, for each sample.

A network ``W_d D_{d-1} W_{d-1} ... D_1 W_1 x`` has the diagonal matrices ``D_i`` of the slopes of
layer i's activations at x. Its products are ``P_ab = D_b W_b ... D_a W_a``, and ``P_0b = P_1b x``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from relflat_sk._models import DataOptions, to_network
from relflat_sk._network import (
    LayerRecord,
    Network,
    Recorder,
    borrowed,
    is_piecewise_linear,
    layer_input,
)
from relflat_sk._rescaling import AffineLayer, fold_layers
from relflat_sk._warnings import warn

__all__ = [
    "Chain",
    "chain_networks",
    "check_zeros",
    "map_chains",
    "norms_in_c1",
    "relative_sizes",
]

_T = TypeVar("_T")

_ROUNDING = 4  # units in the last place, of an activation's value


@dataclass(frozen=True)
class Chain:
    """A batch of n samples in a chain of d layers; all tensors are float64.

    Shapes: `x` (n, h_0), `weights` (h_i, h_{i-1}), `outputs`, `slopes` (n, h_i).
    """

    names: list[str]
    x: Tensor
    weights: list[Tensor]
    outputs: list[Tensor]
    slopes: list[Tensor]

    def without_zeros(self) -> "Chain":
        """Leave out samples of zeros, which have no norm to measure a disturbance in."""
        kept = self.x.norm(dim=1) > 0
        return replace(
            self,
            x=self.x[kept],
            outputs=[z[kept] for z in self.outputs],
            slopes=[slopes[kept] for slopes in self.slopes],
        )


def chain_networks(
    model: Any, X: Any, initial: nn.Module | None, batch_size: int, device: Any
) -> list[Network]:
    """Return the network of a model and, if given, its initial module with the same data."""
    # `to_network` needs a criterion for a bare module; it is not used here
    network = to_network(model, X, None, DataOptions(nn.MSELoss(), batch_size, device))
    if initial is None:
        return [network]
    # the inputs of the network, behind the steps of a pipeline
    return [network, replace(network, module=initial, forward=None)]


def map_chains(network: Network, function: Callable[[Chain], _T]) -> list[_T]:
    """Run the network batch by batch, and apply a function to the chain of each batch."""
    with borrowed(network.module), torch.no_grad():
        layers = fold_layers(network)
        return [function(chain) for chain in _chains(network, layers)]


def norms_in_c1(chain: Chain) -> dict[tuple[int, int, int], Tensor]:
    """Compute the three norms of condition C1, and their mu. Shapes: returns (4, n)."""
    norms = _norms_of_products(chain)
    last = len(chain.names)
    found = {}
    for c in range(1, last):
        width = chain.outputs[c - 1].shape[1]
        for a in range(c):
            for b in range(c + 1, last + 1):
                whole, after, before = norms[a, b], norms[c + 1, b], norms[a, c]
                apart = after * before
                mu = torch.where(apart > 0, width**0.5 * whole / apart, torch.inf)
                found[a, c, b] = torch.stack([whole, after, before, mu])
    return found


def relative_sizes(z: Tensor, x: Tensor) -> Tensor:
    """Measure outputs in units of the norm of the network's input.

    Shapes: `z` (n, h), `x` (n, h_0); returns (n, h).
    """
    sizes: Tensor = z.abs() / x.norm(dim=1, keepdim=True)
    return sizes


def check_zeros(n_counted: int, n: int) -> None:
    """Warn if samples of zeros are left out."""
    if not n_counted:
        raise ValueError(
            "all samples in X are zero, but the conditions are about disturbances in units of a "
            "sample's norm. Pass samples that are not zero."
        )
    if n_counted < n:
        warn(
            f"{n - n_counted} of {n} samples are zero and left out: the conditions are about "
            "disturbances in units of a sample's norm."
        )


def _norms_of_products(chain: Chain) -> dict[tuple[int, int], Tensor]:
    """Compute the Frobenius norms of ``P_ab``, (n,) each; P_0b is a vector."""
    norms = {}
    last = len(chain.weights)
    for a in range(last + 1):
        product = chain.x[:, :, None]
        if a:
            product = chain.slopes[a - 1][:, :, None] * chain.weights[a - 1]
        norms[a, a] = product.flatten(1).norm(dim=1)
        for b in range(a + 1, last + 1):
            product = chain.slopes[b - 1][:, :, None] * (chain.weights[b - 1] @ product)
            norms[a, b] = product.flatten(1).norm(dim=1)
    return norms


def _chains(network: Network, layers: list[AffineLayer]) -> Iterator[Chain]:
    """Run the network batch by batch, and read the chain of its layers from the records."""
    for layer in layers:
        if len(layer.input_shape) != 1:
            raise ValueError(
                f"the sharpness conditions need a fully connected network, but layer "
                f"{layer.name!r} receives inputs of shape {tuple(layer.input_shape)} for each "
                "sample."
            )
    modules = {
        name: network.module.get_submodule(name)
        for layer in layers
        for name in (layer.name, layer.norm)
        if name is not None
    }
    for batch in network.batches():
        with torch.enable_grad(), Recorder(modules, _start_step) as recorder:
            network(batch.x)
        inputs = [recorder[layer.name].check()[0] for layer in layers]
        steps = [recorder[layer.norm or layer.name] for layer in layers]
        slopes = [_slopes(*step) for step in zip(steps[:-1], inputs[1:], strict=True)]
        outputs = [step.check()[1].detach().double() for step in steps]
        yield Chain(
            [layer.name for layer in layers],
            inputs[0].detach().double(),
            [layer.weight for layer in layers],
            outputs,
            [*slopes, torch.ones_like(outputs[-1])],
        )


def _start_step(
    record: LayerRecord, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """Keep copies of input and output, and start a graph that ends at the next layer."""
    record.calls += 1
    record.features = layer_input(args, kwargs).clone()
    record.version = record.features._version
    record.output = output.detach().clone().requires_grad_()
    passed_on = record.output.clone()  # which an activation may overwrite
    record.node = passed_on.grad_fn
    return passed_on


def _slopes(step: LayerRecord, after: Tensor) -> Tensor:
    """Compute an activation's slopes, ``after = slopes * z``, and refuse anything else.

    Values alone do not tell a ReLU from a function that is close to one at these samples; the
    graph does.
    """
    z, layer = step.check()[1], step.name
    if after.shape == z.shape and after.requires_grad and is_piecewise_linear(after, step.node):
        (slopes,) = torch.autograd.grad(after, z, torch.ones_like(after))
        z, after = z.detach(), after.detach()
        error = (after - slopes * z).abs()
        is_relu = (error <= _ROUNDING * torch.finfo(z.dtype).eps * z.abs()).all()
        if bool(is_relu & (slopes[z > 0] == 1).all()):
            return torch.where(z == 0, 0.0, slopes.double())
    raise ValueError(
        "the sharpness conditions need a chain of layers with ReLU in between, but the input of "
        f"the layer behind {layer!r} is not a ReLU or leaky ReLU of the output of {layer!r}."
    )
