"""Tests for `_granulated`, against the definition of Jiang et al. by loops."""

from itertools import combinations, product

import numpy as np
import optuna
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import create_trial
from pandas.testing import assert_frame_equal

from relflat_sk import granulated_kendall
from relflat_sk.minima._granulated import _Granules, resample_cells
from relflat_sk.minima._resampling import resample

AXES = {"batch_size": [8, 32, 128], "lr": [0.1, 0.2], "activation": ["relu", "tanh", "elu"]}
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}


def make_minima(seed=0, repeats=1, ties=False):
    rng = np.random.default_rng(seed)
    cells = [cell for cell in product(*AXES.values()) for _ in range(repeats)]
    minima = pd.DataFrame(cells, columns=[f"param_{name}" for name in AXES])
    flatness, noise = rng.normal(size=(2, len(minima)))
    gap = flatness + noise
    minima["relative_flatness"] = flatness.round() if ties else flatness
    minima["generalization_gap"] = gap.round() if ties else gap
    return minima


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
    axes = [name for name in minima if name.startswith("param_")]
    rows = [
        (tuple(row[axis] for axis in axes), row["relative_flatness"], row["generalization_gap"])
        for _, row in minima.iterrows()
    ]
    along = [psi_along(rows, k) for k in range(len(axes))]
    return [np.nanmean(along), *along]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("repeats", [1, 3])
def test_agrees_with_the_definition(repeats, ties):
    minima = make_minima(repeats=repeats, ties=ties)
    row = granulated_kendall(minima, n_bootstrap=1, random_state=0).iloc[0]
    found = row[["psi", *(f"psi_{name}" for name in AXES)]].tolist()
    np.testing.assert_allclose(found, by_definition(minima), **ROUNDING)


def test_incomplete_groups_count_with_their_remaining_pairs():
    minima = make_minima().drop(index=[0, 3, 4, 9, 17])
    row = granulated_kendall(minima, n_bootstrap=1, random_state=0).iloc[0]
    np.testing.assert_allclose(row["psi"], by_definition(minima)[0], **ROUNDING)


def test_resamples_agree_with_repeating_the_minima():
    minima = make_minima()
    x, y = (minima[name].to_numpy() for name in ("relative_flatness", "generalization_gap"))
    levels = np.stack([pd.factorize(minima[f"param_{name}"])[0] for name in AXES], axis=1)
    counts = resample(len(minima), 10, seed=1)
    repeated = [by_definition(minima.loc[np.repeat(minima.index, c.astype(int))]) for c in counts]
    np.testing.assert_allclose(_Granules.of(levels).psi(x, y, counts), repeated, **ROUNDING)


def test_interval_is_the_percentiles_of_the_resamples():
    minima = make_minima().sort_values("generalization_gap")  # the order that is resampled
    row = granulated_kendall(minima, n_bootstrap=300, random_state=3).iloc[0]
    x, y = (minima[name].to_numpy() for name in ("relative_flatness", "generalization_gap"))
    levels = np.stack([pd.factorize(minima[f"param_{name}"])[0] for name in AXES], axis=1)
    seed = np.random.RandomState(3).randint(2**31 - 1)
    resampled = _Granules.of(levels).psi(x, y, resample(len(x), 300, seed))
    for name, values in zip(["psi", *(f"psi_{name}" for name in AXES)], resampled.T, strict=True):
        ends = np.nanquantile(values, [0.025, 0.975])
        np.testing.assert_allclose(row[[f"{name}_low", f"{name}_high"]].tolist(), ends)
    assert row["psi_low"] < row["psi"] < row["psi_high"]


def test_the_order_of_the_minima_does_not_matter():
    minima = make_minima()
    shuffled = minima.sample(frac=1, random_state=1)
    one, other = (granulated_kendall(m, n_bootstrap=50, random_state=0) for m in (minima, shuffled))
    assert_frame_equal(one, other)


