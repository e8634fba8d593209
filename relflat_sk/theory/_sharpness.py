r"""Conditions of Neyshabur et al. (2017) under which a ReLU network is not sharp.

Their Section 4 bounds the expected sharpness of a network ``W_d D_{d-1} W_{d-1} ... D_1 W_1 x``
without a factor exponential in its depth. ``D_i`` is the diagonal matrix of the slopes of layer
i's h_i activations at x. With the products ``P_{ab} = D_b W_b ... D_a W_a``, the bound rests on
three conditions on the constants

.. math::
    \mu &= \min_{a < c < b} \frac{\sqrt{h_c}\, |P_{ab}|_F}{|P_{c+1,b}|_F |P_{ac}|_F},
    \qquad P_{0b} = P_{1b} x, \\
    C_2 &= \max_{\delta > 0} \frac1\delta \cdot \frac1{h_k} \#\{i : |z_{ki}| \le \delta |x|\},
    \qquad z_k = W_k P_{1,k-1} x, \\
    C_3 &= \frac{\sqrt{h_i} \max_j |W_{i,j}|_2}{|D_i W_i|_F} .

A large mu means that the effects of neighbouring layers do not cancel. A small C_2 means that a
small disturbance switches few units on or off. A small C_3 means that no unit has far larger
weights than the others in its layer.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from relflat_sk._checks import check_number, check_probability, warn
from relflat_sk._losses.loss import name_criterion
from relflat_sk._models.network_of import open_model
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.folding import fold_layers
from relflat_sk._network.network import Network, mean_loss
from relflat_sk._network.recording import LayerRecord, Recorder, is_piecewise_linear, keep_graph
from relflat_sk.theory._moves import counting

# name and meaning of each condition's constant
_CONSTANTS = {
    "C1": (
        "mu",
        "at the worst sample, the layers around it have {:.3g} of independent layers' effect",
    ),
    "C2": (
        "C_2",
        "at the worst sample, noise of size t |x| switches at most a share {:.3g} t of its units",
    ),
    "C3": ("C_3", "at the worst sample, its largest unit is {:.3g} times the average active unit"),
}

# Lipschitz constants of losses in the outputs, in the Euclidean norm: the largest gradients are
# those of a sample that is given to a wrong class with certainty
_LIPSCHITZ = {nn.CrossEntropyLoss: math.sqrt(2), nn.BCEWithLogitsLoss: 1.0}

_ROUNDING = 4  # units in the last place, of an activation's value


def sharpness_conditions(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    initial: nn.Module | None = None,
    detail: str | None = None,
    deltas: Sequence[float] | None = None,
    batch_size: int = 16,
    device: Any = None,
) -> pd.DataFrame:
    r"""Compute the constants of three conditions under which a ReLU network is not sharp.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        A chain of linear layers with ReLU or leaky ReLU in between. Batch norm is folded into
        the layer before it.
    X : array-like of n samples
        Inputs as the model takes them. The conditions hold for each sample by itself, so a few
        hundred samples suffice.
    y : array-like, optional
        Not used.
    initial : nn.Module, optional
        A copy of the module from before training, to compare with, as Appendix D of [1]_ does.
    detail : {"C1", "C2"}, optional
        Return what the constants of one condition are made of: the norms of C1 for all layers, or
        the share of units in C2 for disturbances of many sizes.
    deltas : sequence of float, optional
        With ``detail="C2"``, sizes of the disturbance, in units of the input's norm; 26 values
        from 1e-4 to 10 if None.
    batch_size : int, default=16
        Samples in one forward pass. The products of weight matrices are computed for one sample
        after the other.
    device : str or torch.device, optional
        Where to compute; where the model is if None.

    Returns
    -------
    DataFrame
        One row for each condition and layer, in forward order, with columns `condition` ("C1",
        "C2" or "C3"), `layer` (its name), `position` (of the layer in forward order),
        `constant` ("mu", "C_2" or "C_3"), `worst` (the constant, over all samples), `median`
        (over samples) and `reading`, the meaning in words; and, with `initial`,
        `initial_worst` and `initial_median`. Large values of mu are good, and small values of the
        others. The constants have no unit.

        With ``detail="C1"``, one row for each ``a < c < b``, from 0, the input, to d, the last
        layer, with columns `a`, `c`, `b`, `layer` (the name of layer c) and, at the sample where
        mu is smallest, `whole` (:math:`|P_{ab}|_F`), `after` (:math:`|P_{c+1,b}|_F`), `before`
        (:math:`|P_{ac}|_F`) and `mu`, which is :math:`\sqrt{h_c}` times the first over the product
        of the others, and infinite where one of these is zero.

        With ``detail="C2"``, one row for each layer but the last and each delta, with columns
        `layer`, `position`, `delta`, `mean_share` and `largest_share` (over samples) of units with
        :math:`|z_{ki}| \le \delta |x|`, and `ratio`, the largest share over delta. The constant
        C_2 is the largest ratio over all delta.

    Raises
    ------
    ValueError
        If the network is not such a chain, the initial one has other layers, all samples are
        zero, a delta is not positive, or there is no such detail.

    Warns
    -----
    FlatnessWarning
        If samples are zero, which are left out.

    See Also
    --------
    pac_bayes_bound : A bound that needs no conditions.
    measure : ``"expected_sharpness"`` is one of its names.

    Notes
    -----
    C1 compares products of weights through a layer with the parts before and behind it, C2 is
    about the layer's activations, and C3 about its weights; the last layer has C3 only.
    Independent Gaussian layers have a mu of about 1. The paper has no biases, and inputs of norm
    1. Here, biases decide with the weights which units are active, and C2 measures in units of
    the input's norm, so that samples of zeros are left out. The paper prints C2 without the
    absolute value, which its explanation, that activations flip, requires. Its Figure 6 also has
    c = a, which the condition excludes.

    References
    ----------
    .. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
       Section 4 and Appendix D.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(3, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2)
    ... )
    >>> X = torch.randn(20, 3)
    >>> sharpness_conditions(net, X)[["condition", "layer"]].values.tolist()
    [['C1', '0'], ['C2', '0'], ['C3', '0'], ['C3', '2']]
    >>> curve = sharpness_conditions(net, X, detail="C2", deltas=[0.1, 1, 10])
    >>> curve["mean_share"].is_monotonic_increasing, curve["mean_share"].iloc[-1].item()
    (True, 1.0)
    """
    if detail not in (None, "C1", "C2") or (detail is not None and initial is not None):
        raise ValueError(f'detail must be None, "C1" or "C2", None with initial; got {detail!r}.')
    # `open_model` needs a criterion for a bare module; it is not used here
    network = open_model(model, X, criterion=nn.MSELoss(), batch_size=batch_size, device=device)
    chain = _without_zeros(_read_chain(network))
    if detail == "C1":
        return _factors(chain)
    if detail == "C2":
        return _curve(chain, np.geomspace(1e-4, 10, 26).tolist() if deltas is None else deltas)
    table = _table(chain)
    if initial is None:
        return table
    # on the inputs of the network, behind the steps of a pipeline
    first = replace(network, module=initial, forward=None)
    before = _table(_without_zeros(_read_chain(first)))
    keys = ["condition", "layer", "position", "constant"]
    if not table[keys].equals(before[keys]):
        raise ValueError(
            f"the initial module has the layers {before['layer'].unique().tolist()}, and the model "
            f"{table['layer'].unique().tolist()}. Pass the module from before training."
        )
    return table.join(before[["worst", "median"]].add_prefix("initial_"))


def _table(chain: "Chain") -> pd.DataFrame:
    """Summarise the constants of all samples, a row for each condition and layer."""
    rows = []
    for (condition, position), values in _constants(chain).items():
        constant, reading = _CONSTANTS[condition]
        worst = float(values.min() if condition == "C1" else values.max())
        rows.append({
            "condition": condition,
            "layer": chain.names[position],
            "position": position,
            "constant": constant,
            "worst": worst,
            "median": float(values.median()),
            "reading": reading.format(worst),
        })
    return pd.DataFrame(rows)


def _factors(chain: "Chain") -> pd.DataFrame:
    """List the norms of condition C1, each at the sample where mu is smallest."""
    rows = [
        (a, c, b, chain.names[c - 1], *norms[:, norms[3].argmin()].cpu().tolist())
        for (a, c, b), norms in _norms_in_c1(chain).items()
    ]
    return pd.DataFrame(rows, columns=["a", "c", "b", "layer", "whole", "after", "before", "mu"])


def _curve(chain: "Chain", deltas: Sequence[float]) -> pd.DataFrame:
    """List the shares of small units of condition C2 by the size of the disturbance."""
    rows = []
    for position, layer in enumerate(chain.names[:-1]):
        for delta in deltas:
            check_number("deltas", delta)
            shares = (chain.relative_sizes(position) <= delta).double().mean(dim=1)
            largest = float(shares.max())
            rows.append((layer, position, delta, float(shares.mean()), largest, largest / delta))
    columns = ["layer", "position", "delta", "mean_share", "largest_share", "ratio"]
    return pd.DataFrame(rows, columns=columns)


@dataclass(frozen=True)
class SharpnessBound:
    """The terms of Theorem 1, with 1 for the constant that its O leaves open.

    Parameters
    ----------
    total : float
        The sum of the three terms, in the unit of the loss.
    empirical_risk : float
        Mean loss on the sample.
    sharpness : float
        The bound on the expected sharpness.
    complexity : float
        The square root that pays for the weights' size in units of the noise.
    mu, c_2, c_3 : float
        Constants with which the conditions C1 to C3 hold at all layers and samples.
    gammas : tuple of float
        ``gamma_i`` of each layer.
    """

    total: float
    empirical_risk: float
    sharpness: float
    complexity: float
    mu: float
    c_2: float
    c_3: float
    gammas: tuple[float, ...]


def sharpness_bound(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    sigma: float | Sequence[float],
    *,
    delta: float = 0.05,
    lipschitz: float | None = None,
    criterion: Any = None,
    batch_size: int = 16,
    device: Any = None,
) -> SharpnessBound:
    r"""Compute the right-hand side of the bound on the risk of a ReLU network with noisy weights.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        See `sharpness_conditions`; with two layers or more.
    X : array-like of n samples
        Inputs of the sample that the model was trained on.
    y : array-like of shape (n, ...)
        Labels, as in training. Samples whose labels the criterion ignores do not count.
    sigma : float or sequence of float
        Standard deviation of the noise on the weights, one for each layer in forward order or one
        for all.
    delta : float, default=0.05
        The delta of the logarithm. It is also divided among the d layers, as their delta_i.
    lipschitz : float, optional
        Lipschitz constant of the loss in the outputs, in the Euclidean norm. Known for
        `torch.nn.CrossEntropyLoss` (the root of 2) and `torch.nn.BCEWithLogitsLoss` (1) that take
        means without weights.
    criterion : torch loss, optional
        Needed for a bare module; an estimator knows its own.
    batch_size : int, default=16
        Samples in one forward pass.
    device : str or torch.device, optional
        Where to compute; where the model is if None.

    Returns
    -------
    SharpnessBound
        Frozen, with `total` and its terms.

    Raises
    ------
    ValueError
        If the network is not a chain of two linear layers or more with ReLU in between, an argument
        is out of its range, or `lipschitz` is needed.

    Warns
    -----
    FlatnessWarning
        If samples are zero, which have no part in mu, C_2 and C_3.

    Notes
    -----
    Theorem 1 of [1]_ bounds the risk under noise :math:`\nu_i \sim N(0, \sigma_i^2)` on the weights
    of layer i of d by the mean loss plus

    .. math::
        &O\Bigl(\Bigl[\prod_i (1 + \gamma_i) - 1 + \prod_i (1 + \gamma_i C_2 C_3)
        \Bigl(\prod_i (1 + \gamma_i C_{\delta_i} C_2) - 1\Bigr)\Bigr] C_L
        \frac1n \sum_x |f_w(x)|\Bigr) \\
        &+ \sqrt{\frac1n \Bigl(\sum_i \frac{|W_i|_F^2}{\sigma_i^2} + \ln\frac{1}{\delta}\Bigr)},
        \qquad \gamma_i = \frac{\sigma_i \sqrt{h_i h_{i-1}}}{\mu^2 |W_i|_F}, \quad
        C_{\delta_i} = (1 + \delta_i) \sqrt{2 \ln h_i}

    with C_L the Lipschitz constant of the loss, with probability :math:`1 - \sum_i \delta_i`. The
    paper leaves open the constant of O, which is 1 here, and how the delta_i and delta belong
    together. Mu, C_2 and C_3 are the worst of all layers and of all samples that are not zero. So
    the result shows how the terms depend on the network and the noise, and is no guarantee;
    `pac_bayes_bound` is one. The paper has inputs of norm 1 and no biases; here biases count only
    in the outputs.

    References
    ----------
    .. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
       Section 4.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 2))
    >>> X = torch.randn(20, 3)
    >>> y = net(X).argmax(dim=1)
    >>> small, large = (
    ...     sharpness_bound(net, X, y, sigma, criterion=nn.CrossEntropyLoss())
    ...     for sigma in (1e-4, 1e-3)
    ... )
    >>> small.sharpness < large.sharpness, small.complexity > large.complexity
    (True, True)
    """
    check_probability("delta", delta)
    check_number("lipschitz", lipschitz, optional=True)
    network = open_model(model, X, y, criterion=criterion, batch_size=batch_size, device=device)
    slope = _lipschitz(network) if lipschitz is None else lipschitz
    chain = _read_chain(network)
    weights, n_layers = chain.weights, len(chain.weights)
    if n_layers < 2:
        raise ValueError("sharpness_bound needs a network of two layers or more.")
    sigmas = np.asarray(sigma, dtype=np.float64)
    if sigmas.shape not in {(), (n_layers,)} or not (np.isfinite(sigmas) & (sigmas > 0)).all():
        raise ValueError(
            f"sigma must be one positive finite number, or one for each of the {n_layers} layers, "
            f"got {sigma!r}."
        )
    worst = _table(_without_zeros(chain)).groupby("condition")["worst"].agg(["min", "max"])
    mu, c_2, c_3 = map(float, (worst["min"]["C1"], worst["max"]["C2"], worst["max"]["C3"]))
    sizes = np.array([float(weight.norm()) for weight in weights])
    widths = np.array([weight.shape for weight in weights])  # h_i and h_{i-1}
    with np.errstate(divide="ignore", invalid="ignore"):
        gammas = sigmas * np.sqrt(widths.prod(axis=1)) / (mu**2 * sizes)
    gammas = np.where(sizes > 0, gammas, math.inf)
    sharpness = math.inf  # if no constants satisfy the conditions
    if np.isfinite([c_2, c_3, *gammas]).all():
        c_deltas = (1 + delta / n_layers) * np.sqrt(2 * np.log(widths[:, 0]))
        flipped = np.prod(1 + gammas * c_deltas * c_2) - 1
        inside = np.prod(1 + gammas) - 1 + np.prod(1 + gammas * c_2 * c_3) * flipped
        sharpness = float(inside * slope * chain.outputs[-1].norm(dim=1).mean())
    distance = np.square(sizes / sigmas).sum()
    complexity = math.sqrt((distance + math.log(1 / delta)) / len(chain.x))
    risk = mean_loss(network)
    total = risk + sharpness + complexity
    return SharpnessBound(total, risk, sharpness, complexity, mu, c_2, c_3, tuple(gammas.tolist()))


def _lipschitz(network: Network) -> float:
    """Look up the Lipschitz constant of the loss."""
    criterion = network.loss.criterion
    weighted = any(getattr(criterion, name, None) is not None for name in ("weight", "pos_weight"))
    # the sum over the outputs of a sample has larger gradients than their mean
    if type(criterion) not in _LIPSCHITZ or weighted or criterion.reduction != "mean":
        raise ValueError(
            f"the Lipschitz constant of {name_criterion(criterion)} is not known: pass lipschitz=, "
            "the largest norm of its gradient in the outputs of a sample."
        )
    return _LIPSCHITZ[type(criterion)]


# -- the chain of matrices ---------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """The n samples in a chain of d layers; all tensors are float64."""

    names: list[str]
    weights: list[Tensor]  # (h_i, h_{i-1})
    x: Tensor  # (n, h_0)
    outputs: list[Tensor]  # (n, h_i)
    slopes: list[Tensor]  # (n, h_i)

    def relative_sizes(self, k: int) -> Tensor:
        """Measure outputs of a layer in units of the norm of the network's input: (n, h_k)."""
        sizes: Tensor = self.outputs[k].abs() / self.x.norm(dim=1, keepdim=True)
        return sizes


