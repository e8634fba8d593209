r"""Copies of a network that compute the same function with other weights.

A layer ``z = W x + b`` is followed by its data: in the copy it receives ``before * x``, with the
factors of a layer before it, and

.. math::
    W' = \mathrm{diag}(rows)\, W\, \mathrm{diag}(1 / columns), \qquad b' = after \cdot b
    \quad\Rightarrow\quad W' (before \cdot x) + b' = after \cdot (W x + b)

holds for ``kind="layer"`` with a single number ``rows`` and ``after = before * rows``, and for
``kind="neuron"`` with ``columns = before`` and ``after = rows``. The outputs of the finished copy
are compared with the network's on all data.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from relflat_sk._models.network_of import open_model
from relflat_sk._network.folding import BATCH_NORMS
from relflat_sk._network.layers import Layer, find_layer, layer_map, weight_layers
from relflat_sk._network.network import Network
from relflat_sk._network.recording import layer_input
from relflat_sk._random import fork_rng

Floats = NDArray[np.float64]

_PRODUCT_TOLERANCE = 1e-6  # of factors multiplied in float32; the last layer absorbs the rest


def reparameterize(
    module: nn.Module,
    factors: Sequence[float] | Floats | Tensor | Mapping[Layer, Any],
    *,
    X: Any,
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
        The network, which is not changed. Its function is that in evaluation mode.
    factors : sequence of float, or mapping of layer to float or to array of shape (d,)
        Positive factors. For kind "layer", one for each layer with a weight matrix, in forward
        order, or a mapping of layers (position, dotted name, or the module) to factors; other
        layers have 1. On every path from input to output the product of the factors must be 1
        (to 1e-6; the last layer absorbs the rest). For kind "neuron", a mapping of layers to
        one factor for each of their d output neurons or channels.
    X : array, tensor, dict or Dataset of n samples
        Inputs as the network takes them. The outputs of the copy are compared with the network's
        on all of them, up to rounding; the first batch of 1024 also shows which factors each layer
        receives. What the network does with other inputs is not known: take samples of the data.
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
        If the factors are not as described, or the copy does not compute the same outputs: a step
        between rescaled layers is not positively homogeneous, such as tanh; branches that meet
        have different factors; a rescaled weight is shared or computed; or factors reach the
        output.
    LayerNotFoundError
        If `factors` names a layer that the network does not have.
    TypeError
        If `module` is no torch module.

    See Also
    --------
    relative_flatness : Does not change under it.
    measure : The measures by name; their definitions say which of them change.

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
    >>> X = torch.tensor([[-1.0], [1.0], [2.0]])
    >>> [p.item() for p in reparameterize(net, [4.0, 0.25], X=X).parameters()]
    [8.0, -4.0, 0.75, 5.0]
    >>> [p.item() for p in reparameterize(net, {0: [4.0]}, X=X, kind="neuron").parameters()]
    [8.0, -4.0, 0.75, 5.0]
    >>> reparameterize(net, [4.0, 0.5], X=X)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: the outputs of the copy on X differ from the network's: ...
    """
    if not isinstance(module, nn.Module):
        got = type(module).__name__
        raise TypeError(f"module must be a torch.nn.Module, got {got}. Of a net, pass net.module_.")
    if kind not in ("layer", "neuron"):
        raise ValueError(f'kind must be "layer" or "neuron", got {kind!r}.')
    network = open_model(module, X, criterion=nn.MSELoss())  # the loss is not used
    with fork_rng(network.device), torch.no_grad():
        original, copied = (
            replace(network, module=copy.deepcopy(network.module).eval()) for _ in range(2)
        )
        inputs: list[tuple[str, Tensor]] = []
        _run_first_batch(original, lambda name, part, x: inputs.append((name, x.clone())))
        layers = weight_layers(network.module)
        order = [name for name in dict.fromkeys(name for name, _ in inputs) if name in layers]
        named = _read_factors(network.module, factors, order, kind)
        rescaling = _Rescaling(kind, named, iter([x for _, x in inputs]))
        _run_first_batch(copied, rescaling.enter)
        _check_outputs(original, copied)
    result = copy.deepcopy(network.module)
    result.load_state_dict(copied.module.state_dict())
    return result


