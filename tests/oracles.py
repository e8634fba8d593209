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


def weight_hessian(module, name, criterion, X, y):
    """Hessian (d, m, d, m) of the mean loss in a layer's weight as a matrix, and the matrix.

    Rows are output channels: a transposed convolution keeps them on its second axis, and so does
    the linear layer of GPT-2.
    """
    layer = module.get_submodule(name)
    weight = layer.weight.detach()
    n = weight.numel()
    H = layer_hessian(module, name, lambda run: criterion(run(X), y))[0].reshape(n, n)
    index = torch.arange(n).reshape(weight.shape)
    if getattr(layer, "transposed", False):
        groups, d = layer.groups, layer.out_channels
        rows = [
            index[g * weight.shape[0] // groups : (g + 1) * weight.shape[0] // groups, s].flatten()
            for g in range(groups)
            for s in range(d // groups)
        ]
        index = torch.stack(rows)
    elif type(layer).__name__ == "Conv1D":  # of transformers
        index = index.T
    else:
        index = index.flatten(1)
    d, m = index.shape
    flat = index.flatten()
    return H[flat][:, flat].reshape(d, m, d, m), weight.flatten()[index]


def rho(H, W):
    """Forms of the Hessian in each column of the weight (P19, Appendix B), by loops."""
    found = []
    for j in range(W.shape[1]):
        V = torch.zeros_like(W)
        V[:, j] = W[:, j]
        found.append(float(torch.einsum("sj,sjtk,tk->", V, H, V)))
    return found


def flat_matrix(H):
    size = H.shape[0] * H.shape[1]
    return H.reshape(size, size)


TABLE_1 = {
    "relative_flatness": kappa_of,
    "hessian_trace": lambda H, W: float(torch.trace(flat_matrix(H))),
    "trace_flatness": lambda H, W: float(W.square().sum() * torch.trace(flat_matrix(H))),
    "neuron_flatness_max": lambda H, W: max(rho(H, W)),
    "neuron_flatness_sum": lambda H, W: sum(rho(H, W)),
}


def largest(H):
    return float(torch.linalg.eigvalsh(flat_matrix(H))[-1])


def comparable_flatness(net, name, criterion, X, y):
    """Mean variance of a feature, times the mean trace of the curvature in the features.

    `net` is a chain; `name` that of a linear layer or of a convolution, whose features are the
    patches of the positions. `criterion` is the mean over samples of losses of their own.
    """
    k = int(name)
    layer, features = net[k], net[:k](X)
    W = layer.weight.flatten(1)
    groups = getattr(layer, "groups", 1)
    total = 0.0
    for z, target in zip(layer(features), y, strict=True):
        H = hessian(lambda one, t=target: criterion(net[k + 1 :](one[None]), t[None]))(z)
        d, size = len(z), z[0].numel()
        H = H.reshape(d, size, d, size)
        for p in range(size):
            for rows in torch.arange(d).chunk(groups):  # a group reads features of its own
                total += torch.trace(W[rows].T @ H[rows][:, p, rows, p] @ W[rows])
    values = features.transpose(0, 1).flatten(1)
    return float(values.var(dim=1, correction=0).mean() * total / len(X))