def test_intervals_cover_the_truth_as_often_as_they_say():
    # one minimum per cell; the truth is the mean over many sweeps of the same kind
    tables = [
        granulated_kendall(make_minima(s), n_bootstrap=200, random_state=s).iloc[0]
        for s in range(120)
    ]
    # gap = flatness + noise of equal size: tau = 2/pi * arcsin(sqrt(1/2)) = 1/2 of any pair
    covered = np.mean([row["psi_low"] <= 0.5 <= row["psi_high"] for row in tables])
    assert 0.9 <= covered <= 1.0
    assert np.mean([row["psi_low"] > 0 for row in tables]) > 0.5


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


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([np.cbrt, np.arctan, lambda x: x**3 + x]))
def test_survives_monotone_maps_and_changes_sign_with_the_measure(seed, monotone):
    minima = make_minima(seed)
    mapped = minima.assign(relative_flatness=monotone(minima["relative_flatness"]))
    turned = minima.assign(relative_flatness=-minima["relative_flatness"])
    plain, same, opposite = (
        granulated_kendall(each, n_bootstrap=10, random_state=0)
        for each in (minima, mapped, turned)
    )
    assert_frame_equal(plain, same)
    np.testing.assert_allclose(opposite["psi"], -plain["psi"], **ROUNDING)
    np.testing.assert_allclose(opposite["psi_low"], -plain["psi_high"], **ROUNDING)


def test_a_measure_of_the_batch_size_is_zero_along_other_axes():
    minima = make_minima()
    size = minima["param_batch_size"]
    noise = np.random.default_rng(0).normal(size=len(minima))
    minima = minima.assign(relative_flatness=1.0 * size, generalization_gap=size + noise)
    row = granulated_kendall(minima, random_state=0).iloc[0]
    assert row["psi_batch_size"] == 1.0
    assert row["psi_lr"] == row["psi_activation"] == 0.0
    np.testing.assert_allclose(row["psi"], 1 / 3)


def test_axes_are_named_with_or_without_their_prefix():
    minima = make_minima()
    tables = [
        granulated_kendall(minima, axes, random_state=0)
        for axes in (["lr", "batch_size"], ["param_lr", "param_batch_size", "lr"])
    ]
    assert_frame_equal(*tables)
    assert [name for name in tables[0] if "lr" in name] == ["psi_lr", "psi_lr_low", "psi_lr_high"]
    one = granulated_kendall(minima, "lr", random_state=0)
    assert_frame_equal(one[["psi"]], one[["psi_lr"]].set_axis(["psi"], axis=1))


def test_seeds_are_repeats_unless_they_are_named():
    minima = make_minima(repeats=3).assign(param_random_state=np.tile([0, 1, 2], 18))
    expected = by_definition(minima.drop(columns="param_random_state"))
    for axes in (list(AXES), None):
        row = granulated_kendall(minima, axes, n_bootstrap=1, random_state=0).iloc[0]
        np.testing.assert_allclose(row["psi"], expected[0], **ROUNDING)
    named = granulated_kendall(minima, [*AXES, "random_state"], n_bootstrap=1, random_state=0)
    assert named["psi"].iloc[0] != row["psi"]


def test_hyper_parameters_varied_together_are_one_axis():
    minima = make_minima()
    minima["param_momentum"] = minima["param_batch_size"].map({8: 0.0, 32: 0.9, 128: 0.99})
    minima["param_epochs"] = 10
    table = granulated_kendall(minima, random_state=0)
    assert "psi_batch_size" in table
    assert not {"psi_momentum", "psi_epochs"} & set(table)


def test_only_converged_finite_minima_count():
    minima = make_minima()
    clean = granulated_kendall(minima.iloc[:12], random_state=0)
    minima["converged"] = [True] * 12 + [False] * 2 + [True] * 4
    minima["state"] = ["complete"] * 14 + ["failed"] + ["complete"] * 3
    minima.loc[15, "relative_flatness"] = np.inf
    minima.loc[[16, 17], "generalization_gap"] = np.nan
    dirty = granulated_kendall(minima, random_state=0)
    assert dirty[["n", "n_left_out"]].to_numpy().tolist() == [[12, 6]]
    assert_frame_equal(dirty.drop(columns="n_left_out"), clean.drop(columns="n_left_out"))


