"""Norms of a network's weights, divided by its margin or not: measures without any curvature.

`docs/definitions.md` defines them by the weights ``W_l`` of layers l = 1 .. L, with batch norm
folded into the layer before it, and the margin of `relflat_sk.measures._predictions` [1]_.

The products and path norms have the unit of a product of L squared weights, the Lipschitz products
that of a product of L weights, `l2_norm` that of a weight, and `inverse_margin` that of one over a
squared logit. `parameter_count`, `log_robustness`, the ranks and the exponent have none.

*Constants.* The factors 4 per layer (2 in the l1 path norm) of [1]_, and the widths in its l2 path
norm, are left out: they are the same for all networks of one architecture.

*Convolutions* count as the linear maps that they are. ``|W|_2`` is the norm of the map from image
to image, and so is ``|W|_{1,inf}`` in a Lipschitz product. ``h_l`` is the size of the layer's
output for one sample: channels times positions, or the units of a linear layer. Paths lead from
pixel to pixel. Only ``|W|_F`` and the group norms are those of the kernel, with each weight
counted once, as in [1]_.

*Spectra* are those of the weights as matrices, as they are trained: one row for each output
channel of a convolution, and no batch norm folded in.

*Biases* count in the path norms and among the parameters only. In the path norms, each bias is a
path from an input that is always one, and so is the shift of a batch norm.

References
----------
.. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
   Sections 2.1 to 2.3.
"""

import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import ParametrizationList

from relflat_sk._checks import check_number, is_number, warn
from relflat_sk._network.borrowing import ReplacedForwards, borrowed, by_all_names
from relflat_sk._network.folding import AffineLayer, fold_layers
from relflat_sk._network.network import Network, layer_names, primary_output
from relflat_sk._network.recording import (
    SAME_BUT_FOR_AXES,
    find_faster_step,
    find_link,
    kind_of,
    layer_input,
    steps_behind,
)
from relflat_sk.measures._eigenvalues import largest_eigenvalue
from relflat_sk.measures._network_measure import (
    EVERY_CHANGE,
    RESCALINGS,
    NetworkMeasure,
    NotApplicableError,
    keywords,
)
from relflat_sk.measures._predictions import sample_margins
from relflat_sk.measures._scan import Measured

# largest size of the matrix of a convolution for which it is written out
_DENSE = 2**18
RTOL = 1e-4  # of the spectral norm of larger ones


def is_iterated(layer: AffineLayer) -> bool:
    """Tell whether `operator_norm` iterates, and so is exact to a tolerance only."""
    size = layer.input_shape.numel() * layer.output_shape.numel()
    return not layer.map.channels_last and size > _DENSE


def operator_norm(layer: AffineLayer, rtol: float) -> float:
    """Compute the spectral norm of the map from a layer's input to its output, without bias."""
    # That of a convolution depends on its stride, its padding and the size of the image, unlike the
    # norm of the kernel as a matrix.
    n_inputs = layer.input_shape.numel()
    if layer.map.channels_last:
        return float(torch.linalg.matrix_norm(layer.weight, ord=2))
    if not is_iterated(layer):
        basis = torch.eye(n_inputs).to(layer.weight).reshape(-1, *layer.input_shape)
        with torch.no_grad():
            matrix = layer.apply(basis, layer.weight).flatten(1)
        return float(torch.linalg.matrix_norm(matrix, ord=2))

    def product(vector: Tensor) -> Tensor:
        """Multiply with ``A^T A``: the gradient of ``|A x|^2 / 2``."""
        x = vector.to(layer.weight).reshape(1, *layer.input_shape)
        x.requires_grad_()
        with torch.enable_grad():
            half = layer.apply(x, layer.weight).square().sum() / 2
        return torch.autograd.grad(half, x)[0].flatten()

    # an arbitrary start, but the same in every call
    square, _ = largest_eigenvalue(
        product, n_inputs, rtol=rtol, random_state=0, where=f"at layer {layer.name!r}"
    )
    return math.sqrt(square)


def other_weights(module: nn.Module, layers: Sequence[AffineLayer]) -> Iterator[tuple[str, Tensor]]:
    """List weights outside the called layers: of embeddings, recurrent cells, unused layers."""
    called: list[Any] = [layer.map.layer for layer in layers]
    known_layers, known_weights = {id(one) for one in called}, {id(one.weight) for one in called}
    for name, owner in module.named_modules():
        if id(owner) in known_layers or isinstance(owner, ParametrizationList):
            continue
        for key, parameter in owner.named_parameters(recurse=False):
            if parameter.ndim > 1 and id(parameter) not in known_weights:
                yield f"{name}.{key}".removeprefix("."), parameter.detach()


