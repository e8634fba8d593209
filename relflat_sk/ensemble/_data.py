"""The batches of many nets at once."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from relflat_sk._losses import Loss
from relflat_sk.ensemble._member import Member

__all__ = ["Data"]


class Data:
    """The batches of an epoch, of all members; equal data are held once.

    Parameters
    ----------
    members : sequence of Member
        The nets.
    output : Tensor of shape (1, ...)
        Output of one network for one sample.
    takes_columns : bool, default=False
        Whether batches of targets are of shape (k, n, 1).

    Attributes
    ----------
    inputs, targets : Tensor of shape (m, ...)
        The data of all members.
    sizes : list of int
        The number of samples in each batch of the epoch.
    n_rows : int
        The number of samples of each member.
    """

    def __init__(
        self, members: Sequence[Member], output: Tensor, *, takes_columns: bool = False
    ) -> None:
        inputs, self._first_rows = _joined([member.inputs for member in members])
        targets, self._first_targets = _joined([member.targets for member in members])
        self.inputs, targets = members[0].moved(inputs, targets)
        self._size = int(members[0].loader.batch_size or 1)
        shown = output.expand(len(targets), *output.shape[1:])
        for member in members:
            member.net._check_output(Loss(member.net.criterion_), shown[: self._size])
        loss = Loss(members[0].net.criterion_)
        values = loss.read_target(shown, targets).values
        self.targets = values[:, None] if takes_columns else values
        self._drop_last = bool(members[0].loader.drop_last)
        own = torch.stack([member.loader.rows for member in members])
        self._own_rows, self._own_targets = own + self._first_rows, own + self._first_targets
        self.n_rows = own.shape[1]

    @property
    def drops_some(self) -> bool:
        """Whether an epoch leaves out the samples of an incomplete batch."""
        return self._drop_last and bool(self.n_rows % self._size)

    def start(self, members: Sequence[Member]) -> None:
        """Take the orders of an epoch.

        Parameters
        ----------
        members : sequence of Member
            They have drawn their orders.
        """
        device = self.inputs.device
        order = torch.stack([member.order for member in members])
        n, size = order.shape[1], self._size
        n = n - n % size if self._drop_last else n
        rows, labels = order + self._first_rows, order + self._first_targets
        self._rows = torch.split(rows[:, :n].to(device), size, dim=1)
        self._labels = torch.split(labels[:, :n].to(device), size, dim=1)
        self.sizes = [chunk.shape[1] for chunk in self._rows] if n else []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows, labels in zip(self._rows if self.sizes else (), self._labels, strict=False):
            yield _cut(self.inputs, rows), _cut(self.targets, labels)

    def in_order(
        self, positions: Sequence[int], samples: Tensor | None, size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut batches in the order of the data.

        Parameters
        ----------
        positions : sequence of int
            Which members.
        samples : Tensor of shape (len(positions), n) or None
            The numbers of their samples; all samples if None.
        size : int
            Number of samples in a batch.

        Yields
        ------
        inputs, targets : Tensor of shape (len(positions), n, ...)
            As in an epoch.
        """
        chosen = torch.tensor(positions)
        rows, labels = self._own_rows[chosen], self._own_targets[chosen]
        if samples is not None:
            rows, labels = (one.gather(1, samples.cpu()) for one in (rows, labels))
        device = self.inputs.device
        for some, others in zip(
            *(torch.split(one, size, 1) for one in (rows, labels)), strict=True
        ):
            yield _cut(self.inputs, some.to(device)), _cut(self.targets, others.to(device))


def _cut(data: Tensor, rows: Tensor) -> Tensor:
    """Return rows of some members, of shape (k, n): a tensor of shape (k, n, ...)."""
    found = data.index_select(0, rows.reshape(-1))
    return found.view(*rows.shape, *data.shape[1:])


def _joined(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join tensors, each of them once; return them with the first row of each."""
    different = list({id(tensor): tensor for tensor in tensors}.values())
    places = [next(i for i, one in enumerate(different) if one is x) for x in tensors]
    joined = different[0] if len(different) == 1 else torch.cat(different)
    return joined, torch.tensor(places)[:, None] * len(tensors[0])