# -- factors as the user gave them ---------------------------------------------------------


def _read_factors(
    module: nn.Module, factors: Any, order: Sequence[str], kind: str
) -> dict[str, Floats]:
    """Read the factors of some layers, one for each layer or for each of its output neurons."""
    if not isinstance(factors, Mapping):
        if kind == "neuron" or np.shape(factors) != (len(order),):
            raise ValueError(
                f"factors must hold one number for each of the {len(order)} layers with a weight "
                f"matrix, in forward order ({', '.join(map(repr, order))}), or be a mapping of "
                f'layers; for kind="neuron" a mapping only; got {factors!r}.'
            )
        factors = dict(zip(order, factors, strict=True))
    names = {layer: name for name, layer in module.named_modules()}  # aliases have one name
    read: dict[str, Floats] = {}
    for layer, values in factors.items():
        name = names[module.get_submodule(find_layer(module, layer, order))]
        if name in read or name not in order:
            raise ValueError(
                f"factors names layer {name!r} more than once, or it is not called in the forward "
                f"pass. Layers that can be rescaled: {list(order)}."
            )
        shape = (layer_map(module.get_submodule(name)).n_outputs,) if kind == "neuron" else ()
        numbers = values.detach().cpu() if isinstance(values, Tensor) else values
        array = np.asarray(numbers, dtype=np.float64)
        if array.shape != shape or not (np.isfinite(array) & (array > 0)).all():
            raise ValueError(
                f"the factors of layer {name!r} must be positive finite numbers of shape {shape}, "
                f"got {values!r}."
            )
        read[name] = array.reshape(-1)
    return read


# -- the pass that follows the factors by data ---------------------------------------------


