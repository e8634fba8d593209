"""The study's own measures against their definitions, by loops and dense Hessians."""

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import nn

from benchmarks._harness import rivals
from tests import oracles


def problem(is_regression=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 25), nn.ReLU(),
                        nn.Linear(25, 1 if is_regression else 3)).double()  # fmt: skip
    for at, layer in enumerate(net[:3:2]):  # spectra with outliers
        layer.weight.data += at * torch.outer(*map(torch.randn, layer.weight.shape)).double()
    net[2].bias.data[0] = -100.0  # a dead neuron: its weights have no curvature
    X, y = torch.randn(40, 30).double(), torch.arange(40) % 3
    return net, X, y.double()[:, None] if is_regression else y


def per_sample(z, y):
    if y.is_floating_point():
        return (z - y).square().sum(dim=1)
    return nn.functional.cross_entropy(z, y, reduction="none")


@pytest.mark.parametrize("is_regression", [False, True])
def test_takeuchi_by_the_dense_hessian(is_regression):
    net, X, y = problem(is_regression)
    H = oracles.weight_hessian(net, "4", lambda z, y: per_sample(z, y).mean(), X, y)[0]
    H = oracles.flat_matrix(H).numpy()
    gradients = [
        torch.autograd.grad(per_sample(net(X), y)[i], net[4].weight)[0].flatten().numpy()
        for i in range(len(X))
    ]
    C = np.mean([np.outer(g, g) for g in gradients], axis=0)
    curved = np.diag(H) > 0
    H, C = H[curved][:, curved], C[curved][:, curved]
    expected = np.trace(np.linalg.inv(H + 1e-3 * np.diag(np.diag(H))) @ C) / len(X)
    assert rivals.takeuchi_criterion(net, X, y) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("is_regression", [False, True])
def test_whitened_flatness_by_the_dense_hessian(is_regression):
    net, X, y = problem(is_regression)
    H, W = oracles.weight_hessian(net, "4", lambda z, y: per_sample(z, y).mean(), X, y)
    phi = net[:4](X).detach()
    S = phi.T @ phi / len(phi)
    inverse = torch.linalg.pinv(S, hermitian=True)
    expected = sum(
        float(W[s] @ S @ W[t] * (inverse * H[s, :, t]).sum())
        for s in range(len(W))
        for t in range(len(W))
    )
    assert rivals.whitened_flatness(net, X, y) == pytest.approx(expected, rel=1e-5)


def test_calibration_by_loops():
    net, X, y = problem()
    p = net(X).softmax(dim=1).detach().numpy()
    expected = 0.0
    for b in range(15):
        within = [(row, label) for row, label in zip(p, y.numpy(), strict=True)
                  if b / 15 < max(row) <= (b + 1) / 15]  # fmt: skip
        if within:
            accuracy = np.mean([np.argmax(row) == label for row, label in within])
            confidence = np.mean([max(row) for row, _ in within])
            expected += len(within) / len(p) * abs(accuracy - confidence)
    assert rivals.calibration_error(net, X, y) == pytest.approx(expected, rel=1e-10)


def soft_rank(squares, larger, smaller):
    """Leave out one eigenvalue at a time while the largest is above the edge of the others."""
    rest = sorted(squares)
    while True:
        edge = sum(rest) / (larger * len(rest)) * (larger**0.5 + smaller**0.5) ** 2
        if len(rest) == 1 or sum(value > edge for value in squares) <= len(squares) - len(rest):
            return edge / max(squares)
        rest = rest[: len(squares) - sum(value > edge for value in squares)]


def exponent(squares):
    """Fit Pareto's law to all tails by scipy, and take the one with the least distance."""
    fits = []
    for n in range(2, len(squares) + 1):
        tail = sorted(squares)[-n:]
        shape, _, scale = stats.pareto.fit(tail, floc=0, fscale=tail[0])
        distance = stats.kstest(tail, stats.pareto(shape, scale=scale).cdf).statistic
        fits.append((distance, 1 + shape))
    return min(fits)[1]


def test_spectra_by_singular_values():
    net, X, y = problem()
    weights = [layer.weight.detach().numpy() for layer in net[::2]]
    spectra = [(np.linalg.svd(W)[1] ** 2, max(W.shape), min(W.shape)) for W in weights]
    stable = np.mean([squares.sum() / squares[0] for squares, _, _ in spectra])
    assert rivals.stable_rank(net, X, y) == pytest.approx(stable)
    soft = np.mean([soft_rank(*spectrum) for spectrum in spectra])
    assert rivals.soft_rank(net, X, y) == pytest.approx(soft)
    long = np.mean([exponent(squares) for squares, _, smaller in spectra if smaller >= 10])
    assert rivals.spectral_exponent(net, X, y) == pytest.approx(long, rel=1e-6)


