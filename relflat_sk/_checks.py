"""Check scalar arguments and devices in the same way in all modules."""

import math
from numbers import Integral, Real
from typing import Any

import torch

__all__ = ["check_device", "check_integer", "check_number", "is_integer", "is_number"]


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, NumPy's included; booleans are not.

    Parameters
    ----------
    value : object
        Anything.

    Returns
    -------
    bool
        Whether it is one.
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, NumPy's included; booleans are not.

    Parameters
    ----------
    value : object
        Anything.

    Returns
    -------
    bool
        Whether it is one.
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def check_integer(
    name: str, value: Any, *, minimum: int, optional: bool = False, reason: str = ""
) -> None:
    """Refuse a value that is not an integer of at least `minimum`.

    Parameters
    ----------
    name : str
        The argument's name.
    value : object
        The argument, as the user gave it.
    minimum : int
        The smallest value allowed.
    optional : bool, default=False
        Whether None is allowed, too.
    reason : str, optional
        Why smaller values make no sense; ends the message.

    Raises
    ------
    ValueError
        If the value is not such an integer.

    Examples
    --------
    >>> check_integer("n_draws", 1, minimum=2, reason="one draw has no standard error")
    Traceback (most recent call last):
    ...
    ValueError: n_draws must be an integer of at least 2, got 1: one draw has no standard error.
    """
    if (optional and value is None) or (is_integer(value) and value >= minimum):
        return
    least = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
    ending = f": {reason}." if reason else "."
    raise ValueError(f"{name} must be {least}{' or None' * optional}, got {value!r}{ending}")


def check_number(
    name: str, value: Any, *, positive: bool = True, optional: bool = False, reason: str = ""
) -> None:
    """Refuse a value that is not a finite positive number.

    Parameters
    ----------
    name : str
        The argument's name.
    value : object
        The argument, as the user gave it.
    positive : bool, default=True
        Whether 0 is refused, too.
    optional : bool, default=False
        Whether None is allowed, too.
    reason : str, optional
        Why other values make no sense; ends the message.

    Raises
    ------
    ValueError
        If the value is not such a number.

    Examples
    --------
    >>> check_number("weight_decay", -0.1, positive=False)
    Traceback (most recent call last):
    ...
    ValueError: weight_decay must be a finite number of at least 0, got -0.1.
    """
    if optional and value is None:
        return
    if is_number(value) and math.isfinite(value) and (value > 0 if positive else value >= 0):
        return
    kind = "a finite positive number" if positive else "a finite number of at least 0"
    ending = f": {reason}." if reason else "."
    raise ValueError(f"{name} must be {kind}{' or None' * optional}, got {value!r}{ending}")


def check_device(device: Any) -> None:
    """Refuse a device that torch cannot compute on.

    Parameters
    ----------
    device : str, int, torch.device or None
        The argument, as the user gave it. None passes.

    Raises
    ------
    ValueError
        If torch was built without this kind of device, there is no such device, or it is "meta",
        which holds no values.

    Examples
    --------
    >>> check_device("moon")
    Traceback (most recent call last):
    ...
    ValueError: device='moon' is no device of torch, such as 'cpu' or 'cuda'.
    """
    if device is None:
        return
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"device={device!r} is no device of torch, such as 'cpu' or 'cuda'."
        ) from None
    if found.type == "meta":
        raise ValueError("device='meta' holds no values to compute with. Pass 'cpu' or 'cuda'.")
    try:
        torch.empty(0, device=found)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ValueError(
            f"device={device!r} cannot be used here: {reason}. Pass "
            "device='cpu', or install a torch that supports the device."
        ) from error
