"""Tests for `_mutual_information`, against the definition of Jiang et al. by loops."""

from collections import Counter
from itertools import combinations, permutations, product
from math import log

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from relflat_sk import conditional_mutual_information
from relflat_sk.minima._mutual_information import _least, _Pairs
from relflat_sk.minima._resampling import resample

AXES = {"batch_size": [8, 32, 128], "lr": [0.1, 0.2], "activation": ["relu", "tanh"]}
SETS = [chosen for size in range(3) for chosen in combinations(range(3), size)]
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}


def make_minima(seed=0, repeats=2, ties=False):
    rng = np.random.default_rng(seed)
    cells = [cell for cell in product(*AXES.values()) for _ in range(repeats)]
    minima = pd.DataFrame(cells, columns=[f"param_{name}" for name in AXES])
    flatness, noise = rng.normal(size=(2, len(minima)))
    gap = flatness + noise
    minima["relative_flatness"] = flatness.round() if ties else flatness
    minima["generalization_gap"] = gap.round() if ties else gap
    return minima


def share(rows, chosen):
    """Section 2.2.3: I(V_mu; V_g | U_S) / H(V_g | U_S) over all ordered pairs of minima."""
    seen = Counter()
    for a, b in permutations(rows, 2):
        u = tuple((a[0][k], b[0][k]) for k in chosen)
        seen[u, np.sign(a[1] - b[1]), np.sign(a[2] - b[2])] += 1
    total = sum(seen.values())
    information = entropy = 0.0
    for u in {key[0] for key in seen}:
        here = {key[1:]: n for key, n in seen.items() if key[0] == u}
        p_u = sum(here.values()) / total
        p = {key: n / sum(here.values()) for key, n in here.items()}
        p_mu, p_g = (
            {v: sum(q for key, q in p.items() if key[k] == v) for v in (-1, 0, 1)} for k in (0, 1)
        )
        information += p_u * sum(q * log(q / (p_mu[v] * p_g[w])) for (v, w), q in p.items())
        entropy -= p_u * sum(q * log(q) for q in p_g.values() if q > 0)
    return information / entropy if entropy > 1e-12 else np.nan


def rows_of(minima):
    axes = [name for name in minima if name.startswith("param_")]
    return [
        (tuple(row[axis] for axis in axes), row["relative_flatness"], row["generalization_gap"])
        for _, row in minima.iterrows()
    ]


def arrays_of(minima):
    levels = np.stack([pd.factorize(minima[f"param_{name}"])[0] for name in AXES], axis=1)
    return levels, minima["relative_flatness"].to_numpy(), minima["generalization_gap"].to_numpy()


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("repeats", [1, 3])
def test_agrees_with_the_definition(repeats, ties):
    minima = make_minima(repeats=repeats, ties=ties)
    row = conditional_mutual_information(minima, n_bootstrap=1, random_state=0).iloc[0]
    expected = [share(rows_of(minima), chosen) for chosen in SETS]
    at = int(np.nanargmin(expected))
    np.testing.assert_allclose(row["cmi"], expected[at], **ROUNDING)
    assert row["given"] == tuple(list(AXES)[k] for k in SETS[at])
    for size in range(3):
        of_size = [e for e, chosen in zip(expected, SETS, strict=True) if len(chosen) == size]
        np.testing.assert_allclose(row[f"cmi_given_{size}"], np.nanmin(of_size), **ROUNDING)


def test_resamples_agree_with_the_definition_without_pairs_of_copies():
    minima = make_minima(repeats=1)
    levels, x, y = arrays_of(minima)
    counts = resample(len(x), 5, seed=1)
    found = _Pairs.of(levels, SETS, y).shares(x, counts)
    for each, row in zip(counts, found, strict=True):
        rows = [rows_of(minima)[i] for i in np.repeat(range(len(x)), each.astype(int))]
        # equal values mean copies of one minimum, as the minima have no ties
        expected = [share_without_copies(rows, chosen) for chosen in SETS]
        np.testing.assert_allclose(row, expected, **ROUNDING)


def share_without_copies(rows, chosen):
    """The same over pairs of different minima, weighted by how often each pair is drawn."""
    seen = Counter(rows)
    ordered = [(a, b, seen[a] * seen[b]) for a, b in permutations(seen, 2)]
    joint, measure, gap, cell = Counter(), Counter(), Counter(), Counter()
    for a, b, n in ordered:
        u = tuple((a[0][k], b[0][k]) for k in chosen)
        joint[u, a[1] > b[1], a[2] > b[2]] += n
        measure[u, a[1] > b[1]] += n
        gap[u, a[2] > b[2]] += n
        cell[u] += n
    total = sum(cell.values())
    # chain rule: I(M; G | U) = H(M | U) + H(G | U) - H(M, G | U)
    h = {
        name: -sum(n / total * log(n / cell[key[0]]) for key, n in counter.items())
        for name, counter in [("joint", joint), ("measure", measure), ("gap", gap)]
    }
    return (h["measure"] + h["gap"] - h["joint"]) / h["gap"] if h["gap"] > 1e-12 else np.nan


