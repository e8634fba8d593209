"""The study of ways to choose: its training, its scores, how it judges, and what it stores."""

import math
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import kendalltau, ttest_rel
from torch import nn
from torch.testing import assert_close

from benchmarks._harness import stacked, tasks, ways
from benchmarks._harness.networks import epochs
from benchmarks.worth import selection, selection_report
from tests.benchmarks.commands import run

# -- training ---------------------------------------------------------------------------------


def plain_loop(one, X, y):
    """Train one candidate with torch's own layers and optimizer, from the same draws."""
    generator = torch.Generator().manual_seed(one.seed)
    layers, is_class = [], not y.is_floating_point()
    for n_in, n_out in pairwise([X.shape[1], *one.hidden, int(y.max()) + 1 if is_class else 1]):
        layer = nn.Linear(n_in, n_out)
        for parameter, shape in ((layer.weight, (n_in, n_out)), (layer.bias, (1, n_out))):
            draw = (2 * torch.rand(*shape, generator=generator) - 1) / math.sqrt(n_in)
            parameter.data.copy_(draw.T if parameter.ndim == 2 else draw[0])
        layers += [layer, nn.ReLU()]
    net = nn.Sequential(*layers[:-1])

    def loss(X, y):
        return nn.CrossEntropyLoss()(net(X), y) if is_class else nn.MSELoss()(net(X)[:, 0], y)

    optimizer = torch.optim.SGD(net.parameters(), one.lr, 0.9, weight_decay=one.weight_decay)
    training = epochs(lambda rows: loss(X[rows], y[rows]), optimizer, len(X), one.batch_size,
                      generator)  # fmt: skip
    for epoch in training:
        if epoch + 1 == one.epochs or loss(X, y) <= one.goal:
            break
    return net


