"""A criterion as a sum over samples divided by a sum of divisors."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._losses.criterion import call_criterion, name_criterion
from relflat_sk._losses.curvature import ClosedForm
from relflat_sk._losses.row import Row, Target
from relflat_sk._losses.table import TABLE
from relflat_sk._numerics import or_one

__all__ = ["Loss", "weighted_loss"]


@dataclass(frozen=True)
class Loss:
    """A criterion as a sum over samples divided by a sum of divisors.

    Parameters
    ----------
    criterion : nn.Module or callable
        ``criterion(output, target)``. Those in `TABLE` are known exactly. Any other is assumed
        to average over samples (to sum, if its ``reduction`` is "sum"), and each sample's loss
        to depend on that sample's output alone.

    Notes
    -----
    Flatness is that of the *mean* loss: ``reduction="sum"`` changes what a sample's loss is (the
    sum over its outputs instead of their mean), never the mean over samples.
    """

    criterion: Any

    @property
    def row(self) -> Row | None:
        """The criterion's row in the table, or None if it has none."""
        # subclasses may compute anything, so they have no row
        return TABLE.get(type(self.criterion))

    @property
    def is_curved(self) -> bool:
        """Whether the table knows a curvature of the criterion, which is not zero everywhere."""
        return self.row is not None and bool(self.row.links)

    @property
    def needs_target(self) -> bool:
        """Whether the curvature depends on the labels."""
        return self.row is None or not self.is_curved or self.row.needs_target(self.criterion)

    def to(self, device: torch.device, dtype: torch.dtype | None) -> "Loss":
        """Copy the loss with the criterion's own weights on another device and of another type.

        Parameters
        ----------
        device : torch.device
            Device of the data.
        dtype : torch.dtype or None
            Floating type of the data; as it is if None.

        Returns
        -------
        Loss
            The loss itself if the criterion has no weights.
        """
        if not isinstance(self.criterion, nn.Module) or not _has_tensors(self.criterion):
            return self
        return Loss(copy.deepcopy(self.criterion).to(device=device, dtype=dtype))

    def classes_second(self, output: Tensor, target: Tensor | None) -> Tensor:
        """Move the classes of a language model's logits, (n, tokens, classes), to axis 1.

        Parameters
        ----------
        output : Tensor of shape (n, ...)
            The network's output.
        target : Tensor of shape (n, ...) or None
            The labels. Axes are moved only if the labels are of shape (n, tokens) and leave no
            other reading.

        Returns
        -------
        Tensor of shape (n, ...)
            With the classes where torch's criteria expect them.
        """
        over_classes = self.row is not None and self.row.task == "classification"
        if not over_classes or target is None or output.ndim < 3:
            return output
        second = (output.shape[0], *output.shape[2:])
        if target.shape != second and target.shape == output.shape[:-1]:
            return output.movedim(-1, 1)
        return output

    def per_token(self, target: Tensor | None) -> Tensor | None:
        """Flatten targets to one row for each token.

        Parameters
        ----------
        target : Tensor of shape (n, ...) or None
            Classes (n, tokens), or class probabilities or numbers (n, d, tokens).

        Returns
        -------
        Tensor of shape (n * tokens, ...) or None
            One row or number for each token; None if `target` is None.
        """
        if target is None:
            return None
        if target.is_floating_point():
            return target.movedim(1, -1).flatten(0, -2)
        return target.flatten()

    def check_target(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the target as the criterion takes it.

        Parameters
        ----------
        output : Tensor of shape (n, ...)
            The criterion's input.
        target : Tensor of shape (n, ...)
            The labels.

        Returns
        -------
        Tensor of shape (n, ...)
            The labels in the criterion's shape and type.

        Raises
        ------
        ValueError
            If shape, range or type of the labels do not fit the output.
        """
        return self.read_target(output, target).values

    def read_target(self, output: Tensor, target: Tensor) -> Target:
        """Return the target with the part of it that `closed_form` and `divisors` need.

        Parameters
        ----------
        output : Tensor of shape (n, ...)
            The criterion's input.
        target : Tensor of shape (n, ...)
            The labels. They are checked on the device where they are, since a check on the
            output's device would make the host wait for it.

        Returns
        -------
        Target
            The labels, and which of them curvature and divisors depend on, on the output's
            device.

        Raises
        ------
        ValueError
            If shape, range or type of the labels do not fit the output.
        """
        row = self.row
        if row is None:  # of any type
            found = Target(target, target)
        else:
            found = row.read_target(self.criterion, output, target)
        moves = isinstance(target, Tensor) and target.device != output.device
        return found.to(output.device) if moves else found

    def each_divisor(self, output: Tensor, target: Tensor | None) -> float | Tensor:
        """Return what each sample adds to the divisor of the criterion's mean.

        Parameters
        ----------
        output : Tensor of shape (n, ...)
            The criterion's input.
        target : Tensor of shape (n, ...) or None
            `Target.relevant`.

        Returns
        -------
        float or Tensor of shape (n,)
            One number if all samples add the same.
        """
        row = self.row
        return 1.0 if row is None else row.divisors(self.criterion, output, target)

    def divisors(self, output: Tensor, target: Tensor | None) -> Tensor:
        """Return what each sample adds to the divisor, as an array.

        Parameters
        ----------
        output : Tensor of shape (n, ...)
            The criterion's input.
        target : Tensor of shape (n, ...) or None
            `Target.relevant`.

        Returns
        -------
        Tensor of shape (n,)
            One number for each sample.
        """
        each = self.each_divisor(output, target)
        return each if isinstance(each, Tensor) else output.new_full((len(output),), each)

    @property
    def acts_on_each_output(self) -> bool:
        """Whether the loss is a sum of terms with one output each, not a softmax over classes."""
        return self.row is not None and self.row.task != "classification"

    def has_closed_form(self, link: str | None) -> bool:
        """Return whether the table has a curvature for a layer before a link.

        Parameters
        ----------
        link : str or None
            From `relflat_sk._network.find_link`.

        Returns
        -------
        bool
            Whether `closed_form` returns one for outputs (n, d).
        """
        return self.row is not None and link in self.row.links

    def closed_form(self, link: str | None, z: Tensor, target: Tensor | None) -> ClosedForm | None:
        """Return the curvature of the summed loss in a layer's output.

        Parameters
        ----------
        link : str or None
            What turns the layer's output into the criterion's input, from
            `relflat_sk._network.find_link`.
        z : Tensor of shape (n, d)
            The layer's output.
        target : Tensor of shape (n, ...) or None
            `Target.relevant`.

        Returns
        -------
        ClosedForm or None
            None if the table has no such curvature.
        """
        row = self.row
        curvature = None if row is None else row.links.get(link or "")
        return None if curvature is None or z.ndim != 2 else curvature(self.criterion, z, target)

    def terms(
        self, output: Tensor, target: Tensor | Target, *, each: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses of the samples and the divisors of the criterion's mean.

        The mean is ``losses.sum() / divisors.sum()``.

        Parameters
        ----------
        output : Tensor of shape (n, ...)
            The criterion's input.
        target : Tensor of shape (n, ...) or Target
            The labels, from `check_target`; with what `read_target` knows of them, divisors take
            fewer operations.
        each : bool, default=False
            Whether each sample's own loss is needed. If not, a criterion that returns nothing
            but a mean is accepted, and that mean is every sample's loss.

        Returns
        -------
        losses : Tensor of shape (n,)
            With their graph.
        divisors : Tensor of shape (n,)
            What each sample adds to the divisor.

        Raises
        ------
        ValueError
            From `losses`.
        """
        values, relevant = target if isinstance(target, Target) else (target, target)
        return self.losses(output, values, each=each), self.divisors(output, relevant)

    def losses(self, output: Tensor, target: Tensor, *, each: bool = False) -> Tensor:
        """Compute the losses of the samples.

        Parameters
        ----------
        output : Tensor of shape (n, ...)
            The criterion's input.
        target : Tensor of shape (n, ...)
            The labels, from `check_target`.
        each : bool, default=False
            As in `terms`.

        Returns
        -------
        Tensor of shape (n,)
            With their graph.

        Raises
        ------
        ValueError
            If the criterion cannot take this output and target, or returns no per-sample
            losses where they are needed.
        """
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
        over_outputs = summed or reduction == "batchmean"
        return rows.sum(dim=1) if over_outputs else rows.mean(dim=1)


def _has_tensors(module: nn.Module) -> bool:
    """Return whether a criterion has weights."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def weighted_loss(loss: Loss, output: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """Compute the weighted mean loss of a batch, its weighted sum for ``reduction="sum"``.

    Parameters
    ----------
    loss : Loss
        The criterion.
    output : Tensor of shape (n, ...)
        The network's output.
    target : Tensor of shape (n, ...)
        Targets as `loss.check_target` returns them.
    weight : Tensor of shape (n,) or None
        Weights of the samples; all 1 if None.

    Returns
    -------
    Tensor of shape ()
        The mean is weighted by the weights of this batch, as in scikit-learn. It is 0 if all
        of them are 0.
    """
    losses, divisors = loss.terms(output, target, each=weight is not None)
    weight = torch.ones_like(losses) if weight is None else weight
    total = (weight * losses).sum()  # a product of vectors loses digits under autocast
    if getattr(loss.criterion, "reduction", "mean") == "sum":
        return total
    return total / or_one((weight * divisors).sum())
