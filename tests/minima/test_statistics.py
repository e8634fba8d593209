"""What all statistics of measures share: which minima they use, seeds, intervals, refusals."""

import numpy as np
import optuna
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import create_trial
from pandas.testing import assert_frame_equal

from relflat_sk import conditional_mutual_information, correlate_measures, granulated_kendall
from relflat_sk.minima._correlation import _COEFFICIENTS, resample
from relflat_sk.minima._hyperparameters import _Granules, _least, _Pairs, resample_cells
from tests.minima.sweeps import arrays_of, make_minima

SETS = [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]
# each statistic, its first column, and that column in resamples of levels, measure and gap
STATISTICS = {
    "correlate_measures": (
        correlate_measures,
        "pearson",
        lambda _, x, y, c: _COEFFICIENTS["pearson"](x, y, c),
    ),
    "granulated": (
        granulated_kendall,
        "psi",
        lambda levels, x, y, c: _Granules.of(levels).psi(x, y, c)[:, 0],
    ),
    "information": (
        conditional_mutual_information,
        "cmi",
        lambda levels, x, y, c: _least(_Pairs.of(levels, SETS, y).shares(x, c)),
    ),
}


@pytest.fixture(params=STATISTICS)
def statistic(request):
    function, column, _ = STATISTICS[request.param]

    def compute(minima, **arguments):
        return function(minima, **{"n_bootstrap": 30, "random_state": 0} | arguments)

    compute.column = column
    return compute


