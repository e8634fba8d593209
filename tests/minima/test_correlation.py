"""Tests for `_correlation`."""

from math import sqrt

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from scipy import stats

from relflat_sk.minima._correlation import _COEFFICIENTS, correlate_measures, resample
from tests.minima.sweeps import arrays_of, make_minima

ROUNDING = {"rtol": 1e-9, "atol": 1e-12}  # float64, sums of a few dozen terms

SCIPY = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("name", SCIPY)
def test_coefficients_are_those_of_scipy(name, ties):
    minima = make_minima(ties=ties)
    _, x, y = arrays_of(minima)
    value = correlate_measures(minima, n_bootstrap=1, random_state=0)[name].item()
    np.testing.assert_allclose(value, SCIPY[name](x, y)[0], **ROUNDING)


@pytest.mark.filterwarnings("ignore:An input array is constant")
@pytest.mark.parametrize("n", [6, 24], ids=["constant resamples", "all"])
@pytest.mark.parametrize("name", SCIPY)
def test_resamples_agree_with_repeating_the_minima(name, n):
    _, x, y = arrays_of(make_minima(ties=True))
    x, y = (x, y) if n == 24 else (np.repeat([0.1, 0.7], [4, 2]), y[:6])
    counts = resample(n, 50, seed=1)
    expected = [
        SCIPY[name](np.repeat(x, row.astype(int)), np.repeat(y, row.astype(int)))[0]
        for row in counts
    ]
    assert np.isnan(expected).any() == (n == 6)
    np.testing.assert_allclose(_COEFFICIENTS[name](x, y, counts), expected, **ROUNDING)


def test_intervals_cover_the_truth_as_often_as_they_say():
    # bivariate normal with r = 1/sqrt(2): tau is then 2/pi * arcsin(r) = 1/2 exactly
    tables = [
        correlate_measures(make_minima(seed, repeats=4), n_bootstrap=100, random_state=seed)
        for seed in range(200)
    ]
    rows = pd.concat(tables)
    for name, truth in [("pearson", sqrt(0.5)), ("kendall", 0.5)]:
        covered = (rows[f"{name}_low"] <= truth) & (truth <= rows[f"{name}_high"])
        # percentile intervals of 48 points cover somewhat less than 95% (0.015 = one
        # standard error); the seeds are fixed, so this does not change from run to run
        assert 0.88 <= covered.mean() <= 0.99


def test_constant_resamples_are_left_out_of_the_interval():
    # with 3 minima, one resample in nine draws the same minimum three times
    minima = pd.DataFrame({"rho": [1.0, 2.0, 3.0], "generalization_gap": [1.0, 2.0, 3.0]})
    row = correlate_measures(minima, random_state=0).iloc[0]
    np.testing.assert_allclose(row["pearson_low":"kendall_high"].tolist(), 1.0)


def test_values_of_any_size_are_correlated():
    minima = make_minima()
    huge = minima.assign(relative_flatness=minima["relative_flatness"] * 1e300)
    tiny = minima.assign(relative_flatness=minima["relative_flatness"] * 1e-300)
    expected = correlate_measures(minima, random_state=0)
    assert_frame_equal(correlate_measures(huge, random_state=0), expected)
    assert_frame_equal(correlate_measures(tiny, random_state=0), expected)


# -- groups ---------------------------------------------------------------------------------------


def simpson():
    """Within each method the gap rises with flatness; the flatter method has the larger gap."""
    rng = np.random.default_rng(0)
    flatness = rng.normal(size=40)
    method = np.repeat(["sgd", "sam"], [25, 15])
    gap = flatness + 0.3 * rng.normal(size=40) - 10 * (method == "sgd")
    columns = {"method": method, "relative_flatness": flatness + 10 * (method == "sgd")}
    return pd.DataFrame({**columns, "generalization_gap": gap, "param_seed": np.arange(40) % 4})


def test_coefficients_within_groups_and_pooled():
    minima = simpson()
    table = correlate_measures(minima, strata="method", n_bootstrap=200, random_state=0)
    assert table["stratum"].tolist() == ["pooled", "within", "sgd", "sam"]
    rows = table.set_index("stratum")
    assert rows["n"].tolist() == [40, 40, 25, 15]
    assert (rows["n_left_out"] == 0).all()
    expected = {"pooled": correlate_measures(minima, n_bootstrap=200, random_state=0)}
    for name, part in minima.groupby("method"):
        expected[name] = correlate_measures(part, n_bootstrap=200, random_state=0)
    for name, alone in expected.items():
        columns = [column for column in alone if column not in {"measure", "n", "n_left_out"}]
        assert rows.loc[name, columns].tolist() == pytest.approx(alone.loc[0, columns].tolist())
    for name in ("pearson", "spearman", "kendall"):
        assert rows.loc["pooled", name] < 0 < rows.loc["within", f"{name}_low"]
        mean = (25 * rows.loc["sgd", name] + 15 * rows.loc["sam", name]) / 40
        assert rows.loc["within", name] == pytest.approx(mean)


def test_groups_are_resampled_independently():
    rng = np.random.default_rng(0)
    x, n_groups, n = rng.normal(size=(16, 12)), 16, 12
    y = x + rng.normal(size=x.shape)
    columns = {"relative_flatness": x.ravel(), "generalization_gap": y.ravel()}
    minima = pd.DataFrame({"group": np.repeat(np.arange(n_groups), n), **columns})
    table = correlate_measures(minima, strata="group", random_state=0)
    assert table["measure"].unique().tolist() == ["relative_flatness"]  # not the number of a group
    draws = rng.integers(n, size=(1000, n_groups, n))
    a, b = (np.take_along_axis(np.tile(one, (1000, 1, 1)), draws, axis=2) for one in (x, y))
    a, b = (one - one.mean(axis=2, keepdims=True) for one in (a, b))
    r = (a * b).sum(axis=2) / np.sqrt((a * a).sum(axis=2) * (b * b).sum(axis=2))
    expected = np.quantile(r.mean(axis=1), [0.025, 0.975])
    found = table.set_index("stratum").loc["within", ["pearson_low", "pearson_high"]]
    assert found.tolist() == pytest.approx(expected.tolist(), abs=0.03)
    shuffled = minima.sample(frac=1, random_state=0)
    again = correlate_measures(shuffled, strata="group", random_state=0).set_index("stratum")
    assert again.loc["within", "pearson_low"] == pytest.approx(found["pearson_low"])


def test_groups_without_a_coefficient_do_not_count_within():
    minima = simpson()
    minima.loc[0, "method"] = None  # one minimum, without the parameter
    minima.loc[minima["method"] == "sam", "relative_flatness"] = 1.0  # constant
    minima["train_loss"] = np.nan
    table = correlate_measures(minima, strata=["method"], n_bootstrap=10, random_state=0)
    rows = table[table["measure"] == "relative_flatness"].set_index("stratum")
    assert rows.loc["within", "n"] == rows.loc["sgd", "n"] == 24
    assert rows.loc["within", "kendall"] == pytest.approx(rows.loc["sgd", "kendall"])
    assert rows.loc[[str(minima.loc[0, "method"]), "sam"], "kendall"].isna().all()
    unknown = table[table["measure"] == "train_loss"].set_index("stratum")
    assert unknown.loc["within", "n"] == 0
    assert unknown["kendall"].isna().all()
    for strata, match in (
        ("optimizer", "strata: 'optimizer' is no parameter"),
        (3, "strata: '3' is no parameter"),
        ([], "strata is empty"),
    ):
        with pytest.raises(ValueError, match=match):
            correlate_measures(minima, strata=strata)
