"""A criterion in use: summed over samples, with the divisors of its mean beside it."""

import copy
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from relflat_sk._losses.curvature import ClosedForm
from relflat_sk._losses.table import LINKS, TABLE, Row, Target
from relflat_sk.exceptions import FlatnessWarning

__all__ = ["Loss", "Target", "as_criterion"]


def as_criterion(criterion: Any) -> Any:
    """Make a criterion from a class, an instance or a plain function.

    Parameters
    ----------
    criterion : type, nn.Module or callable
        A torch loss, its class, or any ``criterion(output, target)``.

    Returns
    -------
    nn.Module or callable

    Raises
    ------
    TypeError
        If it is none of these.
    """
    if isinstance(criterion, type) and issubclass(criterion, nn.Module):
        return criterion()
    if callable(criterion) and not isinstance(criterion, type):
        return criterion
    raise TypeError(
        f"criterion must be a torch loss such as torch.nn.CrossEntropyLoss(), its class or a "
        f"function (output, target) -> loss, got {criterion!r}."
    )


@dataclass(frozen=True)
class Loss:
    """A criterion, seen as a sum over samples divided by a sum of divisors.

    Parameters
    ----------
    criterion : nn.Module or callable
        ``criterion(output, target)``; rows of `TABLE` are known exactly. Of any other it is
        assumed that it averages over samples (sums, if its ``reduction`` is "sum"), and that
        each sample's loss depends on that sample's output alone.

    Notes
    -----
    A flatness is one of the *mean* loss: ``reduction="sum"`` changes only what a sample's
    loss is (the sum over its outputs instead of their mean), never the mean over samples.
    """

    criterion: Any

    @property
    def row(self) -> Row | None:
        """The row of the table, None for a criterion that is not in it."""
        # subclasses may compute anything, so only the very class counts
        return TABLE.get(type(self.criterion))

    @property
    def needs_target(self) -> bool:
        """Whether the curvature depends on the labels."""
        return self.row is None or not self.row.links or self.row.needs_target(self.criterion)

    def to(self, device: torch.device, dtype: torch.dtype | None) -> "Loss":
        """Bring the criterion's own weights beside the data, without touching the user's."""
        if not isinstance(self.criterion, nn.Module) or not _has_tensors(self.criterion):
            return self
        return Loss(copy.deepcopy(self.criterion).to(device=device, dtype=dtype))

    def classes_second(self, output: Tensor, target: Tensor | None) -> Tensor:
        """Bring the logits of a language model, (n, tokens, classes), into torch's order.

        Only where the labels, (n, tokens), leave no other reading.
        """
        over_classes = self.row is not None and self.row.task == "classification"
        if not over_classes or target is None or output.ndim < 3:
            return output
        second = (output.shape[0], *output.shape[2:])
        if target.shape != second and target.shape == output.shape[:-1]:
            return output.movedim(-1, 1)
        return output

    def per_token(self, target: Tensor | None) -> Tensor | None:
        """Flatten targets (n, ...) to one row for each token."""
        if target is None:
            return None
        if target.is_floating_point():  # class probabilities or numbers, (n, d, tokens)
            return target.movedim(1, -1).flatten(0, -2)
        return target.flatten()

    def check_target(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the target as the criterion takes it.

        Raises
        ------
        ValueError
            If it does not fit the output: shape, range or kind of number.
        """
        return self.read_target(output, target).values

    def read_target(self, output: Tensor, target: Tensor) -> Target:
        """Check the target, and say what `closed_form` and `divisors` need of it."""
        row = self.row
        if row is None:
            return Target(target, target)
        return row.read_target(self.criterion, output, target)

    def each_divisor(self, output: Tensor, target: Tensor | None) -> float | Tensor:
        """Return what each sample adds to the divisor of the criterion's mean.

        Of shape (n,), or one number where all samples add the same.
        """
        row = self.row
        return 1.0 if row is None else row.divisors(self.criterion, output, target)

    def divisors(self, output: Tensor, target: Tensor | None) -> Tensor:
        """Return the same, always of shape (n,)."""
        each = self.each_divisor(output, target)
        return each if isinstance(each, Tensor) else output.new_full((len(output),), each)

    @property
    def acts_on_each_output(self) -> bool:
        """Whether the loss is a sum over outputs, rather than one over classes."""
        return self.row is not None and self.row.task != "classification"

    def warn_of(self, link: str | None) -> None:
        """Warn of a usual mistake; what is measured is what torch computes all the same."""
        if type(self.criterion) is nn.NLLLoss and link == "softmax":
            warnings.warn(
                "NLLLoss takes log-probabilities, but the network ends in a softmax: its loss "
                "is -p, not -log p. For skorch's convention, pass the skorch net; otherwise let "
                "the network end in LogSoftmax, or in logits with CrossEntropyLoss.",
                FlatnessWarning,
                stacklevel=2,
            )

    def has_closed_form(self, link: str | None) -> bool:
        """Whether the table has a curvature for what precedes the criterion."""
        return self.row is not None and link in self.row.links

    def closed_form(self, link: str | None, z: Tensor, target: Tensor | None) -> ClosedForm | None:
        """Curvature of the summed loss in `z`, None where the table has no such entry."""
        row = self.row
        curvature = None if row is None else row.links.get(link or "")
        return None if curvature is None or z.ndim != 2 else curvature(self.criterion, z, target)

    def terms(self, output: Tensor, target: Tensor, *, each: bool = False) -> tuple[Tensor, Tensor]:
        """Losses and divisors of the samples, both of shape (n,).

        The criterion's mean is ``losses.sum() / divisors.sum()``. For a criterion that only
        gives a mean, each sample is given that mean, unless `each` asks for its own.

        Raises
        ------
        ValueError
            If the criterion cannot take this output and target, or cannot tell samples apart.
        """
        n = len(output)
        row = self.row
        losses = self._call(output, target, each or row is not None)
        divisors = self.divisors(output, target)
        if row is not None:
            return losses.reshape(n, -1).sum(dim=1), divisors
        reduction = getattr(self.criterion, "reduction", "mean")
        summed = reduction == "sum"
        if losses.numel() == 1 and not (each and n > 1):
            return losses.reshape(()) / (n if summed else 1) * divisors, divisors
        if losses.ndim == 0 or len(losses) != n:
            raise ValueError(
                f"{_name(self.criterion)} gave losses of shape {tuple(losses.shape)} for {n} "
                f"samples; expected one {'for each sample, to weigh them' if each else 'number'}."
            )
        rows = losses.reshape(n, -1)
        over_outputs = summed or reduction == "batchmean"
        return (rows.sum(dim=1) if over_outputs else rows.mean(dim=1)), divisors

    def _call(self, output: Tensor, target: Tensor, each: bool) -> Tensor:
        criterion: Any = self.criterion
        if each and isinstance(criterion, nn.Module) and hasattr(criterion, "reduction"):
            criterion = copy.copy(criterion)
            criterion.reduction = "none"
            # accelerate leaves a forward behind that is bound to the original
            vars(criterion).pop("forward", None)
        try:
            losses = criterion(output, target)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ValueError(
                f"{_name(criterion)} cannot take outputs of shape {tuple(output.shape)} "
                f"({output.dtype}) with targets of shape {tuple(target.shape)} "
                f"({target.dtype}): {error}"
            ) from error
        if not isinstance(losses, Tensor):
            raise ValueError(
                f"{_name(criterion)} returned {type(losses).__name__}, expected a tensor."
            )
        return losses

    def constant_risk(
        self, targets: Tensor, weight: Tensor, output_shape: torch.Size, link: str | None
    ) -> float:
        """Mean loss of the best constant prediction.

        Parameters
        ----------
        targets : Tensor of shape (n, ...)
            As `check_target` returns them.
        weight : Tensor of shape (n,)
            Sample weights.
        output_shape : torch.Size
            Shape of the network's output for one sample.
        link : str or None
            What precedes the output, see `relflat_sk._network.layers.find_link`.

        Returns
        -------
        float
            nan if there is no best one: a loss without formula and without lower bound.
        """
        weight = weight.double()
        targets = targets.double() if targets.is_floating_point() else targets
        loss = self.to(targets.device, torch.float64)

        def risk(constant: Tensor) -> Tensor:
            constant = constant.reshape(output_shape)
            output = constant.expand(len(targets), *output_shape)
            losses, divisors = loss.terms(output, targets, each=bool((weight != 1).any()))
            return (weight * losses).sum() / (weight * divisors).sum()

        # the formulas are of outputs as they should be, not of logits squashed by mistake
        usual = link in {None, "identity"} or loss.has_closed_form(link)
        if usual and loss.row is not None and loss.row.best_constant is not None:
            best = loss.row.best_constant(loss.criterion, targets, weight, output_shape)
            return risk(best).item()

        def risk_and_slope(constant: np.ndarray) -> tuple[float, np.ndarray]:
            with torch.enable_grad():
                z = torch.tensor(constant, requires_grad=True, device=targets.device)
                value = risk(LINKS[link or "identity"](z))
                (slope,) = torch.autograd.grad(value, z)
            return value.item(), slope.cpu().numpy()

        start = np.zeros(output_shape.numel())
        found = minimize(risk_and_slope, start, jac=True, method="L-BFGS-B")
        return float(found.fun) if found.success else math.nan


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _name(criterion: Any) -> str:
    return getattr(criterion, "__name__", type(criterion).__name__)
