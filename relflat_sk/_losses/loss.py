"""A criterion as a sum over samples divided by a sum of divisors."""

import copy
import math
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.special import entr

from relflat_sk._checks import warn
from relflat_sk._losses.curvature import ClosedForm
from relflat_sk._losses.table import (
    LINKS,
    LOGITS,
    MODULES_OF_FUNCTIONS,
    TABLE,
    TOGETHER,
    UNKNOWN,
    Row,
    Target,
    shares_in_parts,
)
from relflat_sk._numerics import full_precision, or_one

# Criteria as users give them, and how they are called.

_ONE_TENSOR = (
    "Measures and the penalty pass one tensor to a criterion: the entry 'logits' if the network "
    "returns a mapping, the first entry if it returns a tuple."
)


def as_criterion(criterion: Any) -> Any:
    """Make a criterion from a class, an instance or a plain function, of torch or of a user."""
    if isinstance(criterion, type) and issubclass(criterion, nn.Module):
        return criterion()
    if isinstance(criterion, FunctionType):
        return MODULES_OF_FUNCTIONS.get(criterion, criterion)
    if callable(criterion) and not isinstance(criterion, type):
        return criterion
    raise TypeError(f"criterion must be a torch loss or class or a function, got {criterion!r}.")


def call_criterion(criterion: Any, output: Tensor, target: Tensor, *, each: bool) -> Tensor:
    """Call a criterion."""
    if each and isinstance(criterion, nn.Module) and hasattr(criterion, "reduction"):
        unreduced: Any = copy.copy(criterion)
        unreduced.reduction = "none"
        # accelerate replaces forward by a function that is bound to the original
        vars(unreduced).pop("forward", None)
        criterion = unreduced
    try:
        losses = criterion(output, target)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        advice = "" if type(criterion).__module__.startswith("torch.") else _ONE_TENSOR
        raise ValueError(
            f"{name_criterion(criterion)} raised {type(error).__name__}: {error}; for outputs of "
            f"shape {tuple(output.shape)} ({output.dtype}) and targets of shape "
            f"{tuple(target.shape)} ({target.dtype}). {getattr(criterion, 'advice', advice)}"
        ) from error
    if not isinstance(losses, Tensor):
        raise ValueError(
            f"{name_criterion(criterion)} returned {type(losses).__name__}, expected a tensor."
        )
    return losses


# by how much the gradients of two losses may differ that are multiples of each other, as a share
_ROUNDING = 1e-4


def multiple_of(loss: Tensor, reference: Tensor, output: Tensor) -> float | None:
    """Return c if the gradient of a loss in the outputs is c > 0 times another one's, or None."""
    if not (loss.requires_grad and reference.requires_grad and loss.numel() == 1):
        return None
    options: Any = {"retain_graph": True, "materialize_grads": True}
    slope, unit = (
        full_precision(torch.autograd.grad(value.mean(), output, **options)[0]).flatten()
        for value in (loss, reference)
    )
    factor = (slope @ unit) / (unit @ unit)
    same = (slope - factor * unit).norm() <= _ROUNDING * slope.norm()
    return float(factor) if bool(same & (factor > 0)) else None


def has_hooks(criterion: Any) -> bool:
    """Return whether a criterion calls hooks of others, which may change its loss."""
    return isinstance(criterion, nn.Module) and bool(
        criterion._forward_hooks or criterion._forward_pre_hooks
    )


def name_criterion(criterion: Any) -> str:
    """Return the name of a criterion's class, or of a function, for error messages."""
    name: str = getattr(criterion, "__name__", type(criterion).__name__)
    return f"{name} with hooks" if has_hooks(criterion) else name


# Functions in which networks end, and whether they fit the criterion.

# criteria that apply a function to logits, with functions that must not have made the logits
_ON_LOGITS: dict[type, tuple[str, set[str]]] = {
    nn.CrossEntropyLoss: ("softmax", {"softmax", "sigmoid"}),
    nn.BCEWithLogitsLoss: ("sigmoid", {"softmax", "log_softmax", "sigmoid"}),
}