def _read_chain(network: Network) -> Chain:
    """Run the network batch by batch, and read the chain of its layers from the records."""
    batches = []
    with borrowed(network.module):
        layers = fold_layers(network)
        for layer in layers:
            if len(layer.input_shape) != 1:
                raise ValueError(
                    "the sharpness conditions need a fully connected network, but layer "
                    f"{layer.name!r} receives inputs of shape {tuple(layer.input_shape)}."
                )
        named = [name for layer in layers for name in (layer.name, layer.norm) if name is not None]
        modules = {name: network.module.get_submodule(name) for name in named}
        for batch in network.batches():
            with torch.enable_grad(), Recorder(modules, _start_step) as recorder:
                network(batch.x)
            inputs = [recorder[layer.name].check()[0] for layer in layers]
            steps = [recorder[layer.norm or layer.name] for layer in layers]
            outputs = [step.check()[1].detach().double() for step in steps]
            slopes = [_slopes(*step) for step in zip(steps[:-1], inputs[1:], strict=True)]
            slopes.append(torch.ones_like(outputs[-1]))
            arrays = [inputs[0].detach().double(), *outputs, *slopes]
            if batch.y is not None:  # samples with ignored labels are none of the loss
                rows = counting(network, batch.y).to(network.device)
                arrays = [array[rows] for array in arrays]
            batches.append(arrays)
    x, *rest = map(torch.cat, zip(*batches, strict=True))
    names, weights = [layer.name for layer in layers], [layer.weight for layer in layers]
    return Chain(names, weights, x, rest[: len(names)], rest[len(names) :])