def only_layers(measure: str, network: Network) -> list[AffineLayer]:
    """List the called layers of a network, and refuse one that has weights elsewhere."""
    with borrowed(network.module):
        layers = fold_layers(network)
        # in training mode, spectral norm changes its buffers whenever a weight is read
        others = [name for name, _ in other_weights(network.module, layers)]
    if others:
        raise NotApplicableError(
            f"{measure} is a product over the linear and convolutional layers that are called, "
            f"but the network has other weights: {', '.join(others)}."
        )
    return layers


# -- logarithms of norms, each with its relative tolerance ---------------------------------------

PERCENTILE = 5.0
_LARGEST = math.log(sys.float_info.max)


def _log(value: float) -> float:
    """Return the natural logarithm of a number that is not negative; minus infinity for 0."""
    return math.log(value) if value > 0 else -math.inf


def _positive_margin(network: Network, percentile: float) -> float:
    """Return the margin of a classifier; nan, with a warning, if it is not positive."""
    check_number("percentile", percentile, positive=False)
    if percentile > 100:
        raise ValueError(f"percentile must be between 0 and 100, got {percentile!r}.")
    gamma = float(np.percentile(sample_margins(network), percentile))
    if gamma > 0:
        return gamma
    warn(
        f"the margin is {gamma:.3g}, not positive: it is the {percentile:g}th percentile of the "
        "samples' margins, and wrong samples have negative ones. What is divided by it is nan. "
        "Measure data that the network fits, or pass a larger percentile."
    )
    return math.nan


def _estimate_from_log(log_norm: float, tolerance: float = 0.0) -> Measured:
    """Return a norm from its logarithm, with the relative tolerance of an iteration."""
    if log_norm > _LARGEST:
        warn(f"the norm is exp({log_norm:.6g}), too large for a float: it is given as infinite.")
        return Measured(math.inf)
    norm = math.exp(log_norm)
    return Measured(norm, tolerance * norm, "lanczos") if tolerance else Measured(norm)


LogNorm = tuple[float, float]


def norm(
    log_norm: Callable[..., LogNorm], same: tuple[str, ...] = (), power: int = 2
) -> NetworkMeasure:
    """Make a measure of a norm's logarithm: the norm, divided by a power of the margin or not."""

    def compute(
        network: Network, *, over_margin: bool = False, percentile: float = PERCENTILE, **own: Any
    ) -> Measured:
        log_value, tolerance = log_norm(network, **own)
        if over_margin:
            log_value -= power * math.log(_positive_margin(network, percentile))
        return _estimate_from_log(log_value, tolerance)

    return NetworkMeasure(compute, same, arguments=keywords(log_norm, compute))


def _l2_norm(network: Network) -> LogNorm:
    """Take all weights."""
    with borrowed(network.module):
        layers = fold_layers(network)
        weights = {layer.name: layer.weight for layer in layers}  # a layer called twice counts once
        squares = [float(weight.square().sum()) for weight in weights.values()]
        others = other_weights(network.module, layers)
        squares += [float(weight.double().square().sum()) for _, weight in others]
    return _log(sum(squares)) / 2, 0.0


def _frobenius_product(network: Network) -> LogNorm:
    layers = only_layers("frobenius_product", network)
    return sum(_log(float(layer.weight.square().sum())) for layer in layers), 0.0


def _group_norm_product(network: Network, *, p: float = 1.0, q: float = math.inf) -> LogNorm:
    for name, order in {"p": p, "q": q}.items():
        if not (is_number(order) and order >= 1):
            raise ValueError(f"{name} must be at least 1, or math.inf, got {order!r}.")
    vector_norm = torch.linalg.vector_norm
    rows = (vector_norm(x.weight, ord=p, dim=1) for x in only_layers("group_norm_product", network))
    return sum(2 * _log(float(vector_norm(row, ord=q))) for row in rows), 0.0


def _spectral_product(network: Network, *, rtol: float = RTOL) -> LogNorm:
    layers = only_layers("spectral_product", network)
    log_norm, tolerance = _log_spectral(layers, rtol)
    sizes = sum(math.log(layer.output_shape.numel()) for layer in layers)
    return sizes + 2 * log_norm, 2 * tolerance


def _l2_lipschitz_product(network: Network, *, rtol: float = RTOL) -> LogNorm:
    return _log_spectral(only_layers("l2_lipschitz_product", network), rtol)


def _linf_lipschitz_product(network: Network) -> LogNorm:
    return sum(map(_log_largest_row, only_layers("linf_lipschitz_product", network))), 0.0


