"""Check arguments, and what is on a device, in the same way in all modules."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "check_device",
    "check_integer",
    "check_number",
    "did_you_mean",
    "gather_checks",
    "gathers",
    "is_integer",
    "is_number",
    "judge",
]


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


# -- values on an accelerator, without a wait of the host for each batch --------------------

Judge = Callable[..., None]  # called with numbers; raises if there is something wrong with them

_gathered: ContextVar[list[tuple[Judge, list[Tensor]]] | None] = ContextVar(
    "gathered", default=None
)


def gathers(tensor: Tensor) -> bool:
    """Return whether checks of a tensor are made at the end of a `gather_checks`.

    Parameters
    ----------
    tensor : Tensor of any shape
        What is to be checked.

    Returns
    -------
    bool
        False on the CPU, where reading a number costs nothing.
    """
    return tensor.device.type != "cpu" and _gathered.get() is not None


def judge(raise_if_wrong: Judge, *numbers: Tensor) -> None:
    """Call a function with numbers, at once or at the end of a `gather_checks`.

    Parameters
    ----------
    raise_if_wrong : callable
        Called with a float for each of the numbers.
    *numbers : Tensor of shape ()
        On one device.
    """
    check = raise_if_wrong, [number.detach() for number in numbers]
    pending = _gathered.get()
    if pending is not None and gathers(numbers[0]):
        pending.append(check)
    else:
        _settle([check])


@contextmanager
def gather_checks() -> Iterator[None]:
    """Read the numbers of all checks within the context at its end, for which the host waits once.

    Errors of the checks come before others, which a wrong value may have caused. In nested
    contexts, the outermost one reads.

    Yields
    ------
    None

    Examples
    --------
    >>> def refuse_negative(number):
    ...     if number < 0:
    ...         raise ValueError(f"got {number}")
    >>> with gather_checks():
    ...     judge(refuse_negative, torch.tensor(1.0))
    """
    if _gathered.get() is not None:
        yield
        return
    pending: list[tuple[Judge, list[Tensor]]] = []
    token = _gathered.set(pending)
    try:
        yield
    finally:
        _gathered.reset(token)
        _settle(pending)


def _settle(pending: list[tuple[Judge, list[Tensor]]]) -> None:
    """Make the gathered checks, in their order."""
    if not pending:
        return
    device = pending[0][1][0].device
    numbers = [number.to(device, torch.float64) for _, some in pending for number in some]
    found = iter(torch.stack(numbers).cpu().tolist())
    for raise_if_wrong, some in pending:
        raise_if_wrong(*(next(found) for _ in some))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ask which of some names a wrong name stands for.

    Parameters
    ----------
    name : str
        The wrong name. Its last parts, between ``__``, may be those of right names.
    known : iterable of str
        The right names.

    Returns
    -------
    str
        A space and a question with at most three names, the most similar first; empty if no name
        is similar.

    Examples
    --------
    >>> did_you_mean("relative_flatnes", ["margin", "relative_flatness"])
    " Did you mean 'relative_flatness'?"
    """
    known = sorted(known)
    endings = [name.split("__", i)[-1] for i in range(name.count("__") + 1)]
    same = [other for ending in endings for other in known if other.endswith(f"__{ending}")]
    found = dict.fromkeys([*same, *difflib.get_close_matches(name, known)])
    names = " or ".join(map(repr, list(found)[:3]))
    return f" Did you mean {names}?" if names else ""
