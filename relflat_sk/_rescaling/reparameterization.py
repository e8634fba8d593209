r"""Copies of a network that compute the same function with other weights.

=============  ======================  ======================================================
name           shape                   meaning
=============  ======================  ======================================================
``scale``      ``(k,)`` or ``(1,)``    what a value in the forward pass is multiplied by
``taken``      ``scale``               that of the layer's input x
``out``        ``scale``               that of the layer's output z = W x + b
``rows``       ``scale``               what the rows of W are multiplied by
``columns``    ``scale``               what the columns of W are divided by
=============  ======================  ======================================================

Every scale is positive. The forward pass is followed on the graph that torch.fx records,
without data, and each step hands on the scale of what it takes, or refuses:

.. math::
    W' = \mathrm{diag}(rows)\, W\, \mathrm{diag}(1 / columns), \qquad b' = out \cdot b
    \quad\Rightarrow\quad W' (taken \cdot x) + b' = out \cdot (W x + b)

holds for ``kind="layer"`` with a single number ``rows`` and ``out = taken * rows``, and for
``kind="neuron"`` with ``columns = taken`` and ``out = rows``. A step f with f(c x) = c f(x)
for c > 0 keeps the scale. A value whose scale is 1 may go through anything at all.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import is_lazy

from relflat_sk._network import WEIGHT_LAYERS, Layer, find_layer
from relflat_sk._rescaling.scale_rules import find_rule
from relflat_sk._rescaling.scales import KINDS, NORMS, Change, Walk, is_plain

__all__ = ["reparameterize", "trace"]

Floats = NDArray[np.float64]


def reparameterize(
    module: nn.Module,
    factors: Sequence[float] | Floats | Tensor | Mapping[Layer, Any],
    *,
    kind: str = "layer",
) -> nn.Module:
    r"""Copy a network so that it computes the same function with rescaled weights.

    Where the steps between two layers are positively homogeneous, f(c x) = c f(x) for c > 0,
    one layer can be multiplied by c and a later one divided by it [1]_. Losses, predictions
    and a measure that is worth its name do not notice; the Hessian's trace and largest
    eigenvalue, and weight norms, do [2]_.

    Parameters
    ----------
    module : nn.Module
        Left as it is. Taken as a function in evaluation mode, of a batch: the first axis
        of every value is that of the samples, and `nn.BatchNorm1d` directly behind an
        `nn.Linear` is taken to see (n_samples, n_features). Arguments of `forward` that
        have a default are left at it.
    factors : sequence of float, or mapping of layer to float or to array of shape (d,)
        All positive. For kind "layer" one for each layer with a weight matrix, in forward
        order, or a mapping of layers (position, dotted name, or the module) to factors, 1
        for the others; on every way from input to output the factors must multiply to 1
        (to 1e-6; what is missing goes into the last layer). For kind "neuron" a mapping of
        layers to one factor for each of their d output neurons or channels.
    kind : {"layer", "neuron"}, default="layer"
        "layer": weights are multiplied by the layer's factor, biases by the product of the
        factors so far. "neuron": rows of the weight and entries of the bias are multiplied
        by the neurons' factors, and the columns that consume them in the next layer divided.
        In both, the statistics and the shift of a batch norm on the way become those of the
        rescaled values, and its gain makes up for its `eps`.

    Returns
    -------
    nn.Module
        A deep copy with other parameters, in the mode (train or eval) of the original.

    Raises
    ------
    ValueError
        If the factors are not as described, or the copy would not compute the same
        function: something that is not positively homogeneous, or is not known to be, stands
        between rescaled layers; branches that meet are scaled differently; a rescaled weight
        is shared or computed; a scale would reach the output; or torch.fx cannot follow the
        forward pass.
    LayerNotFoundError
        If `factors` names a layer that is not there.
    TypeError
        If an argument is of the wrong type.

    Notes
    -----
    These pass scales on: ReLU, LeakyReLU, PReLU, pooling, padding with zeros, upsampling,
    dropout, flattening, batch norm with running statistics, sums of equally scaled values,
    products with numbers; for kind "layer" also any reordering of numbers. A step that is
    not known to be positively homogeneous is refused, even if it is.

    References
    ----------
    .. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021, on
       reparameterizations; Theorem 4 for those of single neurons.
    .. [2] L. Dinh et al., "Sharp Minima Can Generalize For Deep Nets", ICML 2017, Section 3.

    Examples
    --------
    y = 3 relu(2 x - 1) + 5. With the first layer four times as large, the hidden value is
    relu(8 x - 4), and the second weight 3/4; its bias sees the product of both factors, 1.

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
    named = _PARSERS[kind](module, factors, order)
    walk = Walk(module, graph, KINDS[kind], named)
    walk.run(find_rule)
    result = _copy(module, {})
    for name, change in walk.layers.items():
        _rescale_layer(name, result.get_submodule(name), change)
    for name, values in walk.norms.items():
        _rescale_norm(name, result.get_submodule(name), values)
    return result