def _log_spectral(layers: Sequence[AffineLayer], rtol: float) -> LogNorm:
    """Multiply the norms of the layers' maps between vectors with the Euclidean norm."""
    log_norms = (_log(operator_norm(layer, rtol)) for layer in layers)
    return sum(log_norms), rtol / 2 * sum(map(is_iterated, layers))


def _log_largest_row(layer: AffineLayer) -> float:
    """Return the logarithm of the norm between vectors with the maximum norm."""
    ones = layer.weight.new_ones((1, *layer.input_shape))
    return _log(float(layer.apply(ones, layer.weight.abs()).max()))


def _parameter_count(network: Network, *, times_depth: bool = False) -> Measured:
    count = sum(parameter.numel() for parameter in network.module.parameters())
    return Measured(float(count * (len(layer_names(network)) if times_depth else 1)))


def _inverse_margin(network: Network, *, percentile: float = PERCENTILE) -> Measured:
    return _estimate_from_log(-2 * math.log(_positive_margin(network, percentile)))


# -- robustness: the number of cells of inputs in which a classifier does not change its class ---
#
# A classifier is (K, epsilon)-robust [1]_, [2]_ if its inputs can be divided into K cells such that
# the loss of a training sample differs by at most epsilon from that of any input in its cell. The
# 0-1 loss does not differ at all (epsilon = 0) for samples of margin ``gamma`` or more in cells of
# diameter ``gamma / (2 C)``, where C is a Lipschitz constant of the logits: the difference of two
# logits changes at most twice as fast as one of them.
#
# References
# ----------
# .. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
#    Section 2.3.
# .. [2] Xu and Mannor, "Robustness and Generalization", Machine Learning 86, 2012.


def _log_robustness(network: Network, *, percentile: float = PERCENTILE) -> Measured:
    """Compute the logarithm of the number K of cells in which a classifier is robust."""
    # The cells are the cubes of a grid over the smallest box that contains the data.
    layers = only_layers("log_robustness", network)
    ranges = _ranges(network)
    _check_chain(network, layers)
    gamma = _positive_margin(network, percentile)
    logs = ranges.log() + (math.log(2 / gamma) + sum(map(_log_largest_row, layers)))
    # from 2^52 cells on, rounding up changes nothing in floating point
    cells = torch.where(logs < 52 * math.log(2), logs.exp().ceil().clamp(min=1).log(), logs)
    return Measured(float(cells.sum()))


def _check_chain(network: Network, layers: Sequence[AffineLayer]) -> None:
    """Refuse a network whose outputs may change faster than the product of its layers' norms."""
    with borrowed(network.module), torch.enable_grad():
        x = next(network.batches()).x[:1].detach().clone().requires_grad_()
        n_folded = sum(layer.norm is not None for layer in layers)
        why = find_faster_step(network(x), x, len(layers), n_folded)
    if why is not None:
        raise NotApplicableError(
            "log_robustness needs a chain of layers with activations of slope at most 1, and this "
            f"network is another: {why}. Use 'inverse_margin' or a norm over the margin."
        )


def _ranges(network: Network) -> Tensor:
    """Compute the range of each feature over the data, float64 of shape (number of features,)."""
    lowest, highest = [], []
    for batch in network.batches():
        if not (isinstance(batch.x, Tensor) and batch.x.is_floating_point()):
            kind = f"of {batch.x.dtype}" if isinstance(batch.x, Tensor) else type(batch.x).__name__
            raise NotApplicableError(
                "log_robustness divides inputs of floating-point numbers into cells, but the "
                f"network takes inputs {kind}."
            )
        x = batch.x.flatten(1).double()
        lowest.append(x.amin(dim=0))
        highest.append(x.amax(dim=0))
    return torch.stack(highest).amax(dim=0) - torch.stack(lowest).amin(dim=0)


# -- sums over all paths from a network's inputs, and its biases, to its outputs -------------------
#
# A path leads along single weights. The sum over all paths of the products ``prod |w|^p`` along
# them is one forward pass of ones through the network, with ``|W|^p`` in place of its weights [3]_:
#
#     1^T |W_L|^p (|W_{L-1}|^p (... |W_1|^p 1 + |b_1|^p) ...) + 1^T |b_L|^p
#
# Paths also start at every bias, as from an input that is always one. All values in this forward
# pass are nonnegative, and positively homogeneous activations return nonnegative values unchanged.
# Pooling has no weights: as in any forward pass, it returns the largest of its inputs' sums over
# paths, or their average. Branches add up.
#
# The steps between the layers are those of autograd's graph. All of them must be known to return
# nonnegative values unchanged, or sums or means of them, and to be homogeneous together.
#
# .. [3] Neyshabur et al., "Norm-Based Capacity Control in Neural Networks", COLT 2015.

