r"""Conditions C1 and C2 of Neyshabur et al. (2017) in detail: their norms, and C2 as a curve.

For the notation see `relflat_sk.theory._sharpness_conditions`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from relflat_sk._checks import check_number
from relflat_sk.theory._chain import (
    Chain,
    chain_networks,
    check_zeros,
    map_chains,
    norms_in_c1,
    relative_sizes,
)

__all__ = ["activation_curve", "interaction_factors"]


def interaction_factors(
    model: Any, X: Any, y: Any = None, *, batch_size: int = 16, device: Any = None
) -> pd.DataFrame:
    r"""Split the first condition into the three norms of which it consists.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        See `sharpness_conditions`.
    X : array-like of n samples
        Inputs as the model takes them.
    y : array-like, optional
        Not used.
    batch_size : int, default=16
        Samples in one forward pass.
    device : str or torch.device, optional
        Where to compute; where the model is if None.

    Returns
    -------
    DataFrame
        One row for each ``a < c < b``, from 0, the input, to d, the last layer, with columns `a`,
        `c`, `b`, `layer` (the name of layer c) and, at the sample where mu is smallest, `whole`
        (:math:`|P_{ab}|_F`), `after` (:math:`|P_{c+1,b}|_F`), `before` (:math:`|P_{ac}|_F`) and
        `mu`, which is :math:`\sqrt{h_c}` times the first over the product of the others, and
        infinite where one of these is zero.

    Raises
    ------
    ValueError
        If the network is not a chain of linear layers with ReLU in between.

    References
    ----------
    .. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
       Section 4, condition C1.

    Examples
    --------
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 2))
    >>> row = interaction_factors(net, torch.randn(20, 3)).iloc[0]
    >>> [int(row[key]) for key in "acb"]
    [0, 1, 2]
    >>> bool(np.isclose(row["mu"], 50**0.5 * row["whole"] / (row["after"] * row["before"])))
    True
    """
    (network,) = chain_networks(model, X, None, batch_size, device)
    parts = map_chains(network, lambda chain: (chain.names, norms_in_c1(chain)))
    names, norms = parts[0]
    rows = []
    for a, c, b in norms:
        # (4, n): whole, after, before, mu
        values = torch.cat([part[a, c, b] for _, part in parts], dim=1)
        worst = values[:, values[3].argmin()].cpu().tolist()
        keys = ("whole", "after", "before", "mu")
        rows.append({
            "a": a,
            "c": c,
            "b": b,
            "layer": names[c - 1],
            **dict(zip(keys, worst, strict=True)),
        })
    return pd.DataFrame(rows)


def activation_curve(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    deltas: Sequence[float] | None = None,
    batch_size: int = 16,
    device: Any = None,
) -> pd.DataFrame:
    r"""Compute the share of units that a small disturbance can switch, by its size.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        See `sharpness_conditions`.
    X : array-like of n samples
        Inputs as the model takes them.
    y : array-like, optional
        Not used.
    deltas : sequence of float, optional
        Sizes of the disturbance, in units of the input's norm; 26 values from 1e-4 to 10 if None.
    batch_size : int, default=16
        Samples in one forward pass.
    device : str or torch.device, optional
        Where to compute; where the model is if None.

    Returns
    -------
    DataFrame
        One row for each layer but the last and each delta, with columns `layer`, `position`,
        `delta`, `mean_share` and `largest_share` (over samples) of units with :math:`|z_{ki}| \le
        \delta |x|`, and `ratio`, the largest share over delta. The constant C_2 of
        `sharpness_conditions` is the largest ratio over all delta.

    Raises
    ------
    ValueError
        If a delta is not positive, the network is not a chain of linear layers with ReLU in
        between, or all samples are zero.

    Warns
    -----
    FlatnessWarning
        If samples are zero, which have no norm to measure a disturbance in; they are left out.

    References
    ----------
    .. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
       Section 4, condition C2.

    Examples
    --------
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 2))
    >>> curve = activation_curve(net, torch.randn(20, 3), deltas=[0.1, 1, 10])
    >>> curve["mean_share"].is_monotonic_increasing, curve["mean_share"].iloc[-1].item()
    (True, 1.0)
    """
    grid = np.geomspace(1e-4, 10, 26).tolist() if deltas is None else list(deltas)
    for delta in grid:
        check_number("deltas", delta)
    (network,) = chain_networks(model, X, None, batch_size, device)
    limits = torch.tensor(grid, dtype=torch.float64)

    def shares(chain: Chain) -> dict[tuple[int, str], Tensor]:
        """Return the share of small units, (n, number of deltas), of each layer."""
        sizes = [relative_sizes(z, chain.x)[:, :, None] for z in chain.outputs[:-1]]
        small = [(size <= limits.to(chain.x)).double().mean(dim=1) for size in sizes]
        return {(k, chain.names[k]): share for k, share in enumerate(small)}

    parts = map_chains(network, lambda chain: (len(chain.x), shares(chain.without_zeros())))
    n = sum(size for size, _ in parts)
    rows = []
    for position, name in parts[0][1]:
        of_samples = torch.cat([part[position, name] for _, part in parts])
        check_zeros(len(of_samples), n)
        for delta, column in zip(grid, of_samples.T, strict=True):
            largest = float(column.max())
            rows.append({
                "layer": name,
                "position": position,
                "delta": delta,
                "mean_share": float(column.mean()),
                "largest_share": largest,
                "ratio": largest / delta,
            })
    return pd.DataFrame(rows)
