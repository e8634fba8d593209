r"""Copies of a network that compute the same function with other weights.

=============  ======================  ======================================================
name           shape                   meaning
=============  ======================  ======================================================
``before``     ``(k,)`` or ``(1,)``    the scale of a layer's input x
``after``      ``(k,)`` or ``(1,)``    the scale of the layer's output z = W x + b
``rows``       ``(k,)`` or ``(1,)``    factors by which the rows of W are multiplied
``columns``    ``(k,)`` or ``(1,)``    factors by which the columns of W are divided
=============  ======================  ======================================================

The *scale* of a value in the forward pass is the positive factor between the new network's value
and the old one's. The forward pass is followed on the graph that torch.fx records, without
data. Each step passes the scale of its input on, or is refused:

.. math::
    W' = \mathrm{diag}(rows)\, W\, \mathrm{diag}(1 / columns), \qquad b' = after \cdot b
    \quad\Rightarrow\quad W' (before \cdot x) + b' = after \cdot (W x + b)

holds for ``kind="layer"`` with a single number ``rows`` and ``after = before * rows``, and for
``kind="neuron"`` with ``columns = before`` and ``after = rows``. A step f with f(c x) = c f(x)
for c > 0 keeps the scale. Any step keeps a scale of 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from relflat_sk._network.layers import Layer, find_layer, layer_map
from relflat_sk._rescaling.layers import copy_module, is_plain_layer, trace
from relflat_sk._rescaling.scales import KINDS, Change, Walk

Floats = NDArray[np.float64]


def _read_factors(
    module: nn.Module, factors: Any, order: Sequence[str], kind: str
) -> dict[str, Floats]:
    """Read the factors of some layers, one for each layer or for each of its output neurons."""
    if isinstance(factors, Mapping):
        named = _by_name(module, factors, order)
    elif kind == "neuron":
        raise TypeError(
            'factors must be a mapping of layer to one factor per output neuron for kind="neuron", '
            f"got {type(factors).__name__}."
        )
    else:
        values = _to_array("factors", factors)
        if values.shape != (len(order),):
            raise ValueError(
                f"factors must hold one number for each of the {len(order)} layers with a weight "
                f"matrix, in forward order ({', '.join(map(repr, order))}), got shape "
                f"{values.shape}."
            )
        named = dict(zip(order, values, strict=True))
    n_factors = {
        name: (layer_map(module.get_submodule(name)).n_outputs,) if kind == "neuron" else ()
        for name in named
    }
    return {name: _positive(name, one, n_factors[name]).reshape(-1) for name, one in named.items()}


def _by_name(
    module: nn.Module, factors: Mapping[Layer, Any], order: Sequence[str]
) -> dict[str, Any]:
    """Replace layers as the user gave them by their dotted names."""
    names = {layer: name for name, layer in module.named_modules()}  # aliases have one name
    found: dict[str, Any] = {}
    for layer, values in factors.items():
        name = names[module.get_submodule(find_layer(module, layer, order))]
        if name not in order:
            raise ValueError(
                f"layer {name!r} is not called in the forward pass as torch.fx sees it: it is "
                "unused, changes what a layer computes, or belongs to a module that torch.fx "
                f"does not trace through. Layers that can be rescaled: {list(order)}."
            )
        if name in found:
            raise ValueError(f"factors names layer {name!r} more than once.")
        found[name] = values
    return found


def _positive(name: str, values: Any, shape: tuple[int, ...]) -> Floats:
    """Check shape and sign of the factors of one layer."""
    array = _to_array(f"the factors of layer {name!r}", values)
    if array.shape != shape:
        expected = f"one for each of its {shape[0]} output neurons" if shape else "one number"
        raise ValueError(
            f"the factors of layer {name!r} must be {expected}, got shape {array.shape}."
        )
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(
            f"the factors of layer {name!r} must be positive and finite, got {values!r}; only "
            "positive factors pass through a ReLU."
        )
    return array


def _to_array(what: str, values: Any) -> Floats:
    """Convert numbers to an array, or say that `what` must be numbers."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be numbers, got {values!r}.") from error


