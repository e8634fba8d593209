"""The seeds of trials, by which any candidate can be trained again as it was."""

import zlib
from typing import Any

import torch

from relflat_sk._random import draw_seed

__all__ = ["Seeds"]

SEED = "seed"  # user attribute of a trial; a text, because a number would seem to be a measure


class Seeds:
    """The seeds of the trials of an objective.

    With a `random_state`, the seed of a trial derives from it and from the drawn parameters, so
    that a candidate has the same seed in each search. Without one, it derives from a draw from
    torch's global random state and from the number of the trial, so that other searches have
    other networks. Each trial records its seed.
    """

    def __init__(self, random_state: Any) -> None:
        self.base = None if random_state is None else draw_seed(random_state)
        self._drawn = int(torch.randint(2**31 - 1, ())) if random_state is None else 0

    def begin(self, trial: Any, record: dict[str, Any]) -> int:
        """Choose the seed of a trial that begins, and record it."""
        if self.base is None:
            seed = zlib.crc32(b"%d" % trial.number, self._drawn) >> 1
        else:
            seed = self._of_params(trial)
        record[SEED] = str(seed)
        return seed

    def of(self, trial: Any) -> int | None:
        """Return the seed of a trial."""
        recorded = trial.user_attrs.get(SEED)
        if recorded is not None:
            return int(recorded)
        return None if self.base is None else self._of_params(trial)

    def _of_params(self, trial: Any) -> int:
        assert self.base is not None
        return zlib.crc32(repr(sorted(trial.params.items())).encode(), self.base) >> 1
