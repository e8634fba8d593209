"""Rows of the table for criteria that are sums over outputs: logistic, squared, Poisson."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._checks import judge
from relflat_sk._losses.curvature import ClosedForm, diagonal_curvature
from relflat_sk._losses.row import BestConstant, CurvatureOf, Row, Target, Task, never

__all__ = ["OUTPUT_LOSSES"]


def _check_numbers(criterion: Any, output: Tensor, target: Tensor) -> Tensor:
    """Return the target in the shape and type of the output; axes of length 1 may differ."""
    same_rows = len(target) == len(output)
    if not (same_rows and _squeezed(target) == _squeezed(output)):
        raise ValueError(
            f"{type(criterion).__name__} needs targets of the outputs' shape "
            f"{tuple(output.shape)}, got {tuple(target.shape)}."
        )
    return target.reshape(output.shape).to(output.dtype)


def _squeezed(array: Tensor) -> tuple[int, ...]:
    return tuple(size for size in array.shape[1:] if size != 1)


def _check_shares(criterion: Any, output: Tensor, target: Tensor) -> Tensor:
    """Return the target if it has numbers from 0 to 1."""
    target = _check_numbers(criterion, output, target)
    if target.numel():
        judge(partial(_refuse_other_than_shares, type(criterion).__name__), *target.aminmax())
    return target


def _refuse_other_than_shares(criterion: str, low: float, high: float) -> None:
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"{criterion} needs targets from 0 to 1, got values from {low:g} to {high:g}. Encode "
            "the two classes as 0 and 1."
        )


def _check_counts(criterion: Any, output: Tensor, target: Tensor) -> Tensor:
    """Return the target if it has no negative numbers."""
    target = _check_numbers(criterion, output, target)
    if target.numel():
        judge(partial(_refuse_other_than_counts, type(criterion).__name__), target.amin())
    return target


def _refuse_other_than_counts(criterion: str, lowest: float) -> None:
    if lowest < 0:
        raise ValueError(
            f"{criterion} needs counts, which are not negative, as targets, got {lowest:g}."
        )


def _output_divisors(criterion: Any, output: Tensor, target: Tensor | None) -> float:
    return 1 if criterion.reduction == "sum" else output.numel() / len(output)


def _logistic(criterion: Any, z: Tensor, target: Tensor | None) -> ClosedForm:
    """Return the curvature of the logistic loss in its logits."""
    beta = torch.sigmoid(z) * torch.sigmoid(-z)  # never 1 - sigmoid, which cancels
    pos_weight = getattr(criterion, "pos_weight", None)
    if pos_weight is not None:
        assert target is not None  # needs_target says so
        _check_of_outputs(criterion, "pos_weight", z)
        beta = beta * (1 + (pos_weight - 1) * target.reshape(z.shape))
    if criterion.weight is not None:
        _check_of_outputs(criterion, "weight", z)
        beta = beta * criterion.weight.to(z.dtype)
    return diagonal_curvature(beta)


def _check_of_outputs(criterion: Any, name: str, z: Tensor) -> None:
    """Refuse weights of samples where weights of outputs are expected."""
    shape = getattr(criterion, name).shape
    if shape[:-1].numel() != 1 or shape[-1:].numel() not in (1, z.shape[1]):
        raise ValueError(
            f"the {name} of {type(criterion).__name__} has shape {tuple(shape)}, one "
            "per sample of a fixed batch, which other batches cannot use; give one weight per "
            "output, or pass sample_weight."
        )


def _mean(y: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean of each output."""
    rows = y.reshape(len(y), -1).to(weight.dtype)
    return (weight[:, None] * rows).sum(dim=0) / weight.sum()


def _best_share(criterion: Any, y: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the probability of class 1 that minimises the logistic loss."""
    share = _mean(y, weight)
    pos_weight = getattr(criterion, "pos_weight", None)
    if pos_weight is not None:
        share = pos_weight * share / (pos_weight * share + 1 - share)
    tiny = torch.finfo(weight.dtype).eps
    return share.clamp(tiny, 1 - tiny)


def _squared(criterion: Any, z: Tensor, target: Tensor | None) -> ClosedForm:
    return diagonal_curvature(torch.full_like(z, 2.0))


def _poisson(criterion: Any, z: Tensor, target: Tensor | None) -> ClosedForm:
    """Return the curvature of the Poisson loss in log rates or in rates."""
    if criterion.log_input:  # loss exp(z) - y z
        return diagonal_curvature(z.exp())
    assert target is not None  # needs_target says so
    return diagonal_curvature(target.reshape(z.shape) / (z + criterion.eps).square())


def _best_rate(criterion: Any, y: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the prediction that minimises the Poisson loss: the mean or its logarithm."""
    rate = _mean(y, weight).clamp_min(torch.finfo(weight.dtype).tiny)
    return rate.log() if criterion.log_input else rate


def _median(y: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted median of each output."""
    rows = y.reshape(len(y), -1).to(weight.dtype)
    ordered, order = rows.sort(dim=0)
    reached = weight[order].cumsum(dim=0) >= weight.sum() / 2
    return ordered.gather(0, reached.int().argmax(dim=0)[None])[0]


def _output_row(
    task: Task,
    check: Callable[[Any, Tensor, Tensor], Tensor],
    best_constant: BestConstant | None,
    links: Mapping[str, CurvatureOf],
    needs_target: Callable[[Any], bool] = never,
) -> Row:
    """Return the row of a criterion that is a sum over outputs."""

    def read(criterion: Any, output: Tensor, target: Tensor) -> Target:
        target = check(criterion, output, target)
        return Target(target, target)

    return Row(task, read, _output_divisors, best_constant, links, needs_target)


OUTPUT_LOSSES: dict[type, Row] = {
    nn.BCEWithLogitsLoss: _output_row(
        "binary",
        _check_shares,
        lambda criterion, y, w, shape: _best_share(criterion, y, w, shape).logit(),
        {"identity": _logistic},
        lambda criterion: criterion.pos_weight is not None,
    ),
    nn.BCELoss: _output_row("binary", _check_shares, _best_share, {"sigmoid": _logistic}),
    nn.MSELoss: _output_row(
        "regression",
        _check_numbers,
        lambda criterion, y, w, shape: _mean(y, w),
        {"identity": _squared},
    ),
    nn.PoissonNLLLoss: _output_row(
        "regression",
        _check_counts,
        _best_rate,
        {"identity": _poisson},
        lambda criterion: not criterion.log_input,
    ),
    # no closed form, but the task and the shape of the targets are known
    nn.L1Loss: _output_row(
        "regression", _check_numbers, lambda criterion, y, w, shape: _median(y, w), {}
    ),
    nn.SmoothL1Loss: _output_row("regression", _check_numbers, None, {}),
    nn.HuberLoss: _output_row("regression", _check_numbers, None, {}),
}
