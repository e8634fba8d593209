"""Checks of scalar arguments and devices."""

from functools import partial

import numpy as np
import pytest
import torch

from relflat_sk._checks import (
    check_device,
    check_integer,
    check_number,
    did_you_mean,
)

POSITIVE = partial(check_integer, "n", minimum=1, reason="why")
OPTIONAL = partial(check_number, "t", optional=True)


def test_numbers_of_numpy_and_none_are_allowed_where_said():
    for value in (1, np.int64(3), np.uint8(1)):
        POSITIVE(value)
    for value in (1, 0.5, np.float32(2), np.int64(1), None):
        OPTIONAL(value)
    check_integer("n", None, minimum=2, optional=True)
    check_number("t", 0, positive=False)
    for device in (None, "cpu", torch.device("cpu")):
        check_device(device)


@pytest.mark.parametrize(
    ("check", "values", "message"),
    [
        (POSITIVE, [0, 1.0, True, "1", None], "n must be a positive integer, got .*: why"),
        (
            OPTIONAL,
            [0, -1.0, float("nan"), float("inf"), "1", False],
            "t must be a finite positive number or None, got",
        ),
        (check_device, ["moon", 1.5, [], "cuda:x"], "is no device of torch"),
        (check_device, ["meta"], "device='meta' holds no values"),
    ],
    ids=["integer", "number", "device", "meta"],
)
def test_refuses(check, values, message):
    for value in values:
        with pytest.raises(ValueError, match=message):
            check(value)


def test_refuses_a_device_that_is_not_there(monkeypatch):
    def empty(*args, **kwargs):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(
        ValueError, match="device='cuda' cannot be used here: Torch not compiled .* device='cpu'"
    ):
        check_device("cuda")


def test_names_are_found_by_their_last_part_or_their_spelling():
    known = ["net__lr", "batch_size"]
    assert did_you_mean("pipe__lr", known) == " Did you mean 'net__lr'?"
    assert did_you_mean("batchsize", known) == " Did you mean 'batch_size'?"
    assert did_you_mean("momentum", known) == ""
