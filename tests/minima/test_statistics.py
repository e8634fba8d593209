"""Statistics of measures against their definitions by loops, and what all of them share."""

from collections import Counter
from itertools import combinations, permutations, product
from math import log

import numpy as np
import optuna
import pandas as pd
import pytest
from optuna.trial import create_trial
from pandas.testing import assert_frame_equal
from scipy import stats

from relflat_sk import conditional_mutual_information, correlate_measures, granulated_kendall
from relflat_sk.minima._correlation import resample
from relflat_sk.minima._hyperparameters import resample_cells

AXES = {"batch_size": [8, 32, 128], "lr": [0.1, 0.2], "activation": ["relu", "tanh"]}
PARAMETERS = [f"param_{name}" for name in AXES]
SETS = [chosen for size in range(3) for chosen in combinations(range(3), size)]
SCIPY = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}
ROUNDING = {"rtol": 1e-9, "atol": 1e-12}  # float64, sums of a few dozen terms


def make_minima(seed=0, repeats=2, ties=False):
    """Minima of a sweep over three hyper-parameters, whose gap is the flatness plus noise."""
    rng = np.random.default_rng(seed)
    cells = [cell for cell in product(*AXES.values()) for _ in range(repeats)]
    minima = pd.DataFrame(cells, columns=PARAMETERS)
    flatness, noise = rng.normal(size=(2, len(minima)))
    gap = flatness + noise
    minima["relative_flatness"] = flatness.round() if ties else flatness
    minima["generalization_gap"] = gap.round() if ties else gap
    return minima


def rows_of(minima):
    """Hyper-parameters, measure and gap of each minimum, for loops."""
    values = minima[[*PARAMETERS, "relative_flatness", "generalization_gap"]].to_numpy()
    return [(tuple(row[:3]), float(row[3]), float(row[4])) for row in values]


# -- the definitions of Jiang et al., by loops ----------------------------------------------------


def psi_along(rows, axis):
    """Section 2.2.2: Kendall's tau of the minima that share all other values, averaged."""

    def others(row):
        return tuple(value for k, value in enumerate(row[0]) if k != axis)

    taus = []
    for shared in set(map(others, rows)):
        pairs = combinations([row for row in rows if others(row) == shared], 2)
        signs = [
            np.sign((a[1] - b[1]) * (a[2] - b[2])) for a, b in pairs if a[0][axis] != b[0][axis]
        ]
        if signs:
            taus.append(np.mean(signs))
    return np.mean(taus) if taus else np.nan


def psi(minima):
    along = [psi_along(rows_of(minima), k) for k in range(3)]
    return [np.nanmean(along), *along]


def share(rows, chosen, counts=None):
    """Section 2.2.3: I(V_mu; V_g | U_S) / H(V_g | U_S) over all ordered pairs of minima.

    Further numbers of a minimum are those of measures that are given. In a resample, a pair counts
    as often as it is drawn; copies of one minimum are no pair.
    """
    counts = np.ones(len(rows)) if counts is None else counts
    joint, measure, gap, cell = Counter(), Counter(), Counter(), Counter()
    for (a, n), (b, m) in permutations(zip(rows, counts, strict=True), 2):
        u = tuple((a[0][k], b[0][k]) for k in chosen)
        u += tuple(np.sign(one - other) for one, other in zip(a[3:], b[3:], strict=True))
        signs = np.sign(a[1] - b[1]), np.sign(a[2] - b[2])
        for counter, key in ((joint, (u, *signs)), (measure, (u, signs[0])), (gap, (u, signs[1]))):
            counter[key] += n * m
        cell[u] += n * m
    total = sum(cell.values())
    # chain rule: I(M; G | U) = H(M | U) + H(G | U) - H(M, G | U)
    joint, measure, gap = (
        -sum(n / total * log(n / cell[key[0]]) for key, n in counter.items() if n)
        for counter in (joint, measure, gap)
    )
    return (measure + gap - joint) / gap if gap > 1e-12 else np.nan


def repeated(minima, counts):
    return minima.loc[np.repeat(minima.index, counts.astype(int))]


