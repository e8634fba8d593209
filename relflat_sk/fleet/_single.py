"""The training of a net that is fitted by itself, by the formulas of a stack."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from relflat_sk.fleet._chain import find_chain
from relflat_sk.fleet._groups import Groups
from relflat_sk.fleet._member import Member
from relflat_sk.fleet._stackable import NotStackable
from relflat_sk.training import EpochTrainer

__all__ = ["Single"]

# bytes of a copy of the data on the network's device or in its dtype
_LARGE = 2**28


class Single(EpochTrainer):
    """Trains one net as a stack of one network, if it is a chain of layers.

    Its forward and backward passes are then written out, which takes about half as long as
    autograd where networks are small. The net is trained as by its own loop, up to rounding.
    """

    def __init__(self) -> None:
        self._groups = Groups(_accept)

    def train_epoch(self, net: Any, iterator: Any, fit_params: Mapping[str, Any]) -> bool:
        try:
            member = self._groups.find(net, iterator, fit_params)
        except NotStackable:
            return False
        net._set_training(True)
        member.draw()
        try:
            self._groups.of(member).train([member])
        finally:
            torch.set_rng_state(member.random_state)
        return True

    def training_loss(self, net: Any, goal: float) -> float | None:
        member = self._groups.member(net)
        if member is None or not self._groups.of(member).evaluates(member):
            return None
        return self._groups.of(member).losses([member], [goal])[0]

    def gradient_norm(self, net: Any, goal: float) -> float | None:
        member = self._groups.member(net)
        if member is None:
            return None
        group = self._groups.of(member)
        if group.is_far(member, goal):
            return math.inf
        return group.gradient_norms([member])[0] if group.differentiates(member) else None

    def release(self, net: Any) -> None:
        self._groups.release(net)
        for _, group in self._groups:
            group.release()


def _accept(member: Member) -> None:
    """Refuse networks that are no chain, and data of which a large copy would have to be made."""
    if find_chain(member.module, member.inputs) is None:
        raise NotStackable("its network is no chain of layers")
    weight = next(member.module.parameters())
    if (member.inputs.dtype, member.inputs.device) == (weight.dtype, weight.device):
        return
    if member.inputs.numel() * weight.element_size() > _LARGE:
        raise NotStackable("its data are large, and have another dtype or device")
