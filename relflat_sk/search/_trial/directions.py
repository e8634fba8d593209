"""The directions of a study, and the sign that an objective has in each."""

from typing import Any

__all__ = ["SIGNS", "check_direction", "check_directions"]

SIGNS = {"minimize": 1.0, "maximize": -1.0}


def check_direction(direction: Any) -> None:
    """Refuse a direction that there is not."""
    if direction not in SIGNS:
        raise ValueError(f"direction must be one of {list(SIGNS)}, got {direction!r}.")


def check_directions(trial: Any, direction: str, n_measures: int) -> None:
    """Refuse a study that optimises in other directions than an objective."""
    study = getattr(trial, "study", None)
    if study is None:
        return
    directions = [one.name.lower() for one in study.directions]
    if directions != [direction] * n_measures:
        raise ValueError(
            f"the study's directions are {directions}, but this objective has {n_measures} "
            f"measure(s), each to {direction}. Create the study with "
            f"directions={[direction] * n_measures}."
        )