# each statistic, its first column, and that column of a resample, by the definition
STATISTICS = {
    **{
        name: (
            correlate_measures,
            name,
            lambda minima, counts, scipy=scipy: scipy(
                *repeated(minima, counts)[["relative_flatness", "generalization_gap"]].values.T
            )[0],
        )
        for name, scipy in SCIPY.items()
    },
    "granulated": (
        granulated_kendall, "psi", lambda minima, counts: psi(repeated(minima, counts))[0],
    ),
    "information": (
        conditional_mutual_information, "cmi",
        lambda minima, counts: np.nanmin([share(rows_of(minima), one, counts) for one in SETS]),
    ),
}  # fmt: skip


@pytest.fixture(params=["pearson", "granulated", "information"])
def statistic(request):
    function, column, _ = STATISTICS[request.param]

    def compute(minima, **arguments):
        return function(minima, **{"n_bootstrap": 30, "random_state": 0} | arguments)

    compute.column = column
    return compute


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("name", STATISTICS)
def test_intervals_are_the_percentiles_of_resamples_by_the_definition(name, ties):
    function, column, of_resample = STATISTICS[name]
    order = ["generalization_gap", "relative_flatness"]  # of the minima that are drawn
    minima = make_minima(ties=ties).sort_values(order, ignore_index=True, kind="stable")
    row = function(minima, n_bootstrap=20, random_state=3).iloc[0]
    seed = np.random.RandomState(3).randint(2**31 - 1)
    if name == "granulated":
        levels = np.stack([pd.factorize(minima[axis])[0] for axis in PARAMETERS], axis=1)
        counts = resample_cells(levels, 20, seed)
    else:
        counts = resample(len(minima), 20, seed)
    expected = np.quantile([of_resample(minima, one) for one in counts], [0.025, 0.975])
    found = row[[column, f"{column}_low", f"{column}_high"]].tolist()
    whole = of_resample(minima, np.ones(len(minima)))
    np.testing.assert_allclose(found, [whole, *expected], **ROUNDING)


def test_resamples_draw_as_many_and_stay_within_cells_that_have_repeats():
    counts = resample(50, 2000, seed=0)
    assert (counts.sum(axis=1) == 50).all()
    # each number is binomial: its mean is 1 and its variance 1 - 1/50, to five standard errors
    np.testing.assert_allclose([counts.mean(), counts.var()], [1, 0.98], atol=5 * 1.5 / 316)
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


# -- what all share -------------------------------------------------------------------------------


def test_only_converged_finite_minima_count(statistic):
    minima = make_minima()
    clean = statistic(minima.iloc[:19])
    minima["converged"] = [True] * 20 + [False] + [True] * 3
    minima["state"] = ["complete"] * 19 + ["failed"] + ["complete"] * 4
    minima.loc[21, "relative_flatness"] = np.inf
    minima.loc[[22, 23], "generalization_gap"] = np.nan
    assert_frame_equal(statistic(minima), clean.assign(n_left_out=5))


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
    nothing = np.nan if statistic.column == "pearson" else 0.0
    assert table.loc["constant", names].tolist() == pytest.approx([nothing] * 3, nan_ok=True)
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


TWO = {"converged": [True] * 2 + [False] * 22}
ALONE = {"param_lr": range(24), "param_batch_size": range(24)}  # values of one minimum each
FIXED = dict.fromkeys(PARAMETERS, 1)
REFUSED = [  # the statistics, changed columns, arguments, what the message names
    (STATISTICS, {}, {"target": "gap"}, r"target='gap' is not a column.*\['relative_flatness'\]"),
    (STATISTICS, {"generalization_gap": np.nan}, {}, "0 of the 24 minima.*X_test and y_test"),
    (STATISTICS, TWO, {"target": "relative_flatness"}, r"2 of the 24 minima.*needs at least 3\."),
    (STATISTICS, {}, {"n_bootstrap": 0}, "n_bootstrap must be a positive integer, got 0"),
    (STATISTICS, {}, {"n_bootstrap": 10.5}, "n_bootstrap must be a positive integer, got 10.5"),
    (["pearson"], {}, {"strata": "optimizer"}, "strata: 'optimizer' is no parameter"),
    (["pearson"], {}, {"strata": 3}, "strata: '3' is no parameter"),
    (["pearson"], {}, {"strata": []}, "strata is empty"),
    (["information"], {}, {"given": ["loss"]}, "'loss'"),
    (["granulated"], ALONE, {}, r"No two of the 24 minima differ in one of \['param_batc"),
    *(
        (["granulated", "information"], *row)
        for row in (
            ({}, {"axes": ["depth"]}, r"axes: 'depth' is no parameter.*\['batch_size', 'lr', 'ac"),
            ({}, {"axes": []}, "axes is empty"),
            ({}, {"axes": 3}, "axes: '3' is no parameter"),
            (FIXED, {}, "No hyper-parameter was varied over these minima"),
        )
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "arguments", "message"),
    [(name, *row) for names, *row in REFUSED for name in names],
)
def test_says_what_is_wrong(name, change, arguments, message):
    with pytest.raises(ValueError, match=message):
        STATISTICS[name][0](make_minima().assign(**change), **arguments)