def _without_zeros(chain: Chain) -> Chain:
    """Leave out samples that are zero."""
    kept = chain.x.norm(dim=1) > 0
    if not kept.any():
        raise ValueError("all samples in X are zero, but the conditions count in their norms.")
    if not kept.all():
        warn(f"{int((~kept).sum())} of {len(kept)} samples are zero and left out.")
    outputs, slopes = ([array[kept] for array in a] for a in (chain.outputs, chain.slopes))
    return replace(chain, x=chain.x[kept], outputs=outputs, slopes=slopes)


def _start_step(record: LayerRecord, features: Tensor, output: Tensor) -> Tensor:
    """Keep input and output, and start a graph that ends at the next layer."""
    z = output.detach().requires_grad_()
    passed_on = z.clone()  # which an activation may overwrite
    keep_graph(record, features, z)
    record.node = passed_on.grad_fn
    return passed_on


def _slopes(step: LayerRecord, after: Tensor) -> Tensor:
    """Compute an activation's slopes, ``after = slopes * z``, and refuse anything else."""
    z, layer = step.check()[1], step.name
    # values alone do not tell a ReLU from a function that is close to one at these samples
    if after.shape == z.shape and after.requires_grad and is_piecewise_linear(after, step.node):
        (slopes,) = torch.autograd.grad(after, z, torch.ones_like(after))
        error = (after - slopes * z).abs()
        is_relu = (error <= _ROUNDING * torch.finfo(z.dtype).eps * z.abs()).all()
        if bool(is_relu & (slopes[z > 0] == 1).all()):
            return slopes.double()
    raise ValueError(
        "the sharpness conditions need a chain of layers with ReLU in between, but the input of "
        f"the layer behind {layer!r} is not a ReLU or leaky ReLU of the output of {layer!r}."
    )