# what networks with these endings are usually trained with
_TRAINED_WITH = {
    "softmax": "criterion=lambda p, y: torch.nn.functional.nll_loss(p.log(), y)",
    "log_softmax": "criterion=torch.nn.NLLLoss()",
    "sigmoid": "criterion=torch.nn.BCELoss()",
}


def explain_ending(criterion: Any, ending: str | None) -> str | None:
    """Explain why the function that a network ends in does not fit a criterion."""
    kind = type(criterion)
    applied, wrong = _ON_LOGITS.get(kind, ("", set[str]()))
    if ending not in wrong:
        return None
    return (
        f"{kind.__name__} takes logits, to which it applies a {applied}, but the network ends in a "
        f"{ending} already"
    )


def warn_of_ending(criterion: Any, ending: str | None) -> None:
    """Warn if probabilities reach a criterion that takes logits, or logarithms of them."""
    if type(criterion) is nn.NLLLoss and ending == "softmax":
        warn(
            "NLLLoss takes log-probabilities, but the network ends in a softmax: its loss is -p. "
            "Pass the skorch net, or let the network end in LogSoftmax."
        )
    problem = explain_ending(criterion, ending)
    if problem is not None:
        warn(
            f"{problem}. Remove the {ending} from the module, and train again, or pass the "
            f"criterion that it was trained with, such as {_TRAINED_WITH[str(ending)]}."
        )


