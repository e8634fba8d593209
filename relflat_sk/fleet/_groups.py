"""The groups of the nets in training."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from relflat_sk.fleet._group import Group
from relflat_sk.fleet._member import Member, make_member
from relflat_sk.fleet._stack import release_states
from relflat_sk.fleet._stackable import NotStackable

__all__ = ["Groups"]


class Groups:
    """Nets in training, by what they must have in common to be stacked."""

    def __init__(self, accept: Callable[[Member], None]) -> None:
        self._accept = accept
        self._groups: dict[tuple[Any, ...], Group | NotStackable] = {}
        self._members: dict[int, Member] = {}

    def __iter__(self) -> Iterator[tuple[tuple[Any, ...], Group]]:
        for key, group in self._groups.items():
            if isinstance(group, Group):
                yield key, group

    def find(self, net: Any, loader: Any, fit_params: Mapping[str, Any]) -> Member:
        """Find a net's place at each epoch's start: a callback may have changed the net."""
        known = self._members.pop(id(net), None)
        try:
            member = make_member(net, loader, fit_params)
            if known is not None and known.loader is loader and known.key == member.key:
                member = known
            else:
                self._place(member)
        except NotStackable:
            # torch's fused optimizers change weights without a trace: the net gets a new place
            # if it comes back
            if known is not None:
                release_states(net.optimizer_)
            raise
        self._members[id(net)] = member
        return member

    def _place(self, member: Member) -> None:
        """Find the group of a member, or refuse it if the group cannot be stacked."""
        if member.key not in self._groups:
            self._groups[member.key] = self._make(member)
        found = self._groups[member.key]
        if isinstance(found, NotStackable):
            raise NotStackable(str(found))

    def _make(self, member: Member) -> Group | NotStackable:
        try:
            self._accept(member)
            return Group(member)
        except NotStackable as reason:
            return reason

    def of(self, member: Member) -> Group:
        """Return the group of a member."""
        group = self._groups[member.key]
        assert isinstance(group, Group)
        return group

    def member(self, net: Any) -> Member | None:
        """Return the member of a net, if it was in its place in the last epoch."""
        return self._members.get(id(net))

    def release(self, net: Any) -> None:
        """Forget a net whose training has ended."""
        member = self._members.pop(id(net), None)
        if member is not None:
            release_states(net.optimizer_)
