"""Computations that must not lose digits, overflow, or divide by zero."""

import numpy as np
import pytest
import torch

from relflat_sk import _numerics as numerics


def test_squares_of_columns_are_summed_in_float64(monkeypatch):
    monkeypatch.setattr(numerics, "_TOGETHER", 10)
    matrix = torch.randn(23, 3)
    expected = matrix.double().square().sum(dim=0)
    torch.testing.assert_close(numerics.column_squares(matrix), expected)


def test_a_root_has_no_slope_at_zero_and_a_divisor_of_zero_is_one():
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    (slope,) = torch.autograd.grad(numerics.safe_root(x).sum(), x)
    assert slope.tolist() == [0.0, 0.25]
    assert numerics.or_one(torch.tensor([0.0, 4.0])).tolist() == [1.0, 4.0]


def test_features_that_only_round_do_not_vary():
    low, high = torch.tensor([0.1, 0.1, 0.0]), torch.tensor([0.1 + 1e-8, 0.2, 0.0])
    varies = numerics.varies(low, high, torch.finfo().eps)
    assert varies.tolist() == [False, True, False]
    assert numerics.inverse_spread(torch.tensor([0.0, 2.0])).tolist() == [0.0, 0.5]


@pytest.mark.parametrize("dtype", [">f4", "g"])
def test_arrays_get_types_that_torch_knows(dtype):
    array = np.arange(3, dtype=dtype)
    assert torch.from_numpy(numerics.native(array)).tolist() == [0, 1, 2]


def test_half_precision_is_widened_and_mixed_precision_left():
    half, double = torch.ones(2, dtype=torch.bfloat16), torch.ones(2).double()
    assert numerics.full_precision(half).dtype == torch.float32
    assert numerics.full_precision(double) is double
    product = half.float()[None] @ half.float()
    with torch.autocast("cpu"), numerics.without_autocast(product):
        assert (half.float()[None] @ half.float()).dtype == torch.float32
    with numerics.without_autocast(product):
        assert not torch.is_autocast_enabled("cpu")


def test_numbers_are_read_and_constants_kept():
    assert numerics.read_numbers(torch.tensor(1), torch.tensor(0.5)) == [1, 0.5]
    assert numerics.constant(2.0, torch.ones(1)) is numerics.constant(2.0, torch.zeros(3))