@pytest.mark.parametrize("name", STATISTICS)
def test_the_interval_is_the_percentiles_of_the_resamples(name):
    function, column, of_resamples = STATISTICS[name]
    minima = make_minima().sort_values("generalization_gap")  # the order that is resampled
    row = function(minima, n_bootstrap=200, random_state=3).iloc[0]
    levels, x, y = arrays_of(minima)
    seed = np.random.RandomState(3).randint(2**31 - 1)
    draw = resample_cells(levels, 200, seed)
    counts = draw if name == "granulated" else resample(len(x), 200, seed)
    expected = np.quantile(of_resamples(levels, x, y, counts), [0.025, 0.975])
    np.testing.assert_allclose(row[[f"{column}_low", f"{column}_high"]].tolist(), expected)
    assert row[f"{column}_low"] < row[f"{column}_high"]


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    monotone=st.sampled_from([np.cbrt, np.arctan, lambda x: np.exp(x / 10), lambda x: x**3 + x]),
)
@pytest.mark.parametrize("name", STATISTICS)
def test_ranks_alone_count_and_the_sign_is_that_of_the_measure(name, seed, monotone):
    ties = seed % 2 == 0
    minima = make_minima(seed, repeats=1 + seed % 4 // 2, ties=ties)
    measure, gap = minima["relative_flatness"], minima["generalization_gap"]
    mapped = {"relative_flatness": monotone(measure), "generalization_gap": -monotone(-gap)}
    plain, same, opposite = (
        STATISTICS[name][0](minima.assign(**changed), n_bootstrap=10, random_state=0)
        for changed in ({}, mapped, {"relative_flatness": -measure})
    )
    kept = [one for one in plain if not one.startswith("pearson") and one != "given"]
    assert_frame_equal(plain[kept], same[kept], rtol=1e-9)
    if ties:  # of the gap: what is resampled is in the order of the measure
        return
    if name == "information":  # which has no sign
        assert_frame_equal(plain[kept], opposite[kept], rtol=1e-9)
        return
    for column in ["psi"] if name == "granulated" else ["pearson", "spearman", "kendall"]:
        expected = -plain[[column, f"{column}_high", f"{column}_low"]].to_numpy()
        found = opposite[[column, f"{column}_low", f"{column}_high"]]
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_only_converged_finite_minima_count(statistic):
    minima = make_minima()
    clean = statistic(minima.iloc[:19])
    minima["converged"] = [True] * 20 + [False] + [True] * 3
    minima["state"] = ["complete"] * 19 + ["failed"] + ["complete"] * 4
    minima.loc[21, "relative_flatness"] = np.inf
    minima.loc[[22, 23], "generalization_gap"] = np.nan
    dirty = statistic(minima)
    assert dirty[["n", "n_left_out"]].to_numpy().tolist() == [[19, 5]]
    assert_frame_equal(dirty.drop(columns="n_left_out"), clean.drop(columns="n_left_out"))


def test_one_row_per_measure_and_one_for_the_baseline(statistic):
    others = {"test_loss": 0.2, "seconds": 1.0}
    minima = make_minima().assign(constant=0.1, absent=np.nan, train_loss=0.1, **others)
    table = statistic(minima).set_index("measure")
    assert table.index.tolist() == ["relative_flatness", "constant", "absent", "train_loss"]
    names = [statistic.column + end for end in ("", "_low", "_high")]
    assert table.loc["absent", names].isna().all()
    assert table.loc["absent", ["n", "n_left_out"]].tolist() == [0, 24]
    assert table.loc["relative_flatness", names].notna().all()
    # 0.1 has no exact mean in floating point, so its computed variance is not 0
    is_none = statistic.column == "pearson"
    assert [np.isnan(v) if is_none else v == 0 for v in table.loc["constant", names]] == [True] * 3
    for_the_loss = statistic(minima, target="train_loss")
    assert for_the_loss["measure"].tolist() == ["relative_flatness", "constant", "absent"]
    empty = statistic(make_minima().drop(columns="relative_flatness"))
    assert empty.columns.tolist()[:4] == ["measure", *names]
    assert len(empty) == 0


@pytest.mark.parametrize("kind", [int, np.random.RandomState, np.random.default_rng])
def test_same_seed_same_intervals(statistic, kind):
    first, second, other = (statistic(make_minima(), random_state=kind(at)) for at in (5, 5, 6))
    assert_frame_equal(first, second)
    assert first[statistic.column].item() == other[statistic.column].item()
    low = f"{statistic.column}_low"
    assert first[low].item() != other[low].item()


def test_without_a_seed_the_global_random_state_stays_as_it_was(statistic):
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    low, minima = f"{statistic.column}_low", make_minima()
    # ranks take few values: one pair of draws in eighty has the same limit
    assert len({statistic(minima, random_state=None)[low].item() for _ in range(8)}) > 1
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_other_measures_and_the_order_of_the_minima_do_not_matter(statistic):
    minima = make_minima()
    alone = statistic(minima)
    assert_frame_equal(statistic(minima.sample(frac=1, random_state=1)), alone)
    minima.insert(0, "l2_norm", range(24))
    assert_frame_equal(statistic(minima).iloc[1:].reset_index(drop=True), alone)


def test_a_study_gives_the_result_of_its_table(statistic):
    study, choices = optuna.create_study(), optuna.distributions.CategoricalDistribution([8, 32])
    rows = [(8, 1.0), (8, 1.5), (32, 2.0), (32, 1.7)]
    for size, value in rows:
        record = {"relative_flatness": value, "generalization_gap": -value, "converged": True}
        params = {"params": {"batch_size": size}, "distributions": {"batch_size": choices}}
        study.add_trial(create_trial(value=value, user_attrs=record, **params))
    table = pd.DataFrame(rows, columns=["param_batch_size", "relative_flatness"])
    table["generalization_gap"] = -table["relative_flatness"]
    assert_frame_equal(statistic(study)[:1], statistic(table))


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, {"target": "gap"}, r"target='gap' is not a column.*\['relative_flatness'\]"),
        ({"generalization_gap": np.nan}, {}, "0 of the 24 minima.*X_test and y_test"),
        ({"converged": [True] * 2 + [False] * 22}, {"target": "relative_flatness"},
         r"2 of the 24 minima.*needs at least 3\. The columns.*why minima were left out"),
        ({}, {"n_bootstrap": 0}, "n_bootstrap must be a positive integer, got 0"),
        ({}, {"n_bootstrap": 10.5}, "n_bootstrap must be a positive integer, got 10.5"),
    ],
    ids=["target", "no test set", "two", "no resamples", "half a resample"],
)  # fmt: skip
def test_says_what_is_wrong(statistic, change, arguments, message):
    with pytest.raises(ValueError, match=message):
        statistic(make_minima().assign(**change), **arguments)


@pytest.mark.parametrize("function", [granulated_kendall, conditional_mutual_information])
def test_says_what_is_wrong_with_the_axes(function):
    for axes, message in (
        (["depth"], r"axes: 'depth' is no parameter.*\['batch_size', 'lr', 'activ"),
        ([], "axes is empty"),
        (3, "axes: '3' is no parameter"),
    ):
        with pytest.raises(ValueError, match=message):
            function(make_minima(), axes)
    fixed = make_minima()[["relative_flatness", "generalization_gap"]].assign(param_lr=0.1)
    with pytest.raises(ValueError, match="No hyper-parameter was varied over these minima"):
        function(fixed)
