"""Measures that the study compares with flatness, which the library does not have.

Each is a function of a perceptron, its inputs and its labels, which ends in logits or in one
output. T20 is Thomas et al., "On the Interplay between Noise and Curvature", AISTATS 2020; M21 is
Martin et al., "Predicting trends in the quality of state-of-the-art neural networks", 2021; N20 is
Natekar and Sharma, "Representation Based Complexity Measures", the winner of the PGDL competition;
Ho25 is Hoelzl et al., "Gradient-Weight Alignment as a Train-Time Proxy", NeurIPS 2025.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import kurtosis
from sklearn.metrics import davies_bouldin_score
from torch import Tensor, nn

FEWEST = 10  # eigenvalues for which a power law is fitted
ROUNDING = 1e-14  # largest share of the largest curvature that is none


def last_layer(model: nn.Module, X: Tensor) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return the last layer with its inputs (n, m) and its outputs (n, d), in float64."""
    layer = [part for part in model.modules() if isinstance(part, nn.Linear)][-1]
    inputs: list[Tensor] = []
    with torch.no_grad(), layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
        model(X)
        phi = inputs[0].double()
        return layer, phi, phi @ layer.weight.double().T + layer.bias.double()


def loss_derivatives(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients (n, d) and Hessians (n, d, d) of the losses in the outputs (n, d)."""
    if y.is_floating_point():
        return 2 * (z - y.reshape(z.shape)), 2 * torch.eye(z.shape[1]).to(z).expand(len(z), -1, -1)
    p = z.softmax(dim=1)
    hessians = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return p - nn.functional.one_hot(y, z.shape[1]), hessians


def whitened_flatness(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Compute relative flatness of features whose second moments are the identity."""
    layer, phi, z = last_layer(model, X)
    hessians, weight = loss_derivatives(z, y)[1], layer.weight.detach().double()
    unit = phi.square().mean(dim=0).sqrt()
    unit = torch.where(unit > 0, unit, 1.0)
    rows = phi / unit
    moments = rows.T @ rows / len(rows)
    rounding = 10 * max(np.finfo(np.float64).eps, torch.finfo(X.dtype).eps ** 2)
    moments += rounding * len(moments) * torch.eye(len(moments)).to(moments)
    norms = (rows * torch.linalg.solve(moments, rows.T).T).sum(dim=1)
    gram = (weight * unit) @ moments @ (weight * unit).T
    return float(((hessians * gram).sum(dim=(1, 2)) * norms).mean())


def takeuchi_criterion(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Compute ``Tr(H^-1 C) / n`` (T20) with a thousandth of the diagonal of ``H`` as a ridge."""
    _, phi, z = last_layer(model, X)
    gradients, hessians = loss_derivatives(z, y)
    per_sample = (gradients[:, :, None] * phi[:, None]).flatten(1)
    outer = per_sample.T @ per_sample / len(phi)
    size = outer.shape[0]
    hessian = torch.einsum("nst,nj,nk->sjtk", hessians, phi, phi).reshape(size, size) / len(phi)
    diagonal = hessian.diagonal()
    curved = diagonal > ROUNDING * diagonal.max()
    scale = diagonal[curved].sqrt()
    hessian, outer = (
        (matrix[curved][:, curved] / scale / scale[:, None]) for matrix in (hessian, outer)
    )
    ridged = hessian + 1e-3 * torch.eye(len(hessian)).to(hessian)
    return float(torch.linalg.solve(ridged, outer).trace()) / len(phi)


def calibration_error(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Compute the expected calibration error in 15 bins of the confidence."""
    confidence, predicted = last_layer(model, X)[2].softmax(dim=1).max(dim=1)
    bins = (confidence * 15).ceil().long().clamp(1, 15) - 1
    gaps = torch.zeros(15).double().index_add_(0, bins, (predicted == y).double() - confidence)
    return float(gaps.abs().sum()) / len(y)


# -- leave-one-out and evidence of a last layer of classes, its bias included ---------------------


def head(model: nn.Module, X: Tensor, y: Tensor, share: float | None = None) -> list[Tensor]:
    """Return inputs with a one (n, m), weight (d, m), logits (n, d) and Hessian (dm, dm).

    The Hessian is that of the summed loss. With a share, weight and logits are multiplied by the
    number at which the mean loss is that share of the best constant's, or by nan if there is none.
    """
    layer, phi, z = last_layer(model, X)
    weight = torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach().double()
    if share is not None:
        p = y.bincount().double() / len(y)
        goal = share * float(torch.special.entr(p).sum())

        def excess(beta: float) -> float:
            return float(nn.functional.cross_entropy(beta * z, y)) - goal

        betas = np.geomspace(1e-3, 1e3, 61)
        below = [beta for beta in betas if excess(beta) < 0]
        beta = brentq(excess, 0, below[0]) if below else math.nan
        weight, z = beta * weight, beta * z
    rows = torch.cat([phi, torch.ones_like(phi[:, :1])], dim=1)
    hessian = torch.einsum("nst,nj,nk->sjtk", loss_derivatives(z, y)[1], rows, rows)
    return [rows, weight, z, hessian.reshape(weight.numel(), weight.numel())]


def leave_one_out(model: nn.Module, X: Tensor, y: Tensor, share: float | None = None) -> float:
    """Estimate the mean loss of each sample without it by a Newton step of the last layer.

    A thousandth of the mean diagonal of the Hessian is its ridge.
    """
    rows, weight, z, hessian = head(model, X, y, share)
    ridge = 1e-3 * hessian.diagonal().mean()
    if not ridge > 0:  # no scale reaches the loss, or the loss has no curvature left
        return float(nn.functional.cross_entropy(z, y))
    (d, m), unit = weight.shape, torch.eye(weight.numel()).double()
    inverse = torch.linalg.inv(hessian + ridge * unit)
    leverage = torch.einsum("nj,sjtk,nk->nst", rows, inverse.reshape(d, m, d, m), rows)
    gradients, curvatures = loss_derivatives(z, y)
    steps = torch.linalg.solve(torch.eye(d).double() - curvatures @ leverage, gradients)
    without = z + (leverage @ steps[:, :, None])[:, :, 0]
    return float(nn.functional.cross_entropy(without, y))


def leave_one_out_at_equal_loss(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Estimate the same for logits whose loss is a tenth of the best constant's."""
    return leave_one_out(model, X, y, share=0.1)


def laplace_evidence(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Compute minus the log evidence of the last layer per sample, at its best precision."""
    _, weight, z, hessian = head(model, X, y)
    curvatures = torch.linalg.eigvalsh(hessian).clamp(min=0)
    loss = nn.functional.cross_entropy(z, y, reduction="sum")
    precisions = torch.logspace(-6, 6, 121).double()[:, None]
    occam = (curvatures / precisions).log1p().sum(dim=1) / 2
    prior = precisions[:, 0] * weight.square().sum() / 2
    return float((loss + prior + occam).min()) / len(y)


# -- features and gradients of classes ------------------------------------------------------------


def davies_bouldin(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Compute the Davies-Bouldin index of the last features: classes far apart are small."""
    return float(davies_bouldin_score(last_layer(model, X)[1], y))


def within_scatter(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Compute the share of the features' scatter within classes, in whitened directions.

    It is 1 minus Pillai's trace over its largest value, so no invertible map of the last features
    changes it.
    """
    phi = last_layer(model, X)[1]
    phi = phi - phi.mean(dim=0)
    directions = torch.linalg.svd(phi, full_matrices=False)
    kept = directions.S / directions.S[0] > 1e-6  # features in float32
    white, labels = directions.U[:, kept], nn.functional.one_hot(y).double()
    means = (labels.T @ white) / labels.sum(dim=0)[:, None]
    between = (labels.sum(dim=0)[:, None] * means.square()).sum()
    return 1 - float(between) / (labels.shape[1] - 1)


def label_wise_mixup(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Multiply the Davies-Bouldin index by the error on means of two samples of a class (N20)."""
    generator, mixed = torch.Generator().manual_seed(0), X.clone()
    for label in y.unique():
        rows = (y == label).nonzero()[:, 0]
        mixed[rows] = (X[rows] + X[rows[torch.randperm(len(rows), generator=generator)]]) / 2
    wrong = (last_layer(model, mixed)[2].argmax(dim=1) != y).double().mean()
    return davies_bouldin(model, X, y) * float(wrong)


def gradient_weight_alignment(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Compute minus the mean cosine of weight and step, over its kurtosis plus 1.2 (Ho25)."""
    layer, phi, z = last_layer(model, X)
    gradients, weight = loss_derivatives(z, y)[0], layer.weight.detach().double()
    products = -((gradients @ weight) * phi).sum(dim=1)
    cosines = products / (gradients.norm(dim=1) * phi.norm(dim=1) * weight.norm() + 1e-12)
    return -float(cosines.mean() / (kurtosis(cosines) + 1.2))


# -- spectra of the weights, the mean over the layers ---------------------------------------------

Spectral = Callable[[NDArray[np.float64], tuple[int, ...]], float]


def mean_over_layers(model: nn.Module, of_layer: Spectral) -> float:
    """Average a function of the squared singular values, largest first, and of a weight's shape."""
    weights = [part.weight.detach() for part in model.modules() if isinstance(part, nn.Linear)]
    values = [of_layer(np.linalg.svd(w.double())[1] ** 2, tuple(w.shape)) for w in weights]
    values = [value for value in values if not math.isnan(value)]
    return float(np.mean(values)) if values else math.nan


def stable_rank(model: nn.Module, X: Any, y: Any) -> float:
    """Return ``|W|^2`` over the square of the spectral norm."""
    return mean_over_layers(model, lambda squares, shape: float(squares.sum() / squares[0]))


def soft_rank(model: nn.Module, X: Any, y: Any) -> float:
    """Divide the edge of a spectrum of random entries by the largest eigenvalue (M21)."""

    def of_layer(squares: NDArray[np.float64], shape: tuple[int, ...]) -> float:
        larger, smaller, n_outliers = max(shape), min(shape), 0
        while True:  # outliers do not count in the variance of the entries
            variance = squares[n_outliers:].sum() / (larger * (smaller - n_outliers))
            edge = variance * (math.sqrt(larger) + math.sqrt(smaller)) ** 2
            n_above = int((squares > edge).sum())
            if n_above <= n_outliers or n_above == smaller:
                return float(edge / squares[0])
            n_outliers = n_above

    return mean_over_layers(model, of_layer)


def spectral_exponent(model: nn.Module, X: Any, y: Any) -> float:
    """Fit ``alpha`` of the power law ``lambda^-alpha`` whose tail fits best (M21)."""

    def of_layer(squares: NDArray[np.float64], shape: tuple[int, ...]) -> float:
        squares = squares[squares > squares[0] * len(squares) * np.finfo(np.float64).eps]
        best = math.inf, math.nan
        for n in range(2, len(squares) + 1) if len(squares) >= FEWEST else ():
            logs = np.log(np.sort(squares[:n]) / squares[n - 1])
            if logs[-1] == 0:
                continue
            alpha = 1 + n / logs.sum()
            model_shares, steps = 1 - np.exp((1 - alpha) * logs), np.arange(n + 1) / n
            lower, upper = np.abs(model_shares - steps[:-1]), np.abs(model_shares - steps[1:])
            best = min(best, (max(lower.max(), upper.max()), alpha))
        return float(best[1])

    return mean_over_layers(model, of_layer)


RIVALS = {
    function.__name__: function
    for function in (
        whitened_flatness, takeuchi_criterion, calibration_error, stable_rank, soft_rank,
        spectral_exponent, leave_one_out, leave_one_out_at_equal_loss, laplace_evidence,
        davies_bouldin, within_scatter, label_wise_mixup, gradient_weight_alignment,
    )
}  # fmt: skip
