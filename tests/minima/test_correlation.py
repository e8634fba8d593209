"""Tests for `_correlation`."""

from itertools import combinations
from math import sqrt

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal
from scipy import stats

from relflat_sk.minima._correlation import _COEFFICIENTS, correlate_measures, resample

COEFFICIENTS = ["pearson", "spearman", "kendall"]
ROUNDING = {"rtol": 1e-9, "atol": 1e-12}  # float64, sums of a few dozen terms


def make_minima(n=20, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    flatness, noise = rng.normal(size=(2, n))
    gap = flatness + noise
    if ties:
        flatness, gap = flatness.round(), gap.round()
    return pd.DataFrame({"relative_flatness": flatness, "generalization_gap": gap})


def pearson(x, y):
    """Covariance over the two standard deviations, term by term."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    variance_x = sum((a - mean_x) ** 2 for a in x)
    variance_y = sum((b - mean_y) ** 2 for b in y)
    return covariance / sqrt(variance_x * variance_y)


def spearman(x, y):
    """Pearson's r of mean ranks, each counted by comparing with every other value."""

    def ranks(values):
        return [sum(v < a for v in values) + (sum(v == a for v in values) + 1) / 2 for a in values]

    return pearson(ranks(x), ranks(y))


def kendall(x, y):
    """Tau-b, pair by pair (Kendall 1945)."""
    concordant = discordant = only_x = only_y = 0
    for i, j in combinations(range(len(x)), 2):
        a, b = x[i] - x[j], y[i] - y[j]
        concordant += a * b > 0
        discordant += a * b < 0
        only_x += b == 0 and a != 0
        only_y += a == 0 and b != 0
    untied = concordant + discordant
    return (concordant - discordant) / sqrt((untied + only_x) * (untied + only_y))


ORACLES = {"pearson": pearson, "spearman": spearman, "kendall": kendall}
SCIPY = {
    "pearson": stats.pearsonr,
    "spearman": stats.spearmanr,
    "kendall": stats.kendalltau,
}


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_coefficients_agree_with_their_definitions(name, ties):
    minima = make_minima(ties=ties)
    x, y = minima["relative_flatness"].tolist(), minima["generalization_gap"].tolist()
    value = correlate_measures(minima, n_bootstrap=1, random_state=0)[name].item()
    np.testing.assert_allclose(value, ORACLES[name](x, y), **ROUNDING)
    np.testing.assert_allclose(value, SCIPY[name](x, y)[0], **ROUNDING)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_resamples_agree_with_repeating_the_minima(name):
    minima = make_minima(ties=True)
    x, y = minima["relative_flatness"].to_numpy(), minima["generalization_gap"].to_numpy()
    counts = resample(len(x), 25, seed=1)
    expected = [
        SCIPY[name](np.repeat(x, row.astype(int)), np.repeat(y, row.astype(int)))[0]
        for row in counts
    ]
    np.testing.assert_allclose(_COEFFICIENTS[name](x, y, counts), expected, **ROUNDING)


def test_intervals_cover_the_truth_as_often_as_they_say():
    # bivariate normal with r = 1/sqrt(2): tau is then 2/pi * arcsin(r) = 1/2 exactly
    tables = [
        correlate_measures(make_minima(40, seed), n_bootstrap=300, random_state=seed)
        for seed in range(200)
    ]
    rows = pd.concat(tables)
    for name, truth in [("pearson", sqrt(0.5)), ("kendall", 0.5)]:
        covered = (rows[f"{name}_low"] <= truth) & (truth <= rows[f"{name}_high"])
        # percentile intervals of 40 points cover somewhat less than 95% (0.015 = one
        # standard error); the seeds are fixed, so this does not change from run to run
        assert 0.88 <= covered.mean() <= 0.99


@settings(max_examples=50, deadline=None)
@given(
    # integers: no two values closer than rounding, so that the maps below keep them apart
    st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=3, max_size=12),
    st.sampled_from([np.cbrt, np.arctan, lambda x: np.exp(x / 10), lambda x: x**3 + x]),
)
def test_rank_correlations_survive_monotone_maps(pairs, monotone):
    x, y = np.array(pairs, dtype=float).T
    plain = correlate_measures(
        pd.DataFrame({"rho": x, "generalization_gap": y}), n_bootstrap=20, random_state=0
    )
    mapped = correlate_measures(
        pd.DataFrame({"rho": monotone(x), "generalization_gap": -monotone(-y)}),
        n_bootstrap=20,
        random_state=0,
    )
    columns = [name for name in plain if name.startswith(("spearman", "kendall"))]
    assert_frame_equal(plain[columns], mapped[columns], rtol=1e-9)


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


def test_groups_without_a_coefficient_do_not_count_within():
    minima = simpson()
    minima.loc[0, "method"] = "other"  # one minimum
    minima.loc[minima["method"] == "sam", "relative_flatness"] = 1.0  # constant
    minima["train_loss"] = np.nan
    table = correlate_measures(minima, strata=["method"], n_bootstrap=10, random_state=0)
    rows = table[table["measure"] == "relative_flatness"].set_index("stratum")
    assert rows.loc["within", "n"] == rows.loc["sgd", "n"] == 24
    assert rows.loc["within", "kendall"] == pytest.approx(rows.loc["sgd", "kendall"])
    assert rows.loc[["other", "sam"], "kendall"].isna().all()
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
