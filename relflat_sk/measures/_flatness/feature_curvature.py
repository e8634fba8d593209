"""The mean curvature of the loss in the features that a layer receives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from relflat_sk._network import Layer, Network, borrowed
from relflat_sk._numerics import read_numbers
from relflat_sk._random import RandomState, make_generator
from relflat_sk.measures._flatness.layer_pass import LayerPass
from relflat_sk.measures._flatness.summary import Flatness, summarize
from relflat_sk.measures._flatness.summation import Summation
from relflat_sk.measures._flatness.terms import Trace

__all__ = ["measure_feature_curvature"]


@dataclass(frozen=True)
class _FeatureTrace(Trace):
    """``Tr(W^T B_i W)`` of a layer that receives one vector for each sample."""

    def _square_norms(self, layer: LayerPass) -> Tensor:
        return torch.ones(len(layer.features), dtype=torch.float64, device=layer.features.device)


def measure_feature_curvature(
    network: Network, layer: Layer, *, random_state: RandomState = None
) -> Flatness:
    r"""Compute the mean trace of the Hessian of the loss in the features of each sample.

    It is ``mean_i Tr(W^T B_i W)``: relative flatness without the factors ``|phi_i|^2``. Noise of
    deviation h in each feature raises the loss by ``h^2 / 2`` times that, to second order.
    """
    with borrowed(network.module):
        sums = Summation(
            network,
            lambda found: {"feature curvature": _FeatureTrace(found.left_factor())},
            method="auto",
            n_probes=None,
            rtol=0.01,
            generator=make_generator(random_state, network.device),
        )
        summary = summarize(network, [layer], sums.add)
        (mean,) = sums.finish(summary).values()
    value, stderr = read_numbers(mean.value[0], mean.stderr[0])
    return Flatness(value, stderr, mean.method, network, summary)
