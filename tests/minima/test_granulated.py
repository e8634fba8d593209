"""Tests for `_granulated`, against the definition of Jiang et al. by loops."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from relflat_sk import granulated_kendall
from relflat_sk.minima._correlation import resample
from relflat_sk.minima._hyperparameters import _Granules, resample_cells
from tests.minima.sweeps import AXES, arrays_of, make_minima, rows_of

ROUNDING = {"rtol": 1e-12, "atol": 1e-12}


def tau(pairs):
    """Equation of section 2.2.1: the mean product of signs, over pairs."""
    products = [np.sign(a[0] - b[0]) * np.sign(a[1] - b[1]) for a, b in pairs]
    return sum(products) / len(products)


def psi_along(rows, axis):
    """Section 2.2.2: tau of the minima that share all other values, averaged over these."""
    others = {tuple(v for k, v in enumerate(row[0]) if k != axis) for row in rows}
    taus = []
    for other in others:
        group = [r for r in rows if tuple(v for k, v in enumerate(r[0]) if k != axis) == other]
        pairs = [
            ((a[1], a[2]), (b[1], b[2]))
            for a, b in combinations(group, 2)
            if a[0][axis] != b[0][axis]
        ]
        if pairs:
            taus.append(tau(pairs))
    return sum(taus) / len(taus) if taus else np.nan


def by_definition(minima):
    rows = rows_of(minima)
    along = [psi_along(rows, k) for k in range(len(rows[0][0]))]
    return [np.nanmean(along), *along]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("left_out", [[], [0, 3, 4, 9, 11]], ids=["all", "incomplete"])
@pytest.mark.parametrize("repeats", [1, 3])
def test_agrees_with_the_definition(repeats, ties, left_out):
    minima = make_minima(repeats=repeats, ties=ties).drop(index=left_out)
    row = granulated_kendall(minima, n_bootstrap=1, random_state=0).iloc[0]
    found = row[["psi", *(f"psi_{name}" for name in AXES)]].tolist()
    np.testing.assert_allclose(found, by_definition(minima), **ROUNDING)


def test_resamples_agree_with_repeating_the_minima():
    minima = make_minima()
    levels, x, y = arrays_of(minima)
    counts = resample(len(minima), 10, seed=1)
    repeated = [by_definition(minima.loc[np.repeat(minima.index, c.astype(int))]) for c in counts]
    np.testing.assert_allclose(_Granules.of(levels).psi(x, y, counts), repeated, **ROUNDING)


def test_resamples_stay_within_cells_that_have_repeats():
    levels = np.array([[0, 0], [0, 1], [0, 0], [0, 1], [0, 1]])
    counts = resample_cells(levels, 200, seed=0)
    assert (counts[:, [0, 2]].sum(axis=1) == 2).all()
    assert (counts[:, [1, 3, 4]].sum(axis=1) == 3).all()
    assert counts.std(axis=0).min() > 0.3
    assert abs(np.corrcoef(counts[:, 0], counts[:, 1])[0, 1]) < 0.3  # cells are independent
    # a cell with one minimum could not vary, so all minima are resampled together
    counts = resample_cells(levels[[0, 1, 3, 4]], 200, seed=0)
    assert (counts.sum(axis=1) == 4).all()
    assert counts.std(axis=0).min() > 0.3


def test_minima_need_to_differ_in_one_axis_alone():
    minima = make_minima().assign(param_lr=range(24), param_batch_size=range(24))
    with pytest.raises(ValueError, match=r"No two of the 24 minima differ in one of \['param_batc"):
        granulated_kendall(minima)


def test_an_axis_without_pairs_of_its_own_is_left_out_of_the_mean():
    minima = make_minima()
    minima["param_width"] = minima["param_batch_size"] * minima["param_lr"]
    axes = ["batch_size", "width", "activation"]  # the width is a function of the batch size
    row = granulated_kendall(minima, axes, random_state=0).iloc[0]
    assert np.isnan(row[["psi_batch_size", "psi_batch_size_low"]].tolist()).all()
    expected = np.mean(row[["psi_width", "psi_activation"]].tolist())
    np.testing.assert_allclose(row["psi"], expected)


def test_axes_may_have_any_type_and_a_column_added_by_hand_is_then_no_measure():
    minima = make_minima()
    shapes = {8: [16], 32: None, 128: [16, 16]}
    minima["param_batch_size"] = pd.Series([shapes[b] for b in minima["param_batch_size"]])
    expected = granulated_kendall(make_minima(), random_state=0)
    assert_frame_equal(granulated_kendall(minima, random_state=0), expected)
    minima = make_minima().rename(columns={"param_batch_size": "width"})
    table = granulated_kendall(minima, ["width", "lr", "activation"], random_state=0)
    assert table["measure"].tolist() == ["relative_flatness"]
    assert table["psi_width"].item() == expected["psi_batch_size"].item()