def test_one_row_per_measure_and_one_for_the_baseline():
    minima = make_minima().assign(l2_norm=1.0, absent=np.nan, train_loss=0.1)
    table = granulated_kendall(minima, random_state=0).set_index("measure")
    assert table.index.tolist() == ["relative_flatness", "l2_norm", "absent", "train_loss"]
    # a constant measure ties all pairs; a measure without values has no pairs
    assert table.loc["l2_norm", ["psi", "psi_low", "psi_high"]].tolist() == [0, 0, 0]
    assert table.loc["absent", "psi":"psi_activation_high"].isna().all()
    assert table.loc["absent", ["n", "n_left_out"]].tolist() == [0, 18]


def test_an_axis_without_pairs_of_its_own_is_left_out_of_the_mean():
    minima = make_minima()
    minima["param_width"] = minima["param_batch_size"] * minima["param_lr"]
    axes = ["batch_size", "width", "activation"]  # the width is a function of the batch size
    row = granulated_kendall(minima, axes, random_state=0).iloc[0]
    assert np.isnan(row[["psi_batch_size", "psi_batch_size_low"]].tolist()).all()
    expected = np.mean(row[["psi_width", "psi_activation"]].tolist())
    np.testing.assert_allclose(row["psi"], expected)


def test_values_of_hyper_parameters_may_have_any_type():
    minima = make_minima()
    shapes = {8: [16], 32: None, 128: [16, 16]}
    minima["param_batch_size"] = pd.Series([shapes[b] for b in minima["param_batch_size"]])
    expected = granulated_kendall(make_minima(), random_state=0)
    assert_frame_equal(granulated_kendall(minima, random_state=0), expected)


def test_a_column_added_by_hand_can_be_an_axis_and_is_then_no_measure():
    minima = make_minima().rename(columns={"param_batch_size": "width"})
    table = granulated_kendall(minima, ["width", "lr", "activation"], random_state=0)
    assert table["measure"].tolist() == ["relative_flatness"]
    expected = granulated_kendall(make_minima(), random_state=0)
    assert table["psi_width"].item() == expected["psi_batch_size"].item()


def test_study_gives_the_result_of_its_table():
    study = optuna.create_study()
    choices = optuna.distributions.CategoricalDistribution([8, 32])
    for size, value in [(8, 1.0), (8, 1.5), (32, 2.0)]:
        record = {"relative_flatness": value, "generalization_gap": value, "converged": True}
        study.add_trial(
            create_trial(
                value=value,
                params={"batch_size": size},
                distributions={"batch_size": choices},
                user_attrs=record,
            )
        )
    assert granulated_kendall(study, random_state=0)["psi_batch_size"].iloc[0] == 1.0


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, {"axes": ["depth"]}, r"axes: 'depth' is no parameter.*\['batch_size', 'lr', 'activ"),
        ({}, {"axes": []}, "axes is empty"),
        ({}, {"target": "gap"}, "target='gap' is not a column"),
        ({}, {"n_bootstrap": 0}, "n_bootstrap must be a positive integer, got 0"),
        (
            {"param_lr": range(18), "param_batch_size": range(18)},
            {},
            r"No two of the 18 minima differ in one of \['param_batch",
        ),
        ({"converged": False}, {}, "0 of the 18 minima converged"),
    ],
    ids=["axis", "no axes", "target", "no resamples", "scattered", "none converged"],
)
def test_says_what_is_wrong(change, arguments, message):
    with pytest.raises(ValueError, match=message):
        granulated_kendall(make_minima().assign(**change), **arguments)


def test_says_that_nothing_was_varied():
    minima = make_minima()[["relative_flatness", "generalization_gap"]].assign(param_lr=0.1)
    with pytest.raises(ValueError, match=r"No hyper-parameter was varied over these minima"):
        granulated_kendall(minima)
