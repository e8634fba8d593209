"""Checks of scalar arguments and devices."""

import numpy as np
import pytest
import torch

from relflat_sk._checks import check_device, check_integer, check_number


@pytest.mark.parametrize("value", [1, np.int64(3), np.uint8(1)])
def test_integers_of_numpy_are_integers(value):
    check_integer("n", value, minimum=1)


@pytest.mark.parametrize("value", [0, 1.0, True, "1", None])
def test_refuses_what_is_no_positive_integer(value):
    with pytest.raises(ValueError, match="n must be a positive integer, got .*: why"):
        check_integer("n", value, minimum=1, reason="why")


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2), np.int64(1)])
def test_numbers_of_numpy_are_numbers(value):
    check_number("t", value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "1", False])
def test_refuses_what_is_no_positive_number(value):
    with pytest.raises(ValueError, match="t must be a finite positive number or None, got"):
        check_number("t", value, optional=True)


def test_none_and_zero_are_allowed_where_said():
    check_integer("n", None, minimum=2, optional=True)
    check_number("t", None, optional=True)
    check_number("t", 0, positive=False)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_devices(device):
    check_device(device)


@pytest.mark.parametrize("device", ["moon", 1.5, [], "cuda:x"])
def test_refuses_what_is_no_device(device):
    with pytest.raises(ValueError, match="is no device of torch"):
        check_device(device)


def test_refuses_the_device_without_values():
    with pytest.raises(ValueError, match="device='meta' holds no values"):
        check_device("meta")


def test_refuses_a_device_that_is_not_there(monkeypatch):
    def empty(*args, **kwargs):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(
        ValueError, match="device='cuda' cannot be used here: Torch not compiled .* device='cpu'"
    ):
        check_device("cuda")