def reparameterize(
    module: nn.Module,
    factors: Sequence[float] | Floats | Tensor | Mapping[Layer, Any],
    *,
    kind: str = "layer",
) -> nn.Module:
    r"""Copy a network so that it computes the same function with rescaled weights.

    Where the steps between two layers are positively homogeneous, f(c x) = c f(x) for c > 0, one
    layer can be multiplied by c and a later one divided by it [1]_. Losses and predictions stay the
    same, and a measure of flatness should as well; the Hessian's trace and largest eigenvalue and
    the norms of weights change [2]_.

    Parameters
    ----------
    module : nn.Module
        The network, which is not changed. Its function is that in evaluation mode, of a batch
        whose samples lie along the first axis. `nn.BatchNorm1d` directly behind an `nn.Linear`
        is assumed to receive (n_samples, n_features). Arguments of `forward` that have a
        default keep it.
    factors : sequence of float, or mapping of layer to float or to array of shape (d,)
        Positive factors. For kind "layer", one for each layer with a weight matrix, in forward
        order, or a mapping of layers (position, dotted name, or the module) to factors; other
        layers have 1. On every path from input to output the product of the factors must be 1
        (to 1e-6; the last layer absorbs the rest). For kind "neuron", a mapping of layers to
        one factor for each of their d output neurons or channels.
    kind : {"layer", "neuron"}, default="layer"
        "layer": weights are multiplied by the layer's factor, biases by the product of the
        factors up to there. "neuron": rows of the weight and entries of the bias are multiplied
        by the neurons' factors, and the next layer's columns that read them are divided.
        In both, the statistics and the shift of a batch norm become those of the rescaled
        values, and its gain makes up for its `eps`.

    Returns
    -------
    nn.Module
        A deep copy with other parameters, in the mode (train or eval) of the original.

    Raises
    ------
    ValueError
        If the factors are not as described, or the copy would not compute the same
        function: a step between rescaled layers is not known to be positively homogeneous;
        branches that meet have different scales; a rescaled weight is shared or computed; a
        scale would reach the output; or torch.fx cannot follow the forward pass.
    LayerNotFoundError
        If `factors` names a layer that the network does not have.
    TypeError
        If an argument is of the wrong type.

    Notes
    -----
    These steps pass scales on: ReLU, LeakyReLU, PReLU, pooling, padding with zeros, upsampling,
    dropout, flattening, batch norm with running statistics, sums of values with equal scales,
    products with numbers; for kind "layer" also any reordering of numbers. Other steps are
    refused, even if they are positively homogeneous.

    References
    ----------
    .. [1] Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021, on
       reparameterizations; Theorem 4 for those of single neurons.
    .. [2] Dinh et al., "Sharp Minima Can Generalize For Deep Nets", ICML 2017, Section 3.

    Examples
    --------
    The network is y = 3 relu(2 x - 1) + 5. With the first layer four times as large, the hidden
    value is relu(8 x - 4), and the second weight 3/4. The second bias is multiplied by the
    product of both factors, which is 1.

    >>> net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    >>> for parameter, value in zip(net.parameters(), [2.0, -1.0, 3.0, 5.0]):
    ...     _ = nn.init.constant_(parameter, value)
    >>> [p.item() for p in reparameterize(net, [4.0, 0.25]).parameters()]
    [8.0, -4.0, 0.75, 5.0]
    >>> [p.item() for p in reparameterize(net, {0: [4.0]}, kind="neuron").parameters()]
    [8.0, -4.0, 0.75, 5.0]
    >>> reparameterize(net, [4.0, 0.5])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: the factors multiply to 2 on the way to the network's output, ...
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {type(module).__name__}; give the module "
            "inside it, such as net.module_ of a skorch net."
        )
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {list(KINDS)}, got {kind!r}.")
    graph = trace(module)
    order = _layer_order(module, graph)
    if not order:
        raise ValueError(
            f"torch.fx sees no layer with a weight matrix in the {type(module).__name__}; give "
            "the network itself, not a wrapper around it."
        )
    named = _read_factors(module, factors, order, kind)
    walk = Walk(module, graph, kind, named)
    walk.run()
    result = copy_module(module, {})
    for name, change in walk.layers.items():
        _rescale_layer(name, result.get_submodule(name), change)
    for name, values in walk.norms.items():
        _rescale_norm(name, result.get_submodule(name), values)
    return result


def _layer_order(module: nn.Module, graph: fx.Graph) -> list[str]:
    """List the names of the layers with a weight matrix in forward order."""
    modules = dict(module.named_modules())
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    return [name for name in dict.fromkeys(called) if is_plain_layer(modules[name])]


def _rescale_layer(name: str, layer: Any, change: Change) -> None:
    """Multiply rows and divide columns of a layer's weight, and rescale its bias."""
    kernel = torch.zeros(layer.weight.shape, dtype=torch.float64, requires_grad=True)
    as_map = layer_map(layer, kernel)
    rows = torch.tensor(np.broadcast_to(change.rows, as_map.n_outputs))[:, None]
    columns = torch.tensor(np.broadcast_to(change.columns, as_map.n_inputs))
    # the matrix has the numbers of the weight in another order, which its gradient undoes
    factors = rows / columns[as_map.column_channels()]
    (scale,) = torch.autograd.grad(as_map.matrix, kernel, factors)
    _assign(name, layer.weight, _exact(layer.weight) * scale)
    if layer.bias is not None:
        _assign(name, layer.bias, _exact(layer.bias) * torch.tensor(change.after))


def _rescale_norm(name: str, norm: Any, values: Floats) -> None:
    """Make batch norm return, for c x, c times what it returned for x.

    With gain g, shift h, mean m and variance v, the rescaled input has mean c m and
    variance c^2 v; from g' c (x - m) / sqrt(c^2 v + eps) + h' = c (g (x - m) / sqrt(v + eps) + h)
    follow h' = c h and g' = g sqrt((c^2 v + eps) / (v + eps)).
    """
    c = torch.tensor(values)
    _assign(name, norm.running_mean, c * _exact(norm.running_mean))
    if norm.weight is None:
        return  # g and h are fixed at 1 and 0; v must stay as it is
    variance = _exact(norm.running_var)
    gain = torch.sqrt((c**2 * variance + norm.eps) / (variance + norm.eps))
    _assign(name, norm.weight, _exact(norm.weight) * gain)
    _assign(name, norm.running_var, c**2 * variance)
    if norm.bias is not None:
        _assign(name, norm.bias, c * _exact(norm.bias))


def _exact(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU in float64, or complex128."""
    return tensor.detach().cpu().to(torch.promote_types(tensor.dtype, torch.float64))


def _assign(name: str, tensor: Tensor, values: Tensor) -> None:
    """Write values into a tensor of the copy, unless one of them overflows."""
    rounded = values.to(tensor.dtype)
    if not torch.equal(rounded.isfinite(), _exact(tensor).isfinite()):
        raise ValueError(
            f"the factors would make a number in module {name!r} larger than {tensor.dtype} can "
            "hold; give factors closer to 1."
        )
    with torch.no_grad():
        tensor.copy_(rounded)