def last_layer_terms(net, X, y):
    """Return the head's parameters, the loss of a sample, and its derivatives by autograd."""
    rows = torch.cat([net[:4](X), torch.ones(len(X), 1).double()], dim=1).detach()
    weight = torch.cat([net[4].weight, net[4].bias[:, None]], dim=1).detach()

    def loss(w, i):
        return per_sample((rows[i] @ w.reshape(weight.shape).T)[None], y[i : i + 1])[0]

    flat = weight.flatten()
    gradients = [torch.func.grad(loss)(flat, i) for i in range(len(X))]
    hessians = [torch.func.hessian(loss)(flat, i) for i in range(len(X))]
    return flat, loss, gradients, hessians


def test_leave_one_out_by_dense_newton_steps():
    net, X, y = problem()
    w, loss, gradients, hessians = last_layer_terms(net, X, y)
    H = sum(hessians)
    H = H + 1e-3 * H.diagonal().mean() * torch.eye(len(H)).double()
    expected = np.mean([
        float(loss(w + torch.linalg.solve(H - h, g), i))
        for i, (g, h) in enumerate(zip(gradients, hessians, strict=True))
    ])
    assert rivals.leave_one_out(net, X, y) == pytest.approx(expected, rel=1e-6)


def test_leave_one_out_at_equal_loss_does_not_see_the_scale_of_the_head():
    net, X, y = problem()
    y = net(X).argmax(dim=1)  # a loss near 0 is within reach
    value = rivals.leave_one_out_at_equal_loss(net, X, y)
    net[4].weight.data *= 3
    net[4].bias.data *= 3
    assert rivals.leave_one_out_at_equal_loss(net, X, y) == pytest.approx(value, rel=1e-6)
    weight, bias = net[4].weight.data, net[4].bias.data
    z = net(X).detach()
    scale = optimize.brentq(lambda b: float(per_sample(b * z, y).mean()) - goal(y), 0, 50)
    net[4].weight.data, net[4].bias.data = weight * scale, bias * scale
    assert rivals.leave_one_out(net, X, y) == pytest.approx(value, rel=1e-6)
    assert np.isnan(rivals.leave_one_out_at_equal_loss(net, X, (y + 1) % 3))


def goal(y):
    return 0.1 * stats.entropy(np.bincount(y.numpy()))


def test_evidence_by_determinants():
    net, X, y = problem()
    w, loss, _, hessians = last_layer_terms(net, X, y)
    total = sum(float(loss(w, i)) for i in range(len(X)))
    unit = torch.eye(len(w)).double()
    values = [
        total + a / 2 * float(w @ w) + float(torch.logdet(sum(hessians) / a + unit)) / 2
        for a in np.logspace(-6, 6, 121)
    ]
    assert rivals.laplace_evidence(net, X, y) == pytest.approx(min(values) / len(X), rel=1e-8)


def test_alignment_by_gradients_of_samples():
    net, X, y = problem()
    cosines = [
        float(torch.cosine_similarity(-gradient.flatten(), net[4].weight.data.flatten(), dim=0))
        for gradient in (
            torch.autograd.grad(per_sample(net(X), y)[i], net[4].weight)[0] for i in range(len(X))
        )
    ]
    expected = -np.mean(cosines) / (stats.kurtosis(cosines) + 1.2)
    assert rivals.gradient_weight_alignment(net, X, y) == pytest.approx(expected, rel=1e-6)


def test_classes_of_the_features_by_loops():
    net, X, y = problem()
    phi = net[:4](X).detach().numpy()
    means = [phi[y == c].mean(axis=0) for c in range(3)]
    spreads = [np.linalg.norm(phi[y == c] - means[c], axis=1).mean() for c in range(3)]
    ratios = [
        max(
            (spreads[a] + spreads[b]) / np.linalg.norm(means[a] - means[b]) for b in {0, 1, 2} - {a}
        )
        for a in range(3)
    ]
    assert rivals.davies_bouldin(net, X, y) == pytest.approx(np.mean(ratios), rel=1e-8)

    centred = phi - phi.mean(axis=0)
    between = sum((y == c).sum().item() * np.outer(*2 * [centred[y == c].mean(axis=0)])
                  for c in range(3))  # fmt: skip
    trace = np.trace(np.linalg.pinv(centred.T @ centred, rcond=1e-12) @ between)
    share = rivals.within_scatter(net, X, y)
    assert share == pytest.approx(1 - trace / 2, abs=1e-8)
    mixing = torch.randn(25, 25).double()
    mixed = nn.Sequential(*net[:4], nn.Linear(25, 25, bias=False), net[4]).double()
    mixed[4].weight.data = mixing
    assert rivals.within_scatter(mixed, X, y) == pytest.approx(share, abs=1e-6)


def test_mixup_counts_errors_on_means_of_a_class():
    X = torch.tensor([[-3.0], [-1.0], [1.0], [9.0]]).double()
    net = nn.Sequential(nn.Linear(1, 2)).double()
    net[0].weight.data, net[0].bias.data = torch.tensor([[-1.0], [1.0]]).double(), torch.zeros(2)
    net = net.double()
    index = rivals.davies_bouldin(net, X, torch.tensor([0, 0, 1, 1]))
    assert rivals.label_wise_mixup(net, X, torch.tensor([0, 0, 1, 1])) == 0
    assert rivals.label_wise_mixup(net, X, torch.tensor([1, 1, 0, 0])) == pytest.approx(index)
