"""The processes that hold the data of a network, each a part: sums over all of them.

Every step that needs all processes begins with a meeting, at which each of them says what it is
about to do, or that it has failed. So an error in one process ends the others, too, instead of
leaving them to wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_WORLD = "world"


class OtherProcessError(RuntimeError):
    """Another process has failed, or does something else."""


class Processes:
    """The processes of a group, each with a part of the data; without a group the calling one.

    All processes have to call the same methods in the same order.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._is_exchanging = False

    @property
    def rank(self) -> int:
        """The number of the calling process, from 0."""
        return 0 if self._group is None else dist.get_rank(self._group)

    @property
    def are_several(self) -> bool:
        """Whether there is a group."""
        return self._group is not None

    def sum(self, values: Tensor) -> Tensor:
        """Sum an array over all processes."""
        if self._group is None:
            return values
        self._meet(f"sum of shape {tuple(values.shape)}")
        # a copy on the device whose memory the group's backend can send
        on_cuda = dist.get_backend(self._group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else "cpu"
        total = values.detach().to(device, copy=True).contiguous()
        with self._exchanging():
            dist.all_reduce(total, group=self._group)
        return total.to(values.device)

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Sum numbers over all processes."""
        if self._group is None:
            return list(numbers)
        total: list[float] = self.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        return total

    def gather(self, value: Any) -> list[Any]:
        """Collect a value from every process."""
        return [value] if self._group is None else self._meet("gather", value)

    def join_rows(self, *arrays: Tensor) -> list[Tensor]:
        """Put the rows of all processes behind each other."""
        if self._group is None:
            return list(arrays)
        parts = self.gather([array.detach().cpu() for array in arrays])
        return [
            torch.cat(joined).to(array.device)
            for array, joined in zip(arrays, zip(*parts, strict=True), strict=True)
        ]

    def begin(self, task: str) -> None:
        """Wait until all processes begin a task, of which some may find that it is impossible."""
        if self._group is not None:
            self._meet(f"begin of {task}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let all processes fail if one of them does, anywhere inside the context."""
        if self._group is None:
            yield
            return
        try:
            yield
        except OtherProcessError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            # in the middle of an exchange, others would take this one for its end
            if not self._is_exchanging:
                self._exchange("failed", f"{type(error).__name__}: {error}")
            raise
        self._meet("end")

    def _meet(self, step: str, value: Any = None) -> list[Any]:
        """Exchange values, after all processes have agreed on what they do."""
        said = self._exchange(step, value)
        for rank, (other, found) in enumerate(said):
            if other == "failed":
                raise OtherProcessError(f"process {rank} of the group has failed: {found}")
            if other != step:
                raise OtherProcessError(
                    f"the processes of the group do different things: process {rank} is at the "
                    f"step {other!r}, this one at {step!r}. Call the same functions with the same "
                    "arguments in all processes."
                )
        return [found for _, found in said]

    def _exchange(self, step: str, value: Any) -> list[tuple[str, Any]]:
        """Collect what every process is about to do."""
        said: list[Any] = [None] * dist.get_world_size(self._group)
        with self._exchanging():
            dist.all_gather_object(said, (step, value), group=self._group)
        return said

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Remember an exchange that did not end, such as by Ctrl-C."""
        self._is_exchanging = True
        yield
        self._is_exchanging = False


ALONE = Processes()


def join(process_group: Any) -> Processes:
    """Return the processes that a user's argument stands for."""
    if process_group is None:
        return ALONE
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"process_group={process_group!r} needs a process group, and there is none: call "
            "torch.distributed.init_process_group in every process first, or leave process_group "
            "out to measure on the data of this process alone."
        )
    if isinstance(process_group, str) and process_group == _WORLD:
        return Processes(dist.group.WORLD)
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group is a group that the calling process does not belong to.")
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a group of torch.distributed, {_WORLD!r} or None, got "
            f"{process_group!r}."
        )
    return Processes(process_group)
