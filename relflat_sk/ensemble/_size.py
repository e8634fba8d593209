"""The number of nets that are trained at a time."""

from typing import Any

from relflat_sk._checks import check_integer

__all__ = ["fleet_size"]

_AT_MOST = 32


def fleet_size(fleet: Any) -> int | None:
    """Return how many nets to train at a time.

    Parameters
    ----------
    fleet : int, "auto" or None
        As a user gave it.

    Returns
    -------
    int or None
        None to train one net after the other.

    Raises
    ------
    ValueError
        If `fleet` is none of these.
    """
    if fleet is None:
        return None
    if isinstance(fleet, str):
        if fleet != "auto":
            raise ValueError(f"fleet must be a positive integer, 'auto' or None, got {fleet!r}.")
        return _AT_MOST
    check_integer("fleet", fleet, minimum=1)
    return int(fleet)