# -- coefficients, of groups as well --------------------------------------------------------------


def test_constant_resamples_are_left_out_of_the_interval():
    # with 3 minima, one resample in nine draws the same minimum three times
    minima = pd.DataFrame({"rho": [1.0, 2.0, 3.0], "generalization_gap": [1.0, 2.0, 3.0]})
    row = correlate_measures(minima, random_state=0).iloc[0]
    np.testing.assert_allclose(row["pearson_low":"kendall_high"].tolist(), 1.0)


@pytest.mark.parametrize("factor", [1e300, 1e-300])
def test_values_of_any_size_are_correlated(factor):
    minima = make_minima()
    scaled = minima.assign(relative_flatness=minima["relative_flatness"] * factor)
    found, expected = (correlate_measures(one, random_state=0) for one in (scaled, minima))
    assert_frame_equal(found, expected)


def simpson():
    """Within each method the gap rises with flatness; the flatter method has the larger gap."""
    rng = np.random.default_rng(0)
    flatness = rng.normal(size=40)
    method = np.repeat(["sgd", "sam"], [25, 15])
    gap = flatness + 0.3 * rng.normal(size=40) - 10 * (method == "sgd")
    columns = {"method": method, "relative_flatness": flatness + 10 * (method == "sgd")}
    return pd.DataFrame({**columns, "generalization_gap": gap, "param_seed": np.arange(40) % 4})


def test_coefficients_within_groups_and_pooled():
    minima, arguments = simpson(), {"n_bootstrap": 200, "random_state": 0}
    rows = correlate_measures(minima, strata="method", **arguments).set_index("stratum")
    assert rows["n"].to_dict() == {"pooled": 40, "within": 40, "sgd": 25, "sam": 15}
    assert (rows["n_left_out"] == 0).all()
    for name, part in {"pooled": minima, **dict(list(minima.groupby("method")))}.items():
        alone = correlate_measures(part, **arguments).drop(columns=["measure", "n", "n_left_out"])
        assert rows.loc[name, alone.columns].tolist() == pytest.approx(alone.iloc[0].tolist())
    for name in SCIPY:
        assert rows.loc["pooled", name] < 0 < rows.loc["within", f"{name}_low"]
        mean = (25 * rows.loc["sgd", name] + 15 * rows.loc["sam", name]) / 40
        assert rows.loc["within", name] == pytest.approx(mean)


def test_groups_are_resampled_independently():
    rng, n_groups, n = np.random.default_rng(0), 16, 12
    x, noise = (np.tile(values, (n_groups, 1)) for values in rng.normal(size=(2, n)))
    y = x + noise  # the same in each group: equal draws would not average out
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


# -- along hyper-parameters -----------------------------------------------------------------------


KEPT = {
    "all": lambda minima: minima,
    "incomplete": lambda minima: minima.drop(index=[0, 3, 4, 9, 11]),
    # no two minima differ in the batch size or the rate alone, so psi is that of the activation
    "no pairs": lambda minima: minima[minima["param_batch_size"] * 0.0125 == minima["param_lr"]],
}


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("repeats", [1, 3])
def test_granulated_coefficients_by_the_definition(repeats, ties, kept):
    minima = make_minima(repeats=repeats, ties=ties).replace({"param_batch_size": {32: 16}})
    minima = KEPT[kept](minima)
    row = granulated_kendall(minima, list(AXES), n_bootstrap=1, random_state=0).iloc[0]
    found = row[["psi", *(f"psi_{name}" for name in AXES)]].tolist()
    np.testing.assert_allclose(found, psi(minima), **ROUNDING)


