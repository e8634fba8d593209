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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from relflat_sk._models import DataOptions, to_network
from relflat_sk._network import Network, Recorder, borrowed, keep_copies
from relflat_sk._rescaling import AffineLayer, fold_layers

__all__ = ["sharpness_conditions"]

_READINGS = {
    "C1": "at the worst sample, the layers around it have {:.3g} of independent layers' effect",
    "C2": "at the worst sample, noise of size t |x| switches at most a share {:.3g} t of its units",
    "C3": "at the worst sample, its largest unit is {:.3g} times the average active unit",
}


@dataclass(frozen=True)
class Chain:
    """A batch of n samples in a chain of d layers; all tensors are float64.

    Parameters
    ----------
    x : Tensor of shape (n, h_0)
        Inputs of the first layer.
    weights : list of Tensor of shape (h_i, h_{i-1})
        The layers' weights.
    outputs : list of Tensor of shape (n, h_i)
        The layers' outputs, before the activation.
    slopes : list of Tensor of shape (n, h_i)
        Slopes of the activations; ones behind the last layer.
    """

    x: Tensor
    weights: list[Tensor]
    outputs: list[Tensor]
    slopes: list[Tensor]


def sharpness_conditions(
    model: Any,
    X: Any,
    y: Any = None,
    *,
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
    batch_size : int, default=16
        Samples in one forward pass. Each sample needs the memory of several products of the
        weight matrices.
    device : str or torch.device, optional
        Where to compute; where the model is if None.

    Returns
    -------
    DataFrame
        One row for each condition and layer, in forward order, with columns `condition` ("C1",
        "C2" or "C3"), `layer` (its name), `position` (of the layer in forward order),
        `constant` ("mu", "C_2" or "C_3"), `worst` (the constant, over all samples), `median`
        (over samples) and `reading`, the meaning in words. Large values of mu are good, and
        small values of the others. The constants have no unit.

    Raises
    ------
    ValueError
        If the network is not such a chain.

    Notes
    -----
    C1 compares products of weights through a layer with the parts before and behind it, C2 is
    about the layer's activations, and C3 about its weights; the last layer has C3 only.
    Independent Gaussian layers have a mu of about 1. The paper has no biases, and inputs of norm
    1. Here, biases decide with the weights which units are active, and C2 measures in units of
    the input's norm. The paper prints C2 without the absolute value, which its explanation, that
    activations flip, requires.

    References
    ----------
    .. [1] B. Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
       Section 4.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(3, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2)
    ... )
    >>> found = sharpness_conditions(net, torch.randn(20, 3))
    >>> found[["condition", "layer"]].values.tolist()
    [['C1', '0'], ['C2', '0'], ['C3', '0'], ['C3', '2']]
    """
    # `to_network` needs a criterion for a bare module; it is not used here
    options = DataOptions(nn.MSELoss(), batch_size, device)
    network = to_network(model, X, None, options)
    constants: dict[tuple[str, str], list[Tensor]] = {}
    with borrowed(network.module), torch.no_grad():
        layers = fold_layers(network)
        order = [layer.name for layer in layers]
        for chain in _chains(network, layers):
            for key, values in _constants(chain, order).items():
                constants.setdefault(key, []).append(values)
    rows = [
        _row(condition, layer, order.index(layer), torch.cat(values))
        for (condition, layer), values in constants.items()
    ]
    return pd.DataFrame(rows)


def _row(condition: str, layer: str, position: int, values: Tensor) -> dict[str, Any]:
    """Summarise the constants of all samples as one row of the table."""
    worst = float(values.min() if condition == "C1" else values.max())
    return {
        "condition": condition,
        "layer": layer,
        "position": position,
        "constant": {"C1": "mu", "C2": "C_2", "C3": "C_3"}[condition],
        "worst": worst,
        "median": float(values.median()),
        "reading": _READINGS[condition].format(worst),
    }


# -- the network as a chain --------------------------------------------------------------


def _chains(network: Network, layers: list[AffineLayer]) -> Iterator[Chain]:
    """Run the network batch by batch, and read the chain of its layers from the records."""
    for layer in layers:
        if len(layer.input_shape) != 1:
            raise ValueError(
                f"sharpness_conditions need a fully connected network, but layer "
                f"{layer.name!r} receives inputs of shape {tuple(layer.input_shape)} for each "
                "sample."
            )
    names = {name for layer in layers for name in (layer.name, layer.norm) if name is not None}
    modules = {name: network.module.get_submodule(name) for name in names}
    for batch in network.batches():
        with Recorder(modules, keep_copies) as recorder:
            network(batch.x)
        inputs = [recorder[layer.name].check()[0].double() for layer in layers]
        outputs = [recorder[layer.norm or layer.name].check()[1].double() for layer in layers]
        yield Chain(
            inputs[0],
            [layer.weight for layer in layers],
            outputs,
            [
                _slopes(layer.name, z, after)
                for layer, z, after in zip(layers[:-1], outputs[:-1], inputs[1:], strict=True)
            ]
            + [torch.ones_like(outputs[-1])],
        )


def _slopes(layer: str, z: Tensor, after: Tensor) -> Tensor:
    """Compute an activation's slopes, ``after = slopes * z``, and refuse anything else."""
    if after.shape == z.shape:
        slopes = torch.where(z == 0, 0.0, after / z)
        if bool((slopes[z > 0] == 1).all()) and bool((after[z == 0] == 0).all()):
            return slopes
    raise ValueError(
        f"sharpness_conditions need a chain of layers with ReLU in between, but the input of the "
        f"layer behind {layer!r} is not a ReLU or leaky ReLU of the output of {layer!r}."
    )


# -- the constants -----------------------------------------------------------------------


def _constants(chain: Chain, names: list[str]) -> dict[tuple[str, str], Tensor]:
    """Compute the constants of each sample, (n,), by condition and layer."""
    constants = {}
    norms = _norms_of_products(chain)
    last = len(names)
    for k, name in enumerate(names, start=1):
        if k < last:
            constants["C1", name] = _interaction(norms, k, chain.outputs[k - 1].shape[1], last)
            constants["C2", name] = _switches(chain.outputs[k - 1], chain.x)
        rows = chain.weights[k - 1].norm(dim=1)
        active = (chain.slopes[k - 1] * rows).norm(dim=1)  # |D W|_F of each sample
        constants["C3", name] = len(rows) ** 0.5 * rows.max() / active
    return constants


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


def _interaction(norms: dict[tuple[int, int], Tensor], c: int, width: int, last: int) -> Tensor:
    """Compute mu at layer c, (n,)."""
    ratios = []
    for a in range(c):
        for b in range(c + 1, last + 1):
            apart = norms[c + 1, b] * norms[a, c]
            # where a factor is zero, so is the product: the condition holds for any mu
            ratios.append(torch.where(apart > 0, width**0.5 * norms[a, b] / apart, torch.inf))
    return torch.stack(ratios).amin(dim=0)


def _switches(z: Tensor, x: Tensor) -> Tensor:
    """Compute C_2: the largest share of units within delta of zero, over delta."""
    size = z.abs().sort(dim=1).values / x.norm(dim=1, keepdim=True)
    width = z.shape[1]
    # the maximum is reached where delta is the size of one of the units
    shares = torch.arange(1, width + 1, device=z.device) / width
    largest: Tensor = (shares / size).amax(dim=1)
    return largest
