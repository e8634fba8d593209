"""Slow definitions, written from the papers and sharing no code with relflat_sk."""

import torch
from torch.func import functional_call, hessian, jacrev


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


def penalty(module, name, criterion, X, y):
    """kappa / (2 m) at a layer with a weight matrix of m columns, through the full Hessian."""
    blocks, weight = weight_hessian(module, name, criterion, X, y)
    return kappa_of(blocks, weight) / (2 * weight.shape[1])


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


def row_index(layer):
    """Positions (d, m) in a layer's flat weight: one row for each output channel.

    A transposed convolution keeps these on its second axis, and so does the linear layer of GPT-2.
    """
    weight = layer.weight
    index = torch.arange(weight.numel()).reshape(weight.shape)
    if getattr(layer, "transposed", False):
        groups, d = layer.groups, layer.out_channels
        rows = [
            index[g * weight.shape[0] // groups : (g + 1) * weight.shape[0] // groups, s].flatten()
            for g in range(groups)
            for s in range(d // groups)
        ]
        return torch.stack(rows)
    return index.T if type(layer).__name__ == "Conv1D" else index.flatten(1)


def weight_hessian(module, name, criterion, X, y):
    """Hessian (d, m, d, m) of the mean loss in a layer's weight as a matrix, and the matrix."""
    layer = module.get_submodule(name)
    weight = layer.weight.detach()
    n = weight.numel()
    H = layer_hessian(module, name, lambda run: criterion(run(X), y))[0].reshape(n, n)
    d, m = row_index(layer).shape
    flat = row_index(layer).flatten()
    return H[flat][:, flat].reshape(d, m, d, m), weight.flatten()[flat].reshape(d, m)


def weight_hessians(module, name, criterion, X, y):
    """Hessians (n, d, m, d, m) of the losses of single samples, each by itself."""

    def losses(run):
        output, rows = run(X), [slice(i, i + 1) for i in range(len(y))]
        if not isinstance(output, torch.Tensor):
            return torch.stack([
                criterion({key: part[one] for key, part in output.items()}, y[one]) for one in rows
            ])
        return torch.stack([criterion(output[one], y[one]) for one in rows])

    index = row_index(module.get_submodule(name))
    H, flat = layer_hessian(module, name, losses)[0], index.flatten()
    H = H.reshape(len(y), len(flat), len(flat))
    return H[:, flat][:, :, flat].reshape(-1, *index.shape, *index.shape)


def patches(module, name, X):
    """What each row of a layer's weight is multiplied with, (n, P, d, m), by derivatives."""
    layer, seen = module.get_submodule(name), []
    hook = layer.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0]))
    module(X)
    hook.remove()
    index = row_index(layer)

    def output(w):
        z = functional_call(layer, {"weight": w}, (seen[0].detach(),))
        z = z if hasattr(layer, "kernel_size") else z.movedim(-1, 1)
        return z.reshape(len(X), len(index), -1)

    J = jacrev(output)(layer.weight.detach()).flatten(3)  # (n, d, P, numbers of the weight)
    return torch.stack([J[:, s][:, :, index[s]] for s in range(len(index))], dim=2).detach()


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