@pytest.mark.parametrize("regression", [False, True], ids=["classes", "values"])
def test_stacked_training_is_that_of_a_plain_loop(regression):
    X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    y = X[:, 0] - X[:, 1] if regression else (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
    candidates = [
        stacked.Candidate((8,), 16, 0.05, seed=1, epochs=5),
        stacked.Candidate((8,), 16, 0.03, seed=2, weight_decay=0.01, epochs=8),
        stacked.Candidate((6, 5), 20, 0.05, seed=3, epochs=4),
        stacked.Candidate((8,), 16, 0.05, seed=4, epochs=60, goal=0.1),
    ]
    found = stacked.train(candidates, [(X, y)] * 4)
    for one, weights in zip(candidates, found, strict=True):
        expected = plain_loop(one, X, y)(X)
        assert_close(selection.apply(weights, X), expected, rtol=1e-3, atol=1e-4)
        assert_close(stacked.to_module(weights)(X), expected, rtol=1e-3, atol=1e-4)
    reached = stacked.mean_losses(selection.apply(found[3], X)[None], y[None]).item()
    assert 0.02 < reached <= 0.1  # it ended at its goal, not at its last epoch


def test_candidates_that_diverge_end_and_leave_the_others_alone():
    X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = X.sum(dim=1)
    calm = stacked.Candidate((8,), 8, 0.01, seed=0)
    wild = stacked.Candidate((8,), 8, 1e4, seed=1)
    together = stacked.train([calm, wild], [(X, y)] * 2)
    alone = stacked.train([calm], [(X, y)])
    assert_close(together[0], alone[0], rtol=1e-4, atol=1e-5)
    assert not torch.isfinite(selection.apply(together[1], X)).all()


@pytest.mark.parametrize("name", [name for name in tasks.TASKS if name != "CIFAR-10"])
def test_data_sets_are_split_anew_and_mislabelled_in_training_only(name):
    task = tasks.TASKS[name]
    first, again, other = task.split(0), task.split(0), task.split(1)
    assert all(map(torch.equal, first, again))
    assert first.X.shape == other.X.shape
    assert (first.X != other.X).any()
    assert abs(first.X.mean()) < 1e-5
    assert len(first.y_test) >= 88
    assert first.y.is_floating_point() == (name in selection_report.REGRESSIONS)
    if name.endswith("20% wrong labels"):
        right = tasks.TASKS[name.split(",")[0]].split(0)
        assert torch.equal(first.X, right.X)
        assert torch.equal(first.y_test, right.y_test)
        assert (first.y != right.y).double().mean() == pytest.approx(0.2, abs=0.002)


# -- scores -----------------------------------------------------------------------------------


def test_the_nearest_to_the_mean_has_the_classes_that_most_predict():
    fits = made_up([4, 4, 4])
    right, n = fits.outputs[0], len(fits.y)
    swap = lambda rows: np.where(np.arange(n)[:, None] < rows, 5 - right, right)  # noqa: E731
    fits.noisy_outputs = [swap(0), swap(10), swap(30)]
    # the mean's classes are the candidates' majority: the second differs in none of them
    assert ways.disagreement(fits).tolist() == [0.1, 0.0, 0.2]
    fits.converged[0] = False  # of two that contradict each other, the mean is a tie: class 0
    assert ways.disagreement(fits)[1:].sum() == pytest.approx(0.2)
    fits.y = fits.y.astype(float)
    fits.noisy_outputs = [np.full((n, 1), z) for z in (9.0, 1.0, 4.0)]
    assert ways.disagreement(fits).tolist() == [6.5**2, 1.5**2, 1.5**2]


# -- judging ----------------------------------------------------------------------------------


def made_up(errors, n=100):
    """Make fits whose test errors are given, in points; candidates err on the last samples."""
    y = np.arange(n) % 2
    right = np.where(np.arange(2) == y[:, None], 5.0, 0.0)
    of_test = [np.where(np.arange(n)[:, None] < n - wrong, right, 5 - right) for wrong in errors]
    k = len(errors)
    return ways.Fits(
        y, y, np.linspace(0.1, 0.2, k), math.log(2), [right] * k, of_test, [right] * k,
        np.full(k, 3), np.ones(k, dtype=bool), pd.DataFrame({"l2_norm": range(k)}),
    )  # fmt: skip


def judged(fits, scores, size=1):
    errors = ways.test_errors(fits.test_outputs, fits.y_test)
    way = ways.Way(np.array(scores, dtype=float), size)
    return ways.judge(way, fits, errors[fits.converged].min(), np.random.default_rng(0))


def test_choices_are_judged_by_the_test_error():
    errors = [4, 10, 2, 8, 6, 20, 30]
    fits = made_up(errors)
    found = judged(fits, [3, 1, 2, 7, 5, 6, 4])
    assert found["error"] == pytest.approx(10)
    assert found["regret"] == pytest.approx(8)
    assert found["top5"] == pytest.approx(np.mean([10, 2, 4, 30, 6]) - 2)
    assert found["tau"] == pytest.approx(kendalltau([3, 1, 2, 7, 5, 6, 4], errors).statistic)
    tied = judged(fits, [1, 1, 2, 3, 3, 3, 9])
    assert tied["error"] == pytest.approx((4 + 10) / 2)
    assert tied["top5"] == pytest.approx((4 + 10 + 2 + 2 * (8 + 6 + 20) / 3) / 5 - 2)
    random = judged(fits, np.zeros(7))
    assert random["error"] == random["regret"] + 2 == pytest.approx(np.mean(errors))
    assert random["top5"] == pytest.approx(random["regret"])
    assert math.isnan(random["tau"])


def test_candidates_that_did_not_converge_are_excluded_for_all_ways():
    fits = made_up([4, 10, 2, 8, 6, 20, 30])
    fits.converged[[1, 2]] = False
    fits.held_out["20%"] = (np.arange(7.0), np.arange(7.0), fits.test_outputs)
    rows = ways.judge_all(fits, seed=0)
    assert rows["random"]["error"] == pytest.approx(np.mean([4, 8, 6, 20, 30]))
    assert rows["random"]["regret"] == pytest.approx(rows["random"]["error"] - 4)
    chosen = {name: row["error"] for name, row in rows.items() if row["cost"] <= 1}
    assert not {2.0, 10.0} & set(chosen.values())
    unknown = judged(fits, [np.nan, 0, 0, np.inf, np.nan, 2, 1])  # two finite scores: rank first
    assert unknown["error"] == pytest.approx(30)
    assert unknown["top5"] == pytest.approx((30 + 20 + 4 + 8 + 6) / 5 - 4)
    assert judged(fits, np.full(7, np.nan))["error"] == rows["random"]["error"]


def test_ensembles_average_probabilities():
    fits = made_up([40, 40, 40, 0, 0, 0, 0])
    # three of the five err on the same samples; and one of them, which is the first
    first, other = (judged(fits, order, size=5) for order in (range(7), [0, 9, 9, 1, 2, 3, 4]))
    assert (first["error"], other["error"]) == (pytest.approx(40), pytest.approx(0))
    assert math.isnan(first["top5"])


def test_a_search_averages_what_lowers_the_loss_half_as_far_as_the_best():
    fits = made_up([0, 0, 40, 40, 40, 0])
    fits.losses = fits.constant * np.array([0.04, 0.5, 0.53, 0.53, 0.53, np.nan])
    fits.converged[-1] = False
    rows = ways.judge_all(fits, seed=0)
    assert rows["average of all"]["error"] == pytest.approx(40)
    assert rows["average, as in a search"]["error"] == 0
    assert [*ways.averages(fits)["average of those at a search's goal"]] == [True] + [False] * 5


def test_costs_count_fits_of_all_candidates():
    fits = made_up([4, 10, 2, 8, 6, 20, 30, 5, 7, 9])
    fits.held_out = {
        "20%": (np.arange(10.0), np.arange(10.0), fits.test_outputs),
        "5-fold": (np.arange(10.0), np.arange(10.0), None),
    }
    cost = {name: row["cost"] for name, row in ways.judge_all(fits, seed=0).items()}
    assert cost["training loss"] == cost["5 flattest"] == 1
    assert cost["20%, log loss"] == 0.8
    assert cost["20%, log loss, refit"] == pytest.approx(0.9)
    assert cost["flattest of 5 best of 20%"] == pytest.approx(1.3)
    assert cost["mean rank of flatness and 20%"] == pytest.approx(1.8)
    assert cost["5-fold, log loss, refit"] == pytest.approx(4.1)


# -- the report -------------------------------------------------------------------------------


def stored(n_splits, names=("digits", "breast cancer"), seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame([
        {"data": name, "space": space, "split": split, "converged": 60, "way": way,
         "error": 10 + shift + rng.normal(), "regret": shift, "top5": 1.0, "tau": 0.1, "cost": 1.0}
        for name in names for space in tasks.SPACES for split in range(n_splits)
        for way, shift in ((selection_report.BASE, 0.0), ("random", 1.0), ("training loss", 0.5))
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("n_splits", "names", "over"),
    [(6, ("digits",), "split"), (1, ("digits", "breast cancer", "wine"), "data")],
    ids=["splits", "one split of each data set"],
)
def test_differences_have_the_interval_of_a_paired_test(n_splits, names, over):
    rows = stored(n_splits, names)
    rows = rows[rows["space"] == "mixed"]
    wide = rows.pivot_table(index=over, columns="way", values="error")
    expected = ttest_rel(wide["random"], wide[selection_report.BASE])
    low, high = expected.confidence_interval(0.95)
    found = selection_report.compare(rows).set_index("way").loc["random"]
    assert found["difference"] == pytest.approx((low + high) / 2)
    assert found["width"] == pytest.approx((high - low) / 2)


def test_rows_of_a_unit_are_replaced(tmp_path):
    path = tmp_path / "results" / "rows.csv"
    rows = stored(2, names=("digits",))
    by_unit = [some.to_dict("records") for _, some in rows.groupby(["space", "split"])]
    for unit in [*by_unit, by_unit[0][:1]]:  # the last time with fewer ways
        selection.store_rows(path, unit)
    found = selection.read(path)
    assert len(found) == len(rows) - 2
    assert (found.groupby(["space", "split"]).size() == [1, 3, 3, 3]).all()


def test_without_dropout_splits_that_are_trained_together_are_those_trained_alone(tmp_path):
    together, alone = (
        [selection.Unit("wine", "equal", split, None, tmp_path / name, 3) for split in (0, 1)]
        for name in ("together", "alone")
    )
    selection.train_together(together, ["all", *selection.FOLDS], "cpu")
    assert {path.name for path in (tmp_path / "together").iterdir()} >= {
        f"wine-equal-{split}-{part}.pt" for split in (0, 1) for part in ("all", "20%", "10-fold")
    }
    for one, other in zip(together, alone, strict=True):
        for nets in zip(one.outcome("all"), other.outcome("all"), strict=True):
            assert all(map(torch.equal, *nets))
        for part in ("5%", "5-fold"):
            held_out, expected = one.outcome(part), other.outcome(part)
            np.testing.assert_array_equal(held_out["losses"], expected["losses"])
            assert held_out["n"] == expected["n"] > 0


@pytest.mark.scale
def test_an_interrupted_study_goes_on(tmp_path):
    options = ("--quick", "--store", tmp_path / "store", "--results", tmp_path / "rows.csv")
    first, second = (
        run("benchmarks.worth.selection", *options, "--space", *spaces)
        for spaces in (["equal"], ["equal", "mixed"])
    )
    assert "wine, equal, split 0, held out" in first
    assert "wine, equal, split 0" not in second
    assert "wine, mixed, split 0, held out" in second
