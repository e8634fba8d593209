r"""Sums over all paths from a network's inputs, and its biases, to its outputs.

A path leads along single weights. The sum over all paths of the products ``prod |w|^p`` along
them is one forward pass of ones through the network, with ``|W|^p`` in place of its weights [1]_:

.. math:: \sum_{paths} \prod |w|^p = 1^\top |W_L|^p (|W_{L-1}|^p (\dots |W_1|^p 1 + |b_1|^p) \dots)
    + 1^\top |b_L|^p .

Paths also start at every bias, as from an input that is always one. All values in this forward
pass are nonnegative, and positively homogeneous activations return nonnegative values unchanged.
Pooling has no weights: as in any forward pass, it returns the largest of its inputs' sums over
paths, or their average. Branches add up.

The steps between the layers are those of autograd's graph. All of them must be known to return
nonnegative values unchanged, or sums or means of them, and to be homogeneous together.

References
----------
.. [1] Neyshabur et al., "Norm-Based Capacity Control in Neural Networks", COLT 2015.
"""

import inspect
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._network.borrowing import ReplacedForwards
from relflat_sk._network.folding import AffineLayer
from relflat_sk._network.network import Network, primary_output
from relflat_sk._network.recording import (
    SAME_BUT_FOR_AXES,
    LayerRecord,
    Recorder,
    find_link,
    kind_of,
    layer_input,
    steps_behind,
)
from relflat_sk.measures._results import NotApplicableError

# steps that return nonnegative values unchanged, some of them, their sums or means
_STEPS = {
    "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D", "Add",
    "Amax", "AvgPool2D", "AvgPool3D", "Cat", "ConstantPadNd", "LeakyRelu", "MaxPool2DWithIndices",
    "MaxPool3DWithIndices", "Mean", "MkldnnAdaptiveAvgPool2D", "PixelShuffle", "PreluKernel",
    "Relu", "RreluWithNoise", "Select", "Slice", "Split", "Stack", "Sum", "UpsampleNearest1D",
    "UpsampleNearest2D", "UpsampleNearest3D",
}  # fmt: skip


def sum_over_paths(network: Network, layers: Sequence[AffineLayer], power: int) -> float:
    """Sum the products of powers of weights along all paths through a network.

    To be used within `relflat_sk._network.borrowed`.
    """
    total, half = (_sum_from(network, layers, power, start) for start in (1.0, 0.5))
    if not total < math.inf:  # nan is infinity times a weight of zero
        return math.inf
    if not math.isclose(half, total / 2, rel_tol=1e-9):
        raise _refusal("it is not homogeneous: it adds or multiplies by something else than paths")
    return total


def _refusal(reason: str) -> NotApplicableError:
    return NotApplicableError(
        f"there is no path norm of this network: {reason}. Paths can lead through ReLU and its "
        "variants, pooling, dropout, reshaping, sums and concatenation."
    )


def _sum_from(network: Network, layers: Sequence[AffineLayer], power: int, start: float) -> float:
    """Pass a number through the network in place of each input and of what biases multiply."""
    modules = dict(network.module.named_modules())
    calls: dict[str, deque[AffineLayer]] = defaultdict(deque)
    for layer in layers:
        calls[layer.name].append(layer)
    inputs = _first_inputs(network, start)
    # the steps between layers start at what layers put out, and end at what they receive
    starts: list[Any] = [x.grad_fn for x in inputs.values() if isinstance(x, Tensor)]
    ends: list[Tensor] = []
    outputs: list[Tensor] = []

    def pass_layer(name: str, *args: Any, **kwargs: Any) -> Tensor:
        if not calls[name]:
            raise _refusal(f"it calls layer {name!r} more often for some inputs than for others")
        layer, x = calls[name].popleft(), layer_input(args, kwargs)
        z = layer.apply(x.detach().double(), layer.weight.abs() ** power)
        if layer.bias is not None:
            z = z + start * layer.spread_bias(layer.bias.abs() ** power)
        outputs.append(z.requires_grad_() * 1)
        starts.append(outputs[-1].grad_fn)
        ends.append(x)
        return outputs[-1]

    forwards: dict[str, Callable[..., Tensor]] = {name: partial(pass_layer, name) for name in calls}
    prelus = (name for name, part in modules.items() if isinstance(part, nn.PReLU))
    norms = (layer.norm for layer in layers if layer.norm is not None)
    forwards |= dict.fromkeys((*prelus, *norms), lambda x: x)
    replaced = ((modules[name], forward) for name, forward in forwards.items())
    with torch.enable_grad(), ReplacedForwards(replaced):
        output = primary_output(network.module(**inputs))
    if outputs and find_link(output, starts[-1]) is not None:
        output = outputs[-1]  # the norms are of the network up to its logits
    if any(calls.values()):
        raise _refusal("it calls layers more often for some inputs than for others")
    for step in {step for end in (*ends, output) for step, _ in steps_behind(end, *starts)}:
        is_known = step.name() in SAME_BUT_FOR_AXES or kind_of(step) in _STEPS
        if not is_known or getattr(step, "_saved_alpha", 1) != 1:
            raise _refusal(f"{step.name()} is not known to return nonnegative values unchanged")
    return float(output.detach().sum())


def _first_inputs(network: Network, value: float) -> dict[str, Any]:
    """Return the arguments of the module's call for one sample, with a number in place of each."""
    signature = inspect.signature(network.module.forward)
    inputs: dict[str, Any] = {}

    def keep_arguments(record: LayerRecord, args: Any, kwargs: Any, output: Any) -> Any:
        inputs.update(signature.bind(*args, **kwargs).arguments)
        return output

    with torch.no_grad(), Recorder({"": network.module}, keep_arguments):
        network(next(network.batches()).x)
    for name, x in inputs.items():
        if isinstance(x, Tensor) and not x.is_floating_point():
            raise _refusal(f"it takes {name!r} of {x.dtype}, as for an embedding")
        if isinstance(x, Tensor):
            ones = torch.full_like(x[:1], value, dtype=torch.float64, requires_grad=True)
            inputs[name] = ones * 1  # a layer may change it in place
    return inputs