def _run_first_batch(network: Network, enter: Callable[[str, nn.Module, Tensor], None]) -> None:
    """Run the first batch, and call a function before each layer and each batch norm."""
    layers = weight_layers(network.module)

    def before(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda part, args, kwargs: enter(name, part, layer_input(args, kwargs))

    handles = [
        part.register_forward_pre_hook(before(name), with_kwargs=True)
        for name, part in network.module.named_modules()
        if name in layers or isinstance(part, BATCH_NORMS)
    ]
    network(next(iter(network.batches())).x)
    for handle in handles:
        handle.remove()


@dataclass
class _Rescaling:
    """Changes the layers of a network while it runs, each when its input is known."""

    kind: str
    factors: dict[str, Floats]
    inputs: Iterator[Tensor]  # of the calls of the network as it was
    factors_behind: list[Floats] = field(default_factory=list)  # of the outputs of earlier layers

    def enter(self, name: str, part: Any, x: Tensor) -> None:
        """Change a layer, or a batch norm, that is about to receive its input."""
        expected = next(self.inputs, x)
        if isinstance(part, BATCH_NORMS):
            _rescale_norm(part, self._before(name, x, expected, part.num_features, axis=1))
            return
        as_map = layer_map(part)
        axis = -1 if as_map.channels_last else 1
        before = self._before(name, x, expected, as_map.n_inputs, axis)
        rows = self.factors.get(name, np.ones(1))
        if self.kind == "neuron":
            after, columns = rows, before
        else:
            after, columns = before * rows, np.ones(1)
            if abs(after[0] - 1) <= _PRODUCT_TOLERANCE:
                after, rows = np.ones(1), 1 / before
        self.factors_behind.append(after)
        _rescale_layer(part, rows, columns, after)

    def _before(self, name: str, x: Tensor, expected: Tensor, n: int, axis: int) -> Floats:
        """Find the factors of what a layer receives: those of the nearest layer that fit."""
        for factors in (*reversed(self.factors_behind), np.ones(1)):
            for spread in _spread(factors, n):
                shape = [1] * x.ndim
                shape[axis] = len(spread)
                factor = torch.tensor(spread, device=x.device).reshape(shape)
                if _agree(x, expected.double() * factor):
                    return spread
        raise ValueError(
            f"module {name!r} of the copy does not receive what it received before, times the "
            f"factors of a layer before it: {_REASONS}"
        )


_REASONS = (
    "the copy would not compute the same function. The factors must multiply to 1 on every path, "
    "the steps between rescaled layers must be positively homogeneous, f(c x) = c f(x) for c > 0, "
    "and rescaled weights must neither be shared, nor computed from other tensors, nor too large "
    "for their dtype."
)


def _spread(factors: Floats, n: int) -> Iterator[Floats]:
    """List the ways in which the factors of neurons can belong to n features."""
    k = len(factors)
    if k in {1, n}:
        yield factors
    elif n % k == 0:
        yield np.repeat(factors, n // k)  # the positions of each channel behind each other
        yield np.tile(factors, n // k)


def _agree(x: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are the same but for rounding."""
    if x.shape != expected.shape:
        return False
    tolerance = torch.finfo(x.dtype).eps ** 0.6 if x.is_floating_point() else 0.0
    largest = float(expected.abs().amax()) if expected.numel() else 0.0
    same = torch.isclose(
        x.to(expected.dtype), expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True
    )
    return bool(same.all())


def _check_outputs(original: Network, copied: Network) -> None:
    """Refuse a copy that returns anything else than the network on the data."""
    returned: list[Any] = []
    for network in (original, copied):
        network.module.register_forward_hook(lambda part, args, output: returned.append(output))
    for batch in original.batches():
        original(batch.x)
        copied(batch.x)
        expected, outputs = map(list, map(_tensors, returned))
        returned.clear()
        if len(expected) != len(outputs) or not all(map(_agree, outputs, expected)):
            raise ValueError(f"the outputs of the copy on X differ from the network's: {_REASONS}")


def _tensors(value: Any) -> Iterator[Tensor]:
    """List the tensors in what a network returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


# -- the changes ---------------------------------------------------------------------------


def _rescale_layer(
    layer: Any,
    rows: Floats,  # (d,) or (1,)
    columns: Floats,  # (number of input features,) or (1,)
    after: Floats,  # (d,) or (1,)
) -> None:
    """Multiply rows and divide columns of a layer's weight, and rescale its bias."""
    with torch.enable_grad(), torch.device("cpu"):
        kernel = torch.zeros(layer.weight.shape, dtype=torch.float64, requires_grad=True)
        as_map = layer_map(layer, kernel)
        of_rows = torch.tensor(np.broadcast_to(rows, as_map.n_outputs))[:, None]
        of_columns = torch.tensor(np.broadcast_to(columns, as_map.n_inputs))
        # the matrix has the numbers of the weight in another order, which its gradient undoes
        factors = of_rows / of_columns[as_map.column_channels()]
        (scale,) = torch.autograd.grad(as_map.matrix, kernel, factors)
    layer.weight.copy_(_exact(layer.weight) * scale)
    if layer.bias is not None:
        layer.bias.copy_(_exact(layer.bias) * torch.from_numpy(after))


def _rescale_norm(norm: Any, factors: Floats) -> None:
    """Make batch norm return, for c x, c times what it returned for x.

    With gain g, shift h, mean m and variance v, the rescaled input has mean c m and
    variance c^2 v; from g' c (x - m) / sqrt(c^2 v + eps) + h' = c (g (x - m) / sqrt(v + eps) + h)
    follow h' = c h and g' = g sqrt((c^2 v + eps) / (v + eps)).
    """
    if norm.running_mean is None:
        return
    c = torch.from_numpy(factors)
    norm.running_mean.copy_(c * _exact(norm.running_mean))
    if norm.weight is None:
        return  # g and h are fixed at 1 and 0; v must stay as it is
    variance = _exact(norm.running_var)
    gain = torch.sqrt((c**2 * variance + norm.eps) / (variance + norm.eps))
    norm.weight.copy_(_exact(norm.weight) * gain)
    norm.running_var.copy_(c**2 * variance)
    if norm.bias is not None:
        norm.bias.copy_(c * _exact(norm.bias))


def _exact(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU in float64, or complex128."""
    return tensor.detach().cpu().to(torch.promote_types(tensor.dtype, torch.float64))
