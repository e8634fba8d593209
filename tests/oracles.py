"""Slow definitions, written from the papers and sharing no code with relflat_sk."""

import torch
from torch.func import functional_call, hessian


def layer_hessian(module, name, risk):
    """Hessian blocks (d, m, d, m) of ``risk(output_of)`` in the weight of one layer."""
    weight = module.get_submodule(name).weight.detach()

    def of_weight(w):
        return risk(lambda x: functional_call(module, {f"{name}.weight": w}, (x,)))

    return hessian(of_weight)(weight).detach(), weight


def kappa_of(blocks, weight):
    """Definition 3 of Petzka et al. (2021): sum of <w_s, w_t> Tr(H_st), by loops."""
    total = 0.0
    for s in range(len(weight)):
        for t in range(len(weight)):
            total += (weight[s] @ weight[t]) * torch.trace(blocks[s, :, t, :])
    return float(total)


def relative_flatness(module, name, criterion, X, y):
    """Relative flatness of the mean loss, through the full Hessian."""
    training = module.training
    module.eval()
    try:
        blocks, weight = layer_hessian(module, name, lambda run: criterion(run(X), y))
    finally:
        module.train(training)
    return kappa_of(blocks, weight)


def normalized_relative_flatness(features, weight, loss_of_z_bias, spread):
    """Theorem 4: features divided and columns multiplied by the spread, then Definition 3.

    ``loss_of_z_bias`` maps pre-activations without the constant features to the mean loss;
    features whose spread is 0 act as a bias and are not part of the weight.
    """
    varies = spread > 0
    phi = features[:, varies] / spread[varies]
    scaled = weight[:, varies] * spread[varies]
    blocks = hessian(lambda w: loss_of_z_bias(phi @ w.T))(scaled).detach()
    return kappa_of(blocks, scaled)
