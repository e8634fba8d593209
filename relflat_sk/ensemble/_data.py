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

    Attributes
    ----------
    inputs, targets : Tensor of shape (m, ...)
        The data of all members.
    sizes : list of int
        The number of samples in each batch of the epoch.
    """

    def __init__(self, members: Sequence[Member], output: Tensor) -> None:
        inputs, self._first_rows = _joined([member.inputs for member in members])
        targets, self._first_targets = _joined([member.targets for member in members])
        self.inputs, targets = members[0].moved(inputs, targets)
        shown = output.expand(len(targets), *output.shape[1:])
        loss = Loss(members[0].net.criterion_)
        self.targets = loss.read_target(shown, targets).values
        for member in members:
            member.net._check_output(Loss(member.net.criterion_), output)
        self._size = int(members[0].loader.batch_size or 1)
        self._drop_last = bool(members[0].loader.drop_last)

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
        k = len(self._first_rows)
        for rows, labels in zip(self._rows if self.sizes else (), self._labels, strict=False):
            x = self.inputs.index_select(0, rows.reshape(-1))
            y = self.targets.index_select(0, labels.reshape(-1))
            yield x.view(k, -1, *x.shape[1:]), y.view(k, -1, *y.shape[1:])


def _joined(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join tensors, each of them once; return them with the first row of each."""
    different = list({id(tensor): tensor for tensor in tensors}.values())
    places = [next(i for i, one in enumerate(different) if one is x) for x in tensors]
    joined = different[0] if len(different) == 1 else torch.cat(different)
    return joined, torch.tensor(places)[:, None] * len(tensors[0])
