"""Tests for `_mutual_information`, against the definition of Jiang et al. by loops."""

from collections import Counter
from itertools import combinations, permutations
from math import log

import numpy as np
import pandas as pd
import pytest

from relflat_sk import conditional_mutual_information
from relflat_sk.minima._correlation import resample
from relflat_sk.minima._hyperparameters import _Pairs
from tests.minima.sweeps import AXES, arrays_of, make_minima, rows_of

SETS = [chosen for size in range(3) for chosen in combinations(range(3), size)]
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}


def share(rows, chosen, counts=None):
    """Section 2.2.3: I(V_mu; V_g | U_S) / H(V_g | U_S) over all ordered pairs of minima.

    Further numbers of a minimum are those of measures that are given.

    In a resample, a pair counts as often as it is drawn; copies of one minimum are no pair.
    """
    counts = np.ones(len(rows)) if counts is None else counts
    joint, measure, gap, cell = Counter(), Counter(), Counter(), Counter()
    for (a, n), (b, m) in permutations(zip(rows, counts, strict=True), 2):
        u = tuple((a[0][k], b[0][k]) for k in chosen)
        u += tuple(np.sign(one - other) for one, other in zip(a[3:], b[3:], strict=True))
        signs = np.sign(a[1] - b[1]), np.sign(a[2] - b[2])
        joint[u, *signs] += n * m
        measure[u, signs[0]] += n * m
        gap[u, signs[1]] += n * m
        cell[u] += n * m
    total = sum(cell.values())
    # chain rule: I(M; G | U) = H(M | U) + H(G | U) - H(M, G | U)
    joint, measure, gap = (
        -sum(n / total * log(n / cell[key[0]]) for key, n in counter.items() if n)
        for counter in (joint, measure, gap)
    )
    return (measure + gap - joint) / gap if gap > 1e-12 else np.nan


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("known", [[], ["train_loss"], ["train_loss", "confidence"]])
def test_agrees_with_the_definition(known, repeats, ties):
    minima = make_minima(repeats=repeats, ties=ties)
    rng = np.random.default_rng(1)
    for name in known:
        values = minima["generalization_gap"] + rng.normal(size=len(minima))
        minima[name] = values.round() if ties else values
    table = conditional_mutual_information(minima, given=known, n_bootstrap=1, random_state=0)
    assert not set(known) & set(table["measure"])
    row = table.set_index("measure").loc["relative_flatness"]
    rows = [(*a, *b) for a, b in zip(rows_of(minima), minima[known].to_numpy(), strict=True)]
    expected = [share(rows, chosen) for chosen in SETS]
    at = int(np.nanargmin(expected))
    np.testing.assert_allclose(row["cmi"], expected[at], **ROUNDING)
    assert row["given"] == (*(list(AXES)[k] for k in SETS[at]), *known)
    for size in range(3):
        of_size = [e for e, chosen in zip(expected, SETS, strict=True) if len(chosen) == size]
        if np.isfinite(of_size).any():
            np.testing.assert_allclose(row[f"cmi_given_{size}"], np.nanmin(of_size), **ROUNDING)


def test_a_copy_of_what_is_given_tells_nothing():
    minima = make_minima().assign(train_loss=lambda table: 3 * table["relative_flatness"])
    minima.loc[0, "train_loss"] = np.nan
    alone = conditional_mutual_information(minima, n_bootstrap=1, random_state=0)
    assert alone.set_index("measure").loc["relative_flatness", "cmi_given_0"] > 0.05
    row = conditional_mutual_information(
        minima, given="train_loss", n_bootstrap=20, random_state=0
    ).iloc[0]
    assert (row["cmi"], row["cmi_high"], row["n"]) == (0, 0, len(minima) - 1)
    with pytest.raises(ValueError, match="'loss'"):
        conditional_mutual_information(minima, given=["loss"])


def test_resamples_agree_with_the_definition():
    minima = make_minima(repeats=1)
    levels, x, y = arrays_of(minima)
    counts = resample(len(x), 5, seed=1)
    found = _Pairs.of(levels, SETS, y).shares(x, counts)
    for each, row in zip(counts, found, strict=True):
        expected = [share(rows_of(minima), chosen, each) for chosen in SETS]
        np.testing.assert_allclose(row, expected, **ROUNDING)


def test_a_copy_of_the_gap_has_one_and_a_copy_of_a_hyper_parameter_zero():
    minima = make_minima(repeats=3)
    size = minima["param_batch_size"].astype(float)
    # the gap depends on the batch size, so the measure is informative without conditions
    gap = minima["generalization_gap"] + np.log(size)
    columns = {"oracle": 2 * gap, "opposite": -gap, "batch": size, "constant": 1.0}
    minima = minima.assign(generalization_gap=gap, **columns)
    table = conditional_mutual_information(minima, n_bootstrap=1, random_state=0)
    table = table.set_index("measure")
    np.testing.assert_allclose(table.loc[["oracle", "opposite"], "cmi"], 1.0)
    np.testing.assert_allclose(table.loc[["batch", "constant"], "cmi"], 0.0, atol=1e-12)
    assert table.loc["batch", "cmi_given_0"] > 0.05
    assert "batch_size" in table.loc["batch", "given"]


def test_a_shuffled_measure_reaches_about_the_level_of_chance():
    shuffled = [make_minima(seed) for seed in range(30)]
    for seed, minima in enumerate(shuffled):
        minima["relative_flatness"] = np.random.default_rng(seed).permutation(
            minima["relative_flatness"]
        )
    rows = pd.concat([
        conditional_mutual_information(m, n_bootstrap=1, random_state=0) for m in shuffled
    ])
    assert 0 < rows["chance"].mean() < 0.2
    np.testing.assert_allclose(rows["cmi"].mean(), rows["chance"].mean(), rtol=0.3)


def test_sets_that_leave_no_uncertainty_are_nan():
    # one minimum per cell of two axes: given both, no uncertainty is left
    minima = pd.DataFrame({
        "param_a": [0, 0, 1, 1],
        "param_b": [0, 1, 0, 1],
        "relative_flatness": [1.0, 2.0, 4.0, 3.0],
        "generalization_gap": [0.1, 0.2, 0.3, 0.4],
    })
    row = conditional_mutual_information(minima, n_bootstrap=20, random_state=0).iloc[0]
    assert np.isnan(row["cmi_given_2"])
    assert row["cmi"] == min(row["cmi_given_0"], row["cmi_given_1"])
    constant = minima.assign(generalization_gap=0.1)
    row = conditional_mutual_information(constant, n_bootstrap=20, random_state=0).iloc[0]
    assert np.isnan([row[name] for name in ("cmi", "cmi_low", "cmi_high", "chance")]).all()


def test_one_axis_has_sets_of_sizes_zero_and_one():
    table = conditional_mutual_information(make_minima(), "lr", n_bootstrap=5, random_state=0)
    assert [name for name in table if name.startswith("cmi_g")] == ["cmi_given_0", "cmi_given_1"]