# ---- the forward pass as a graph


class _Tracer(fx.Tracer):
    """Looks into custom modules, but not into subclasses that only rename a layer."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or is_plain(
            m, (*WEIGHT_LAYERS, *NORMS)
        )


def trace(module: nn.Module) -> fx.Graph:
    """Record the forward pass in evaluation mode, on a copy that shares the parameters.

    Parameters
    ----------
    module : nn.Module

    Returns
    -------
    fx.Graph
        Its nodes name modules and tensors as `module` does.

    Raises
    ------
    ValueError
        If torch.fx cannot follow the forward pass.
    """
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "the network has lazy layers, which have no weights yet; run it once on data first."
        )
    tracer = _Tracer()
    if tracer.is_leaf_module(module, ""):
        graph = fx.Graph()
        graph.output(graph.call_module("", (graph.placeholder("x"),)))
        return graph
    # tracing runs the user's code, which may leave proxies behind in attributes
    root = _copy(module, {id(parameter): parameter for parameter in module.parameters()})
    try:
        return tracer.trace(root.eval(), concrete_args=_defaults(root))
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot follow the forward pass of the {type(module).__name__}, so it "
            "cannot be told whether a copy would compute the same function. Usually the "
            f"control flow depends on data. torch.fx says: {error}"
        ) from error


def _defaults(module: nn.Module) -> dict[str, Any]:
    return {
        argument.name: argument.default
        for argument in inspect.signature(module.forward).parameters.values()
        if argument.default is None or isinstance(argument.default, bool | int | float | str)
    }


def _copy(module: nn.Module, shared: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(module, shared)
    except RuntimeError as error:
        raise ValueError(
            f"the {type(module).__name__} cannot be copied. If it keeps a hidden value of its last "
            "forward pass, run it once under torch.no_grad(); if a weight is computed (pruning, "
            f"weight norm), make it permanent. torch says: {error}"
        ) from error


def _layer_order(module: nn.Module, graph: fx.Graph) -> list[str]:
    modules = dict(module.named_modules())
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    return [name for name in dict.fromkeys(called) if is_plain(modules[name], WEIGHT_LAYERS)]


# ---- the factors asked for


def _parse_layer_factors(
    module: nn.Module, factors: Any, order: Sequence[str]
) -> dict[str, Floats]:
    if isinstance(factors, Mapping):
        named = _by_name(module, factors, order)
        return {name: _positive(name, values, ()).reshape(1) for name, values in named.items()}
    values = _to_array("factors", factors)
    if values.shape != (len(order),):
        raise ValueError(
            f"factors must hold one number for each of the {len(order)} layers with a weight "
            f"matrix, in forward order ({', '.join(map(repr, order))}), got shape {values.shape}."
        )
    return {
        name: _positive(name, value, ()).reshape(1)
        for name, value in zip(order, values, strict=True)
    }


def _parse_neuron_factors(
    module: nn.Module, factors: Any, order: Sequence[str]
) -> dict[str, Floats]:
    if not isinstance(factors, Mapping):
        raise TypeError(
            'factors must be a mapping of layer to one factor per output neuron for kind="neuron", '
            f"got {type(factors).__name__}."
        )
    return {
        name: _positive(name, values, (_width(module.get_submodule(name)),))
        for name, values in _by_name(module, factors, order).items()
    }


def _by_name(
    module: nn.Module, factors: Mapping[Layer, Any], order: Sequence[str]
) -> dict[str, Any]:
    names = {layer: name for name, layer in module.named_modules()}  # aliases have one name
    found: dict[str, Any] = {}
    for layer, values in factors.items():
        name = names[module.get_submodule(find_layer(module, layer, order))]
        if name not in order:
            raise ValueError(
                f"layer {name!r} is not called in the forward pass as torch.fx sees it: it is "
                "unused, changes what a layer computes, or belongs to a module that torch.fx "
                f"does not look into. Layers that can be rescaled: {list(order)}."
            )
        if name in found:
            raise ValueError(f"factors names layer {name!r} more than once.")
        found[name] = values
    return found


def _positive(name: str, values: Any, shape: tuple[int, ...]) -> Floats:
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
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be numbers, got {values!r}.") from error


def _width(layer: nn.Module) -> int:
    width = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return int(width)  # type: ignore[arg-type]


_PARSERS: dict[str, Callable[[nn.Module, Any, Sequence[str]], dict[str, Floats]]] = {
    "layer": _parse_layer_factors,
    "neuron": _parse_neuron_factors,
}


# ---- the changes


def _rescale_layer(name: str, layer: Any, change: Change) -> None:
    transposed = isinstance(layer, _ConvTransposeNd)  # its weight is (in, out / groups, ...)
    features = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    rows = _along_weight(layer, np.broadcast_to(change.rows, _width(layer)), first=not transposed)
    columns = _along_weight(layer, np.broadcast_to(change.columns, features), first=transposed)
    _assign(name, layer.weight, _exact(layer.weight) * rows / columns)
    if layer.bias is not None:
        _assign(name, layer.bias, _exact(layer.bias) * torch.tensor(change.out))


def _along_weight(layer: Any, values: Floats, *, first: bool) -> Tensor:
    """Lay one number for each input or output along the weight's axis for them.

    Along axis 0 there is an entry for each of them; along axis 1 only for those of one
    group, which are others for each group of entries of axis 0.
    """
    weight, groups = layer.weight, getattr(layer, "groups", 1)
    laid = (
        values.reshape(-1, 1)
        if first
        else np.repeat(values.reshape(groups, -1), len(weight) // groups, axis=0)
    )
    return torch.tensor(laid.reshape(laid.shape + (1,) * (weight.ndim - 2)))


def _rescale_norm(name: str, norm: Any, values: Floats) -> None:
    """Make batch norm take c x and return c times what it returned for x.

    With gain g, shift h, mean m and variance v, the values it takes now have mean c m and
    variance c^2 v; from g' c (x - m) / sqrt(c^2 v + eps) + h' = c (g (x - m) / sqrt(v + eps) + h)
    follow h' = c h and g' = g sqrt((c^2 v + eps) / (v + eps)).
    """
    c = torch.tensor(values)
    _assign(name, norm.running_mean, c * _exact(norm.running_mean))
    if norm.weight is None:
        return  # g and h are fixed at 1 and 0; with v as it was, the rest still holds
    variance = _exact(norm.running_var)
    gain = torch.sqrt((c**2 * variance + norm.eps) / (variance + norm.eps))
    _assign(name, norm.weight, _exact(norm.weight) * gain)
    _assign(name, norm.running_var, c**2 * variance)
    if norm.bias is not None:
        _assign(name, norm.bias, c * _exact(norm.bias))


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().to(torch.promote_types(tensor.dtype, torch.float64))


def _assign(name: str, tensor: Tensor, values: Tensor) -> None:
    rounded = values.to(tensor.dtype)
    if not torch.equal(rounded.isfinite(), _exact(tensor).isfinite()):
        raise ValueError(
            f"the factors would make a number in module {name!r} larger than {tensor.dtype} can "
            "hold; give factors closer to 1."
        )
    with torch.no_grad():
        tensor.copy_(rounded)
