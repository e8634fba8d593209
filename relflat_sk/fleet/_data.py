"""The batches of many nets at once."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from relflat_sk._losses import Loss
from relflat_sk._numerics import or_one
from relflat_sk.fleet._member import Member

__all__ = ["ArrayBatch", "Batch", "Data", "make_batch"]

# input values of batches that are cut at a time
_NUMBERS = 2**20


class Batch(NamedTuple):
    """A batch of each member.

    Shapes: `inputs, targets` (k, n, ...), `weights` (k, n), `shares` (k, n, 1).
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    shares: Tensor


class ArrayBatch(NamedTuple):
    """A batch of a single member. Shapes: `weights, shares` (n,)."""

    inputs: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]
    weights: np.ndarray[Any, Any]
    shares: np.ndarray[Any, Any]


class Data:
    """The batches of an epoch, of all members; equal inputs are held once.

    Callbacks of epochs may change the members' data in place: `start` takes that over.

    Shapes: `output` (1, ...).
    """

    def __init__(
        self, members: Sequence[Member], output: Tensor, *, takes_columns: bool = False
    ) -> None:
        inputs, self._first_rows = _joined([member.inputs for member in members])
        self._size = int(members[0].loader.batch_size or 1)
        self._output, self._takes_columns = output, takes_columns
        self._loss = Loss(members[0].net.criterion_)
        shown = output.expand(self._size, *output.shape[1:])
        for member in members:
            member.net._check_output(Loss(member.net.criterion_), shown)
        self.inputs = members[0].moved(inputs)
        self._read_targets(members)
        self._drop_last = bool(members[0].loader.drop_last)
        self._weights = torch.stack([member.weights for member in members]).to(output.dtype)
        self._own = torch.stack([member.loader.rows for member in members])
        self.total_weights: list[float] = (
            self._weights.gather(1, self._own).double().sum(1).tolist()
        )

    @property
    def drops_some(self) -> bool:
        """Whether an epoch leaves out the samples of an incomplete batch."""
        return self._drop_last and bool(self._own.shape[1] % self._size)

    def _read_targets(self, members: Sequence[Member]) -> None:
        """Read the targets of all members, which raises an error if they do not fit the output."""
        targets, self._first_targets = _joined([member.targets for member in members])
        shown = self._output.expand(len(targets), *self._output.shape[1:])
        values = self._loss.read_target(shown, targets).values
        self.targets = values[:, None] if self._takes_columns else values

    def _take_over(self, members: Sequence[Member]) -> None:
        """Take over the data that members have now, where they are not in the same memory."""
        sources = {first: one.inputs for first, one in zip(self._first_rows, members, strict=True)}
        for first, source in sources.items():
            own = self.inputs[first : first + len(source)]
            if own.data_ptr() != source.data_ptr():
                own.copy_(source)
        if self.targets.data_ptr() != members[0].targets.data_ptr() or not self._has_valid_labels():
            self._read_targets(members)

    def _has_valid_labels(self) -> bool:
        """Return whether classes have an output each; true of other targets."""
        if not self._takes_columns:
            return True
        low, high = torch.aminmax(self.targets)
        return bool(low >= 0) and bool(high < self._output.shape[-1])

    def start(self, members: Sequence[Member]) -> None:
        """Take the data of an epoch, and its orders."""
        self._take_over(members)
        order = torch.stack([member.order for member in members])
        n = order.shape[1]
        self._order = order[:, : n - n % self._size] if self._drop_last else order
        n = self._order.shape[1]
        self.sizes = [min(self._size, n - first) for first in range(0, n, self._size)]

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(range(len(self._order)), self._order, self._size)

    def arrays(self) -> Iterator[ArrayBatch]:
        """Cut the batches of an epoch of a single member, on the CPU."""
        order, size = self._order[0].numpy(), self._size
        weights = self._weights[0].numpy()[order]
        sums = np.add.reduceat(weights, np.arange(0, len(order), size))
        sums[sums == 0] = 1
        shares = weights / np.repeat(sums, self.sizes)
        inputs, targets = self.inputs.detach().numpy(), self.targets.detach().numpy()
        several = size * max(1, _NUMBERS // (size * max(1, inputs[0].size)))
        for first in range(0, len(order), several):
            rows = order[first : first + several]
            arrays = inputs[rows], targets[rows], weights[first:], shares[first:]
            for one in range(0, len(rows), size):
                last = min(one + size, len(rows))
                yield ArrayBatch(*[array[one:last] for array in arrays])

    def in_order(
        self, positions: Sequence[int], samples: Tensor | None, size: int
    ) -> Iterator[Batch]:
        """Cut batches in the order of the data. Shapes: `samples` (len(positions)."""
        rows = self._own[list(positions)]
        rows = rows if samples is None else rows.gather(1, samples.cpu())
        return self._batches(positions, rows, size)

    def _batches(self, positions: Sequence[int], rows: Tensor, size: int) -> Iterator[Batch]:
        """Cut batches out of rows of some members, (len(positions), n)."""
        chosen = list(positions)
        weights = self._weights[chosen].gather(1, rows)
        parts = (
            rows + torch.tensor([[self._first_rows[k]] for k in chosen]),
            rows + torch.tensor([[self._first_targets[k]] for k in chosen]),
            weights,
            _shares(weights, size),
        )
        split = [torch.split(part.to(self.inputs.device), size, dim=1) for part in parts]
        for own, labels, some, shares in zip(*split, strict=True):
            yield Batch(_cut(self.inputs, own), _cut(self.targets, labels), some, shares)


def make_batch(inputs: Tensor, targets: Tensor, output: Tensor) -> Batch:
    """Make a batch of one member, without sample weights."""
    ones = output.new_ones(1, len(inputs))
    return Batch(inputs[None], targets[None], ones, _shares(ones, len(inputs)))


def _shares(weights: Tensor, size: int) -> Tensor:
    """Divide sample weights by their sums over batches: (k, n, 1)."""
    k, n = weights.shape
    batches = pad(weights, (0, -n % size)).view(k, -1, size)
    shares = batches / or_one(batches.sum(2, keepdim=True))
    return shares.view(k, -1, 1)[:, :n]


def _cut(data: Tensor, rows: Tensor) -> Tensor:
    """Return rows of some members, of shape (k, n): a tensor of shape (k, n, ...)."""
    found = data.index_select(0, rows.reshape(-1))
    return found.view(*rows.shape, *data.shape[1:])


def _joined(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Join tensors, each of them once; return them with the first row of each."""
    different = list({id(tensor): tensor for tensor in tensors}.values())
    places = [next(i for i, one in enumerate(different) if one is x) for x in tensors]
    joined = different[0] if len(different) == 1 else torch.cat(different)
    return joined, [place * len(tensors[0]) for place in places]