def test_axes_may_have_any_type_and_a_column_added_by_hand_is_then_no_measure():
    minima, expected = make_minima(), granulated_kendall(make_minima(), random_state=0)
    shapes = {8: [16], 32: None, 128: [16, 16]}
    lists = pd.Series([shapes[size] for size in minima["param_batch_size"]])
    found = granulated_kendall(minima.assign(param_batch_size=lists), random_state=0)
    assert_frame_equal(found, expected)
    minima = minima.rename(columns={"param_batch_size": "width"})
    table = granulated_kendall(minima, ["width", "lr", "activation"], random_state=0)
    assert table["measure"].tolist() == ["relative_flatness"]
    assert table["psi_width"].item() == expected["psi_batch_size"].item()


# -- information ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("known", [[], ["train_loss"], ["train_loss", "confidence"]])
def test_information_by_the_definition(known, repeats, ties):
    minima = make_minima(repeats=repeats, ties=ties)
    rng = np.random.default_rng(1)
    for name in known:
        values = minima["generalization_gap"] + rng.normal(size=len(minima))
        minima[name] = values.round() if ties else values
    if known:  # a minimum without a known value does not count
        minima.loc[0, known[0]] = np.nan
    table = conditional_mutual_information(minima, given=known, n_bootstrap=1, random_state=0)
    assert not set(known) & set(table["measure"])
    row = table.set_index("measure").loc["relative_flatness"]
    minima = minima.dropna()
    assert row["n"] == len(minima)
    rows = [(*a, *b) for a, b in zip(rows_of(minima), minima[known].to_numpy(), strict=True)]
    expected = [share(rows, chosen) for chosen in SETS]
    at = int(np.nanargmin(expected))
    np.testing.assert_allclose(row["cmi"], expected[at], **ROUNDING)
    assert row["given"] == (*(list(AXES)[k] for k in SETS[at]), *known)
    for size in range(3):
        of_size = [e for e, chosen in zip(expected, SETS, strict=True) if len(chosen) == size]
        if np.isfinite(of_size).any():
            np.testing.assert_allclose(row[f"cmi_given_{size}"], np.nanmin(of_size), **ROUNDING)


def test_a_shuffled_measure_reaches_about_the_level_of_chance():
    rows = []
    for seed in range(30):
        minima = make_minima(seed)
        shuffled = np.random.default_rng(seed).permutation(minima["relative_flatness"])
        minima = minima.assign(relative_flatness=shuffled)
        rows.append(conditional_mutual_information(minima, n_bootstrap=1, random_state=0))
    means = pd.concat(rows)[["cmi", "chance"]].mean()
    assert 0 < means["chance"] < 0.2
    np.testing.assert_allclose(means["cmi"], means["chance"], rtol=0.3)


def test_sets_that_leave_no_uncertainty_are_nan():
    # one minimum per cell of two axes: given both, no uncertainty is left
    minima = pd.DataFrame({
        "param_a": [0, 0, 1, 1],
        "param_b": [0, 1, 0, 1],
        "relative_flatness": [1.0, 2.0, 4.0, 3.0],
        "generalization_gap": [0.1, 0.2, 0.3, 0.4],
    })
    constant = minima.assign(generalization_gap=0.1)
    row, of_constant = (
        conditional_mutual_information(one, n_bootstrap=20, random_state=0).iloc[0]
        for one in (minima, constant)
    )
    assert np.isnan(row["cmi_given_2"])
    assert row["cmi"] == min(row["cmi_given_0"], row["cmi_given_1"])
    assert of_constant[["cmi", "cmi_low", "cmi_high", "chance"]].isna().all()


def test_one_axis_has_sets_of_sizes_zero_and_one():
    table = conditional_mutual_information(make_minima(), "lr", n_bootstrap=5, random_state=0)
    assert [name for name in table if name.startswith("cmi_g")] == ["cmi_given_0", "cmi_given_1"]