# -- the constants -----------------------------------------------------------------------


def _constants(chain: Chain) -> dict[tuple[str, int], Tensor]:
    """Compute the constants of each sample, (n,), by condition and position of the layer."""
    constants: dict[tuple[str, int], Tensor] = {}
    norms = _norms_in_c1(chain)
    for k, weight in enumerate(chain.weights):
        around = [mu for (_, c, _), (*_, mu) in norms.items() if c == k + 1]
        if around:
            constants["C1", k] = torch.stack(around).amin(dim=0)
            # the maximum of C2 is reached where delta is the size of one of the units
            sizes = chain.relative_sizes(k).sort(dim=1).values
            counts = sizes.new_ones(len(weight)).cumsum(dim=0)
            constants["C2", k] = (counts / len(weight) / sizes).amax(dim=1)
        rows = weight.norm(dim=1)
        active = (chain.slopes[k] * rows).norm(dim=1)  # |D W|_F of each sample
        largest = len(rows) ** 0.5 * rows.max()
        # weights of zero have no largest row, and the condition holds for any constant
        constants["C3", k] = largest / active if largest > 0 else active
    return constants


def _norms_in_c1(chain: Chain) -> dict[tuple[int, int, int], Tensor]:
    """Compute the three norms of condition C1, and their mu: (4, n), by a, c and b."""
    norms_of_samples = defaultdict(list)  # of P_ab, by a and b
    for x, *slopes in zip(chain.x, *chain.slopes, strict=True):
        scaled = (s[:, None] * weight for s, weight in zip(slopes, chain.weights, strict=True))
        factors = [x[:, None], *scaled]
        for a in range(len(factors)):
            products = accumulate(factors[a:], lambda product, factor: factor @ product)
            for b, product in enumerate(products, a):
                norms_of_samples[a, b].append(product.norm())
    norms = {ends: torch.stack(values) for ends, values in norms_of_samples.items()}
    norms_and_mu = {}
    for a, c, b in sorted(combinations(range(len(chain.weights) + 1), 3), key=itemgetter(1)):
        whole, after, before = norms[a, b], norms[c + 1, b], norms[a, c]
        root, apart = len(chain.weights[c - 1]) ** 0.5, after * before
        mu = torch.where(apart > 0, root * whole / apart, torch.inf)
        norms_and_mu[a, c, b] = torch.stack([whole, after, before, mu])
    return norms_and_mu