# steps that return nonnegative values unchanged, some of them, their sums or means
_STEPS = {
    "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D", "Add",
    "Amax", "AvgPool2D", "AvgPool3D", "Cat", "ConstantPadNd", "LeakyRelu", "MaxPool2DWithIndices",
    "MaxPool3DWithIndices", "Mean", "MkldnnAdaptiveAvgPool2D", "PixelShuffle", "PreluKernel",
    "Relu", "RreluWithNoise", "Select", "Slice", "Split", "Stack", "Sum", "UpsampleNearest1D",
    "UpsampleNearest2D", "UpsampleNearest3D",
}  # fmt: skip


def _path_norm(power: int, network: Network) -> LogNorm:
    """Take the path norm of powers 1, which is squared, or 2."""
    with borrowed(network.module):
        layers = fold_layers(network)
        total, half = (_sum_from(network, layers, power, start) for start in (1.0, 0.5))
    if not total < math.inf:  # nan is infinity times a weight of zero
        return math.inf, 0.0
    if not math.isclose(half, total / 2, rel_tol=1e-9):
        raise _refusal("it is not homogeneous: it adds or multiplies by something else than paths")
    return 2 / power * _log(total), 0.0


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
    inputs, named = _first_inputs(network, start)
    # the steps between layers start at what layers put out, and end at what they receive
    starts: list[Any] = [x.grad_fn for x in (*inputs, *named.values()) if isinstance(x, Tensor)]
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
    tensors = chain(network.module.named_parameters(), network.module.named_buffers())
    precise = {name: t.detach().double() for name, t in tensors if t.is_floating_point()}
    precise = by_all_names(network.module, precise)
    with torch.enable_grad(), ReplacedForwards(replaced):
        whole = functional_call(network.module, precise, tuple(inputs), named, tie_weights=False)
    output = primary_output(whole)
    if outputs and find_link(output, starts[-1]) is not None:
        output = outputs[-1]  # the norms are of the network up to its logits
    if any(calls.values()):
        raise _refusal("it calls layers more often for some inputs than for others")
    for step in {step for end in (*ends, output) for step, _ in steps_behind(end, *starts)}:
        is_known = step.name() in SAME_BUT_FOR_AXES or kind_of(step) in _STEPS
        if not is_known or getattr(step, "_saved_alpha", 1) != 1:
            raise _refusal(f"{step.name()} is not known to return nonnegative values unchanged")
    return float(output.detach().sum())


def _first_inputs(network: Network, value: float) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the module's call for one sample, with a number in place of each."""
    call: dict[str, Any] = {}

    def keep_arguments(module: nn.Module, args: Any, kwargs: Any) -> None:
        call.update(args=args, kwargs=kwargs)

    keeping = network.module.register_forward_pre_hook(keep_arguments, with_kwargs=True)
    with torch.no_grad(), keeping:
        network(next(network.batches()).x)

    def of_number(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not x.is_floating_point():
            raise _refusal(f"it takes an input of {x.dtype}, as for an embedding")
        ones = torch.full_like(x[:1], value, dtype=torch.float64, requires_grad=True)
        return ones * 1  # a layer may change it in place

    named = {name: of_number(x) for name, x in call["kwargs"].items()}
    return [of_number(x) for x in call["args"]], named


# -- the table: each measure takes a network, and keyword arguments of its own ------------------

NORM_MEASURES: dict[str, NetworkMeasure] = {
    "parameter_count": NetworkMeasure(_parameter_count, EVERY_CHANGE),
    "l2_norm": norm(_l2_norm, power=1),
    "frobenius_product": norm(_frobenius_product, ("layer",)),
    "group_norm_product": norm(_group_norm_product, ("layer",)),
    "spectral_product": norm(_spectral_product, ("layer",)),
    "l1_path_norm": norm(partial(_path_norm, 1), RESCALINGS),
    "l2_path_norm": norm(partial(_path_norm, 2), RESCALINGS),
    "inverse_margin": NetworkMeasure(_inverse_margin, EVERY_CHANGE),
    "linf_lipschitz_product": norm(_linf_lipschitz_product, ("layer",), power=1),
    "l2_lipschitz_product": norm(_l2_lipschitz_product, ("layer",), power=1),
    "log_robustness": NetworkMeasure(_log_robustness, ("layer",)),
}
