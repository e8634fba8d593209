"""The random signs of a penalty: each net draws those that it draws if it is trained alone."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from relflat_sk._random import draw_words, n_words, signs_of
from relflat_sk.fleet._member import Member

__all__ = ["Signs"]

# words that are drawn at a time, for each net
_AT_ONCE = 2**13


class Signs:
    """The signs of the steps of an epoch."""

    def __init__(self, shapes: Callable[[int], list[tuple[int, int]]], n_draws: int) -> None:
        self._shapes = shapes
        self._n_draws = n_draws

    def start(self, members: Sequence[Member], sizes: Sequence[int]) -> None:
        """Begin an epoch."""
        self._members = list(members)
        self._generators = [torch.Generator() for _ in members]
        for member, generator in zip(members, self._generators, strict=True):
            generator.set_state(member.random_state)
        self._words = self._drawn(sizes)

    def finish(self) -> None:
        """Hand the random states over to the members, as the last step leaves them."""
        for member, generator in zip(self._members, self._generators, strict=True):
            member.random_state = generator.get_state()

    def step(self, n: int, like: Tensor) -> Iterator[list[Tensor]]:
        """Draw the signs of the next step. Shapes: returns (k, ...)."""
        words, shapes = next(self._words).to(like.device), self._shapes(n)
        for draw in words.chunk(self._n_draws, 1):
            parts = torch.split(draw, [n_words(shape) for shape in shapes], 1)
            yield [signs_of(part, one, like) for part, one in zip(parts, shapes, strict=True)]

    def _drawn(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Draw the words of one step after the other, those of several steps at once."""
        needed = [self._n_draws * sum(map(n_words, self._shapes(n))) for n in sizes]
        while needed:
            at_once = max(1, _AT_ONCE // needed[0])
            chunk, needed = needed[:at_once], needed[at_once:]
            words = torch.stack([
                draw_words(sum(chunk), torch.device("cpu"), one) for one in self._generators
            ])
            yield from torch.split(words, chunk, 1)
