"""The study's own measures against their definitions, by loops and dense Hessians."""

import numpy as np
import pytest
import torch
from scipy import stats
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
