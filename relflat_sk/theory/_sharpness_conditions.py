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

from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from relflat_sk._network import Network
from relflat_sk.theory._chain import (
    Chain,
    chain_networks,
    check_zeros,
    map_chains,
    norms_in_c1,
    relative_sizes,
)

__all__ = ["sample_constants", "sharpness_conditions"]

_READINGS = {
    "C1": "at the worst sample, the layers around it have {:.3g} of independent layers' effect",
    "C2": "at the worst sample, noise of size t |x| switches at most a share {:.3g} t of its units",
    "C3": "at the worst sample, its largest unit is {:.3g} times the average active unit",
}


def sharpness_conditions(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    initial: nn.Module | None = None,
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
        (over samples) and `reading`, the meaning in words; and, with `initial`,
        `initial_worst` and `initial_median`. Large values of mu are good, and small values of the
        others. The constants have no unit.

    Raises
    ------
    ValueError
        If the network is not such a chain, the initial one has other layers, or all samples are
        zero.

    Warns
    -----
    FlatnessWarning
        If samples are zero, which are left out.

    Notes
    -----
    C1 compares products of weights through a layer with the parts before and behind it, C2 is
    about the layer's activations, and C3 about its weights; the last layer has C3 only.
    Independent Gaussian layers have a mu of about 1. The paper has no biases, and inputs of norm
    1. Here, biases decide with the weights which units are active, and C2 measures in units of
    the input's norm, so that samples of zeros are left out. The paper prints C2 without the
    absolute value, which its explanation, that activations flip, requires.

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
    >>> found = sharpness_conditions(net, torch.randn(20, 3))
    >>> found[["condition", "layer"]].values.tolist()
    [['C1', '0'], ['C2', '0'], ['C3', '0'], ['C3', '2']]
    """
    tables = [_table(network) for network in chain_networks(model, X, initial, batch_size, device)]
    if initial is None:
        return tables[0]
    keys = ["condition", "layer", "position", "constant"]
    if not tables[0][keys].equals(tables[1][keys]):
        raise ValueError(
            f"the initial module has the layers {tables[1]['layer'].unique().tolist()}, and the "
            f"model {tables[0]['layer'].unique().tolist()}. Pass a copy of the same module from "
            "before training."
        )
    before = tables[1][["worst", "median"]].add_prefix("initial_")
    return tables[0].join(before)


def sample_constants(network: Network) -> dict[tuple[str, str, int], Tensor]:
    """Compute the constants of all samples. Shapes: returns (n',)."""
    parts = map_chains(network, lambda chain: (len(chain.x), _constants(chain.without_zeros())))
    found = {key: torch.cat([part[key] for _, part in parts]) for key in parts[0][1]}
    check_zeros(len(next(iter(found.values()))), sum(size for size, _ in parts))
    return found


def _table(network: Network) -> pd.DataFrame:
    """Summarise the constants of all samples, a row for each condition and layer."""
    return pd.DataFrame([
        _row(condition, layer, position, values)
        for (condition, layer, position), values in sample_constants(network).items()
    ])


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


# -- the constants -----------------------------------------------------------------------


def _constants(chain: Chain) -> dict[tuple[str, str, int], Tensor]:
    """Compute the constants of each sample, (n,), by condition, layer and position."""
    constants = {}
    mu = _smallest(norms_in_c1(chain))
    for k, name in enumerate(chain.names):
        if k + 1 in mu:
            constants["C1", name, k] = mu[k + 1]
            constants["C2", name, k] = _switches(chain.outputs[k], chain.x)
        rows = chain.weights[k].norm(dim=1)
        active = (chain.slopes[k] * rows).norm(dim=1)  # |D W|_F of each sample
        largest = len(rows) ** 0.5 * rows.max()
        # weights of zero have no largest row, and the condition holds for any constant
        constants["C3", name, k] = largest / active if largest > 0 else active
    return constants


def _smallest(factors: dict[tuple[int, int, int], Tensor]) -> dict[int, Tensor]:
    """Find the smallest mu of each sample, (n,), by c."""
    found: dict[int, Tensor] = {}
    for (_, c, _), (*_, mu) in factors.items():
        found[c] = torch.minimum(found.get(c, mu), mu)
    return found


def _switches(z: Tensor, x: Tensor) -> Tensor:
    """Compute C_2, the largest share of units within delta of zero, over delta: (n,)."""
    size = relative_sizes(z, x).sort(dim=1).values
    width = z.shape[1]
    # the maximum is reached where delta is the size of one of the units
    shares = torch.arange(1, width + 1, device=z.device) / width
    largest: Tensor = (shares / size).amax(dim=1)
    return largest
