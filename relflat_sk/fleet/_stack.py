"""The weights, buffers and optimizer states of many networks, stacked along a first axis."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from relflat_sk.fleet._member import Member
from relflat_sk.fleet._updates import Update, find_update

__all__ = ["Stack", "release_states", "stack_tensors"]

TensorT = TypeVar("TensorT", bound=Tensor)


class Stack:
    """The stacked networks of the members that train together.

    Each network has weights and buffers of its own as well. They get the values of the stack at
    the end of each epoch, so that callbacks find a trained network. At the beginning of the next
    epoch, the stack gets them back: a callback may have changed them, also through ``data``, which
    leaves no trace. The states of the optimizers are views of the stack. A stack of one network is
    itself a view of the network's own tensors.
    """

    def __init__(self, members: Sequence[Member], unused: Collection[str] = ()) -> None:
        self.members = list(members)
        self._unused = unused
        self._kind = find_update(members[0].optimizer)
        with torch.no_grad():
            self.weights = stack_tensors([m.module.named_parameters() for m in members])
            self.buffers = stack_tensors([m.module.named_buffers() for m in members])
            self.gradients = {name: torch.zeros_like(w) for name, w in self.weights.items()}
            self._stack_states()
        self.is_view = len(members) == 1
        own = [[*m.module.parameters(), *m.module.buffers()] for m in members]
        self._own = [tensor for tensors in own for tensor in tensors if not self.is_view]
        stacked = [*self.weights.values(), *self.buffers.values()]
        self._rows = [tensor[k] for k in range(len(members)) for tensor in stacked]
        self._places = {id(member): _find_places(member) for member in members}

    @property
    def is_current(self) -> bool:
        """Whether the members have the same tensors, which a callback may have replaced."""
        return all(map(self.holds, self.members))

    def holds(self, member: Member) -> bool:
        """Return whether a network is in the stack, with the tensors that it has now."""
        return self._places.get(id(member)) == _find_places(member)

    def _stack_states(self) -> None:
        """Stack the states of the optimizers, which become views."""
        names = self._kind.names(self.members[0].settings)
        parameters = [self._used(m.module.named_parameters()) for m in self.members]
        states = [
            [m.optimizer.state[p] for p in ps]
            for m, ps in zip(self.members, parameters, strict=True)
        ]
        steps = torch.stack([
            torch.stack([_steps_made(one, names) for one in state]) for state in states
        ])
        self._states: dict[str, list[Tensor]] = {"step": [steps]}
        for name in names:
            self._states[name] = []
            for i, weight in enumerate(self._used(self.weights.items())):
                zeros = torch.zeros_like(weight[0])
                rows = [state[i].get(name) for state in states]
                stacked = _joined([zeros if row is None else row for row in rows])
                self._states[name].append(stacked)
                for k, state in enumerate(states):
                    state[i][name] = stacked[k]
        if "exp_avg" in names:
            for k, state in enumerate(states):
                for i, of_parameter in enumerate(state):
                    of_parameter["step"] = steps[k, i]

    def _used(self, named: Iterable[tuple[str, TensorT]]) -> list[TensorT]:
        """List the tensors of the parameters that the loss depends on."""
        return [tensor for name, tensor in named if name not in self._unused]

    def of(self, positions: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the weights and the buffers of some members. Shapes: returns (len(positions)."""
        if list(positions) == list(range(len(self.members))):
            return self.weights, self.buffers
        chosen = list(positions)
        weights, buffers = (
            {name: tensor[chosen] for name, tensor in tensors.items()}
            for tensors in (self.weights, self.buffers)
        )
        return weights, buffers

    def take_over(self) -> None:
        """Take over the values of the members' own networks."""
        if not self.is_view:
            with torch.no_grad():
                torch._foreach_copy_(self._rows, self._own)

    def hand_over(self) -> None:
        """Give the values of the stack to the members' own networks."""
        with torch.no_grad():
            if not self.is_view:
                torch._foreach_copy_(self._own, self._rows)
        for k, member in enumerate(self.members):
            for name, parameter in member.module.named_parameters():
                # that of the last step, as after a step of torch
                parameter.grad = None if name in self._unused else self.gradients[name][k]
            optimizer: Any = member.optimizer
            optimizer._opt_called = True  # else torch's schedulers warn of a missing step

    def make_update(self, fused: bool) -> Update:
        """Make the steps of an epoch, with the settings that the optimizers have now."""
        settings = [member.settings for member in self.members]
        weights, gradients = self._used(self.weights.items()), self._used(self.gradients.items())
        return self._kind(weights, gradients, self._states, settings, fused)


def _find_places(member: Member) -> list[int]:
    """Return where the tensors of a network and of its optimizer are in memory."""
    tensors = [*member.module.parameters(), *member.module.buffers()]
    for parameter in member.module.parameters():
        tensors += member.optimizer.state.get(parameter, {}).values()
    return [one.data_ptr() if isinstance(one, Tensor) else 0 for one in tensors]


def stack_tensors(named: Sequence[Iterable[tuple[str, Tensor]]]) -> dict[str, Tensor]:
    """Stack the tensors of several networks by their names. Shapes: returns (k, ...)."""
    tensors = [dict(one) for one in named]
    return {name: _joined([one[name].detach() for one in tensors]) for name in tensors[0]}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors; a single one is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def _steps_made(state: Mapping[str, Any], names: Sequence[str]) -> Tensor:
    """Return how many steps an optimizer has made; of SGD, whether it has a momentum."""
    if "momentum_buffer" in names:
        return torch.tensor(float(state.get("momentum_buffer") is not None))
    return torch.as_tensor(state.get("step", 0.0), dtype=torch.float32)


def release_states(optimizer: Any) -> None:
    """Copy the states of an optimizer out of the stack."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.clone()