@dataclass(frozen=True)
class Loss:
    """A criterion as a sum over samples divided by a sum of divisors, at a temperature.

    The temperature is the scale of the likelihood whose negative logarithm the loss is. It divides
    the logits of a classifier, ``L(z / T)``, so that the classes with the largest probability stay
    the same. It divides squared errors, ``L(z) / T``, as the variance of normal noise does.
    """

    criterion: Any
    temperature: float = 1.0
    # outputs are (n, tokens, classes), also where there are as many tokens as classes
    classes_last: bool = False

    @property
    def row(self) -> Row | None:
        """The criterion's row in the table, or None if it has none."""
        # subclasses and hooks may compute anything, so they have no row
        return None if has_hooks(self.criterion) else TABLE.get(type(self.criterion))

    @property
    def _rules(self) -> Row:
        return self.row or UNKNOWN

    @property
    def is_curved(self) -> bool:
        """Whether the table knows a curvature of the criterion, which is not zero everywhere."""
        return bool(self._rules.links)

    @property
    def needs_target(self) -> bool:
        """Whether the curvature depends on the labels."""
        return not self.is_curved or self._rules.needs_target(self.criterion)

    @property
    def divides_logits(self) -> bool:
        """Whether the temperature divides the logits, and not the loss."""
        return self._rules.task in {"classification", "binary"}

    @property
    def weighs_outputs(self) -> bool:
        """Whether some outputs of a sample count more than others, by their place on its axes."""
        weights = (getattr(self.criterion, name, None) for name in ("weight", "pos_weight"))
        return self._rules.task == "binary" and any(
            w is not None and w.numel() > 1 for w in weights
        )

    @property
    def acts_on_each_output(self) -> bool:
        """Whether the loss is a sum of terms with one output each, not a softmax over classes."""
        return self._rules.task in {"binary", "regression"}

    def to(self, device: torch.device, dtype: torch.dtype | None) -> "Loss":
        """Copy the loss with the criterion's own weights on another device and of another type."""
        module = self.criterion
        if not isinstance(module, nn.Module) or not [*module.parameters(), *module.buffers()]:
            return self
        return replace(self, criterion=copy.deepcopy(module).to(device=device, dtype=dtype))

    # -- outputs and targets

    def logits(self, output: Tensor) -> Tensor:
        """Return logits, up to a constant for each sample, from what the criterion takes."""
        return LOGITS[self._rules.link](output)

    def from_logits(self, z: Tensor) -> Tensor:
        """Return what the criterion takes from logits."""
        link = LINKS[self._rules.link]
        return link(z) if z.ndim < 3 else link(z.movedim(1, -1)).movedim(-1, 1)

    def classes_second(self, output: Tensor, target: Tensor | None) -> Tensor:
        """Move the classes of a language model's logits, (n, tokens, classes), to axis 1."""
        if self._rules.task != "classification" or target is None or output.ndim < 3:
            return output
        second = (output.shape[0], *output.shape[2:])
        fits = target.shape == output.shape[:-1]
        are_last = fits and (self.classes_last or target.shape != second)
        return output.movedim(-1, 1) if are_last else output

    def per_token(self, target: Tensor | None) -> Tensor | None:
        """Flatten targets to one row for each token, (n * tokens, ...)."""
        if target is None:
            return None
        if target.is_floating_point():
            return target.movedim(1, -1).flatten(0, -2)
        return target.flatten()

    def read_target(self, output: Tensor, target: Tensor) -> Target:
        """Return the target with the part of it that `closed_form` and `divisors` need."""
        read = self._rules.read_target(self.criterion, output, target)
        moves = isinstance(target, Tensor) and target.device != output.device
        return read.to(output.device) if moves else read

    def each_divisor(self, output: Tensor, target: Tensor | None) -> float | Tensor:
        """Return what each sample adds to the divisor of the criterion's mean: (n,)."""
        return self._rules.divisors(self.criterion, output, target)

    def divisors(self, output: Tensor, target: Tensor | None) -> Tensor:
        """Return what each sample adds to the divisor, as an array: (n,)."""
        divisors = self.each_divisor(output, target)
        if isinstance(divisors, Tensor):
            return divisors
        return output.new_full((len(output),), divisors)

    def counting_rows(self, target: Tensor | None, n_rows: int) -> Tensor | None:
        """Find which rows, samples or tokens, have a label that is not ignored; None if all may."""
        ignored = getattr(self.criterion, "ignore_index", None)
        if target is None or ignored is None:
            return None
        counts: Tensor = (target != ignored).reshape(len(target), -1)
        counts = counts if counts.numel() == n_rows else counts.any(dim=1)
        return counts.flatten().repeat_interleave(n_rows // counts.numel())

    # -- curvature and losses

    def has_closed_form(self, link: str | None) -> bool:
        """Return whether the table has a curvature for a layer before a link."""
        return link in self._rules.links

    def closed_form(self, link: str | None, z: Tensor, target: Tensor | None) -> ClosedForm | None:
        """Return the curvature of the summed loss in a layer's output."""
        if z.ndim != 2 or link is None or not self.has_closed_form(link):
            return None
        heat, power = self.temperature, 1
        if heat != 1 and self.divides_logits:
            z, power = full_precision(z) / heat, 2
        curvature = self._rules.links[link](self.criterion, z, target)
        return curvature if heat == 1 else curvature.times(1 / heat**power)

    def terms(self, output: Tensor, target: Tensor, *, each: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the samples' losses, (n,), and divisors, (n,): their sums' ratio is the mean."""
        return self.losses(output, target, each=each), self.divisors(output, target)

    def losses(self, output: Tensor, target: Tensor, *, each: bool = False) -> Tensor:
        """Compute the losses of the samples: (n,)."""
        if self.temperature == 1:
            return self._of_criterion(output, target, each=each)
        if not self.divides_logits:
            return self._of_criterion(output, target, each=each) / self.temperature
        heated = self.from_logits(self.logits(output) / self.temperature)
        return self._of_criterion(heated, target, each=each)

    def _of_criterion(self, output: Tensor, target: Tensor, *, each: bool) -> Tensor:
        """Compute the losses without a temperature: (n,)."""
        n, row = len(output), self.row
        losses = call_criterion(self.criterion, output, target, each=each or row is not None)
        if row is not None:
            return losses if losses.ndim == 1 else losses.reshape(n, -1).sum(dim=1)
        reduction = getattr(self.criterion, "reduction", "mean")
        summed = reduction == "sum"
        if losses.numel() == 1 and not (each and n > 1):
            return (losses.reshape(()) / (n if summed else 1)).expand(n)
        if losses.ndim == 0 or len(losses) != n:
            raise ValueError(
                f"{name_criterion(self.criterion)} gave losses of shape {tuple(losses.shape)} for "
                f"{n} samples; expected one {'for each sample' if each else 'number'}."
            )
        rows = losses.reshape(n, -1)
        return rows.sum(dim=1) if summed or reduction == "batchmean" else rows.mean(dim=1)


def warn_of_no_curvature(loss: Loss, penalty: str, remedy: str) -> None:
    """Warn that a penalty has no effect, because the criterion has no curvature."""
    warn(
        f"{penalty} has no effect: {name_criterion(loss.criterion)} has no curvature. Train with "
        f"a loss that is twice differentiable, such as criterion=torch.nn.MSELoss, or {remedy}."
    )


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch, as a function of its outputs: a weighted mean, or the weighted sum."""

    loss: Loss
    target: Target
    weight: Tensor | None = None  # (n,)

    def __call__(self, output: Tensor) -> Tensor:
        """Compute the loss at some outputs."""
        criterion, target = self.loss.criterion, self.target.values
        # torch would divide by zero if all labels of a batch are ignored, or have no weight; labels
        # of a criterion without a row may be anything
        is_safe = self.loss.row is None or not (
            (target.ndim > 1 and hasattr(criterion, "ignore_index"))
            or getattr(criterion, "weight", None) is not None
        )
        if self.weight is None and is_safe:
            value: Tensor = criterion(output, target)
            if value.numel() == 1:
                return value
        losses, divisors = self.loss.terms(output, target, each=self.weight is not None)
        weight = torch.ones_like(losses) if self.weight is None else self.weight
        total = (weight * losses).sum()  # a product of vectors loses digits under autocast
        if getattr(criterion, "reduction", "mean") == "sum":
            return total
        return total / or_one((weight * divisors).sum())

    def counts(self, output: Tensor) -> Tensor | None:
        """Return what each sample counts in the mean, (n,); None if all count alike."""
        divisors = self.loss.each_divisor(output, self.target.relevant)
        if not isinstance(divisors, Tensor):
            return self.weight
        return divisors if self.weight is None else divisors * self.weight


# The best constant prediction, to which a trained network's loss is compared, and the best of all.


def constant_risk(
    loss: Loss,
    targets: Tensor,
    weight: Tensor,  # (n,)
    output_shape: torch.Size,
    link: str | None,
) -> float:
    """Compute the mean loss of the best constant prediction, at temperature 1."""
    weight = weight.double()
    targets = targets.double() if targets.is_floating_point() else targets
    loss = replace(loss, temperature=1.0).to(targets.device, torch.float64)

    n = len(targets)
    # of a criterion that is not in the table, only the mean of all samples may be known
    rows = n if loss.row is None else max(1, TOGETHER // max(1, output_shape.numel()))

    def risk(constant: Tensor) -> Tensor:
        total = divisor = weight.new_zeros(())
        for part in (slice(start, start + rows) for start in range(0, n, rows)):
            target = targets[part]
            output = constant.reshape(output_shape).expand(len(target), *output_shape)
            losses, divisors = loss.terms(output, target, each=bool((weight != 1).any()))
            total = total + (weight[part] * losses).sum()
            divisor = divisor + (weight[part] * divisors).sum()
        return total / divisor

    # the formulas do not hold if the network turns logits into something else by mistake
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
    best = minimize(risk_and_slope, start, jac=True, method="L-BFGS-B")
    return float(best.fun) if best.success else math.nan


def lowest_risk(
    loss: Loss,
    targets: Tensor,
    weight: Tensor,  # (n,)
    output_shape: torch.Size,
) -> float:
    """Compute the mean loss that no prediction is below, at temperature 1."""
    shares, smoothing = loss._rules.shares, getattr(loss.criterion, "label_smoothing", 0.0)
    if shares is None or not (smoothing or targets.is_floating_point()):
        return 0.0
    weight, loss = weight.double(), loss.to(targets.device, torch.float64)
    parts = shares_in_parts(shares, loss.criterion, targets, weight, output_shape)
    # the minimum over p of -sum_k a_k log p_k
    lowest = sum(w @ (entr(a).sum(-1) - entr(a.sum(-1))).sum(1) for a, w in parts)
    output = weight.new_zeros(()).expand(len(targets), *output_shape)
    return float(lowest / (weight @ loss.divisors(output, targets)))