def test_interval_is_the_percentiles_of_the_resamples():
    minima = make_minima().sort_values("generalization_gap")  # the order that is resampled
    row = conditional_mutual_information(minima, n_bootstrap=200, random_state=3).iloc[0]
    levels, x, y = arrays_of(minima)
    seed = np.random.RandomState(3).randint(2**31 - 1)
    resampled = _least(_Pairs.of(levels, SETS, y).shares(x, resample(len(x), 200, seed)))
    expected = np.quantile(resampled, [0.025, 0.975])
    np.testing.assert_allclose(row[["cmi_low", "cmi_high"]].tolist(), expected)
    assert 0 <= row["cmi_low"] < row["cmi_high"] <= 1


def test_the_order_of_the_minima_does_not_matter():
    minima = make_minima()
    shuffled = minima.sample(frac=1, random_state=1)
    one, other = (
        conditional_mutual_information(m, n_bootstrap=50, random_state=0)
        for m in (minima, shuffled)
    )
    assert_frame_equal(one, other)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([np.cbrt, lambda x: x**3 + x, np.negative]))
def test_depends_on_the_order_only_and_not_on_its_direction(seed, monotone):
    minima = make_minima(seed, repeats=1)
    mapped = minima.assign(relative_flatness=monotone(minima["relative_flatness"]))
    plain, same = (
        conditional_mutual_information(each, n_bootstrap=5, random_state=0)
        for each in (minima, mapped)
    )
    assert_frame_equal(plain.drop(columns="given"), same.drop(columns="given"), rtol=1e-9)


def test_a_copy_of_the_gap_has_one_and_a_copy_of_a_hyper_parameter_zero():
    minima = make_minima(repeats=3)
    rng = np.random.default_rng(0)
    size = minima["param_batch_size"].astype(float)
    minima = minima.assign(
        oracle=2 * minima["generalization_gap"],
        opposite=-minima["generalization_gap"],
        batch=size,
        constant=1.0,
        noise=rng.normal(size=len(minima)),
    )
    # the gap depends on the batch size, so the measure is informative without conditions
    minima["generalization_gap"] += np.log(size)
    minima["oracle"], minima["opposite"] = (s * minima["generalization_gap"] for s in (2, -1))
    table = conditional_mutual_information(minima, random_state=0).set_index("measure")
    np.testing.assert_allclose(table.loc[["oracle", "opposite"], "cmi"], 1.0)
    np.testing.assert_allclose(table.loc[["batch", "constant"], "cmi"], 0.0, atol=1e-12)
    assert table.loc["batch", "cmi_given_0"] > 0.05
    assert "batch_size" in table.loc["batch", "given"]
    assert table.loc["noise", "cmi"] < 0.1


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


def test_only_converged_finite_minima_count():
    minima = make_minima()
    clean = conditional_mutual_information(minima.iloc[:20], n_bootstrap=20, random_state=0)
    minima["converged"] = [True] * 21 + [False] + [True] * 2
    minima.loc[22, "relative_flatness"] = np.nan
    minima.loc[[20, 23], "generalization_gap"] = np.nan
    dirty = conditional_mutual_information(minima, n_bootstrap=20, random_state=0)
    assert dirty[["n", "n_left_out"]].to_numpy().tolist() == [[20, 4]]
    assert_frame_equal(dirty.drop(columns="n_left_out"), clean.drop(columns="n_left_out"))


def test_a_measure_without_values_is_nan():
    minima = make_minima().assign(absent=np.nan, train_loss=0.1)
    table = conditional_mutual_information(minima, n_bootstrap=5, random_state=0)
    assert table["measure"].tolist() == ["relative_flatness", "absent", "train_loss"]
    assert table.set_index("measure").loc["absent", ["cmi", "cmi_low", "chance"]].isna().all()


def test_without_measures_the_table_is_empty_but_has_its_columns():
    minima = make_minima().drop(columns="relative_flatness")
    table = conditional_mutual_information(minima, random_state=0)
    assert len(table) == 0
    assert table.columns.tolist()[:5] == ["measure", "cmi", "cmi_low", "cmi_high", "given"]


def test_same_seed_same_result():
    first, second, other = (
        conditional_mutual_information(make_minima(), n_bootstrap=50, random_state=seed)
        for seed in (5, 5, 6)
    )
    assert_frame_equal(first, second)
    assert first["cmi"].item() == other["cmi"].item()
    assert first["cmi_low"].item() != other["cmi_low"].item()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axes": "depth"}, "axes: 'depth' is no parameter of these minima"),
        ({"target": "gap"}, "target='gap' is not a column"),
        ({"n_bootstrap": -1}, "n_bootstrap must be a positive integer, got -1"),
    ],
)
def test_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        conditional_mutual_information(make_minima(), **arguments)
