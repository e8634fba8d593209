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
from benchmarks.worth import selection, selection_report
from relflat_sk import measure
from tests import oracles
from tests.benchmarks.commands import run

# -- training ---------------------------------------------------------------------------------


def plain_loop(one, X, y):
    """Train one candidate with torch's own layers and optimizer, from the same draws."""
    generator = torch.Generator().manual_seed(one.seed)
    sizes = [X.shape[1], *one.hidden, 1 if y.is_floating_point() else int(y.max()) + 1]
    layers = []
    for n_in, n_out in pairwise(sizes):
        layer = nn.Linear(n_in, n_out)
        for parameter, shape in ((layer.weight, (n_in, n_out)), (layer.bias, (1, n_out))):
            draw = (2 * torch.rand(*shape, generator=generator) - 1) / math.sqrt(n_in)
            parameter.data.copy_(draw.T if parameter.ndim == 2 else draw[0])
        layers += [layer, nn.ReLU()]
    net = nn.Sequential(*layers[:-1])
    criterion = nn.MSELoss() if y.is_floating_point() else nn.CrossEntropyLoss()

    def loss(X, y):
        return criterion(net(X)[:, 0] if y.is_floating_point() else net(X), y)

    optimizer = torch.optim.SGD(
        net.parameters(), lr=one.lr, momentum=0.9, weight_decay=one.weight_decay
    )
    for _ in range(one.epochs):
        for rows in torch.randperm(len(X), generator=generator).split(one.batch_size):
            optimizer.zero_grad()
            loss(X[rows], y[rows]).backward()
            optimizer.step()
        if loss(X, y) <= one.goal:
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


@pytest.mark.parametrize("space", tasks.SPACES)
def test_spaces_have_sixty_candidates_with_seeds_of_their_split(space):
    first, second = (tasks.candidates(space, split, 0.1) for split in (0, 1))
    assert len(first) >= 60
    assert first == tasks.candidates(space, 0, 0.1)
    assert not {one.seed for one in first} & {one.seed for one in second}
    for name in ("batch_size", "lr"):
        assert len({getattr(one, name) for one in first}) > 1
    same = space == "equal"
    for name in ("hidden", "weight_decay", "dropout", "epochs"):
        assert (len({getattr(one, name) for one in first}) == 1) == same


@pytest.mark.parametrize("name", [name for name in tasks.TASKS if name != "CIFAR-10"])
def test_data_sets_are_split_anew_and_mislabelled_in_training_only(name):
    task = tasks.TASKS[name]
    one, again, other = task.split(0), task.split(0), task.split(1)
    assert_close(one.X, again.X, rtol=0, atol=0)
    assert_close(one.y, again.y, rtol=0, atol=0)
    assert one.X.shape == other.X.shape
    assert (one.X != other.X).any()
    assert abs(one.X.mean()) < 1e-5
    assert len(one.y_test) >= 88
    assert one.y.is_floating_point() == (name in selection_report.REGRESSIONS)


def test_a_share_of_labels_is_wrong():
    wrong, right = (tasks.TASKS[name].split(3) for name in ("digits, 20% wrong labels", "digits"))
    assert_close(wrong.X, right.X, rtol=0, atol=0)
    assert (wrong.y != right.y).double().mean() == 0.2
    assert (wrong.y_test == right.y_test).all()


# -- scores -----------------------------------------------------------------------------------


@pytest.fixture
def head():
    """Features, a last layer without bias, its outputs, and labels; float64."""
    rng = np.random.default_rng(0)
    phi, weight = rng.random((30, 6)), rng.normal(size=(4, 6))
    phi[:, 5] = 0.7  # never varies
    z = phi @ weight.T
    y = z.argmax(axis=1)
    y[0] = (y[0] + 1) % 4
    return phi, weight, z, y


def dense(phi, weight, y, temperature):
    """Definition 3 of the network ``softmax(W phi / T)`` with criterion ``CE(z / T)``."""
    net = nn.Sequential(nn.Linear(6, 4, bias=False)).double()
    net[0].weight.data = torch.tensor(weight)
    tempered = lambda z, y: nn.functional.cross_entropy(z / temperature, y)  # noqa: E731
    return oracles.relative_flatness(net, "0", tempered, torch.tensor(phi), torch.tensor(y))


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_forms_of_flatness_are_those_of_the_dense_hessian(head, temperature):
    phi, weight, z, y = head
    kappa, decoupled, product = ways.flatness_forms(
        phi, weight, lambda w: ways.curvature(w, z, temperature)
    )
    assert kappa == pytest.approx(dense(phi, weight, y, temperature) / 6, rel=1e-9)

    def loss_of_z(z_varying):
        constant = torch.tensor(phi[:, 5:] @ weight[:, 5:].T)
        return nn.functional.cross_entropy((z_varying + constant) / temperature, torch.tensor(y))

    spread = torch.tensor(phi.std(axis=0))
    spread[5] = 0
    expected = oracles.normalized_relative_flatness(
        torch.tensor(phi), torch.tensor(weight), loss_of_z, spread
    )
    assert product == pytest.approx(expected / 6, rel=1e-6)
    # the decoupled form: the features' total variance times the mean curvature along the weight
    traces = []
    for row in range(30):

        def loss(z_row, row=row):
            return nn.functional.cross_entropy(z_row[None] / temperature, torch.tensor(y[[row]]))

        B = torch.func.hessian(loss)(torch.tensor(z[row])).numpy()
        traces.append(np.trace(weight.T @ B @ weight))
    assert decoupled == pytest.approx(phi.var(axis=0).sum() * np.mean(traces) / 6, rel=1e-9)


def test_temperatures_give_the_loss_and_undo_a_rescaling(head):
    _, _, z, y = head
    losses = [0.5, 0.9, 1e-9]
    found = ways.temperatures(np.array([z, 5 * z]), y, losses)
    for loss, (t, rescaled) in zip(losses[:2], found, strict=False):
        reached = nn.functional.cross_entropy(torch.tensor(z / t), torch.tensor(y))
        assert reached.item() == pytest.approx(loss, rel=1e-6)
        assert rescaled == pytest.approx(5 * t, rel=1e-6)
        # the largest such temperature: every larger one has a larger loss
        larger = [nn.functional.cross_entropy(torch.tensor(z / (t * f)), torch.tensor(y))
                  for f in (1.01, 2.0, 10.0, 100.0)]  # fmt: skip
        assert min(larger) > loss
    assert np.isnan(found[2]).all()  # a label is wrong, and no temperature makes up for it


@pytest.mark.parametrize("regression", [False, True], ids=["classes", "values"])
def test_the_form_at_equal_loss_is_the_librarys_comparable_flatness(regression):
    X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = X[:, 0] + X[:, 1] ** 2 if regression else (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
    (weights,) = stacked.train([stacked.Candidate((8,), 16, 0.02, seed=0, epochs=60)], [(X, y)])
    z, constant = selection.array(selection.apply(weights, X)), tasks.constant_loss(y)
    phi, head = selection.array(selection.features(weights, X)), selection.array(weights[-2].T)
    loss = stacked.mean_losses(torch.tensor(z)[None], y[None]).numpy()
    fits = ways.Fits(
        y.numpy(), y.numpy(), loss, constant, [phi], [head], [z], [z], np.array([True]),
        pd.DataFrame(),
    )  # fmt: skip
    form = ways.FORMS[1] + (" over loss" if regression else " at 0.2")
    found = ways.flatness_scores(fits)[form][0] * (0.2 * constant if regression else 1)
    expected = measure(
        "comparable_flatness", stacked.to_module(weights), X, y,
        criterion=stacked.criterion_of(y), at_loss=0.2,
    )  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-4)


def test_flattest_of_the_best_few_takes_the_flattest():
    held_out = np.array([0.3, 0.1, 0.2, 0.4, np.nan])
    flat = np.array([1.0, 9.0, 5.0, 0.1, 0.0])
    scores = ways.best_of_few(held_out, flat, 2)
    # the flatter one of the two best held out, then by the held-out loss
    assert np.argsort(scores).tolist() == [2, 1, 0, 3, 4]


# -- judging ----------------------------------------------------------------------------------


def made_up(errors, n=100):
    """Make fits whose test errors are given, in points; candidates err on the last samples."""
    y = np.arange(n) % 2
    right = np.where(np.arange(2) == y[:, None], 5.0, 0.0)
    of_test = [np.where(np.arange(n)[:, None] < n - wrong, right, 5 - right) for wrong in errors]
    k = len(errors)
    blank = [np.ones((n, 3))] * k
    return ways.Fits(
        y, y, np.linspace(0.1, 0.2, k), math.log(2), blank, [np.ones((2, 3))] * k,
        [right] * k, of_test, np.ones(k, dtype=bool), pd.DataFrame({"l2_norm": range(k)}),
    )  # fmt: skip


def judged(fits, scores, size=1):
    errors = ways.test_errors(fits.test_outputs, fits.y_test)
    way = ways.Way(np.array(scores, dtype=float), 1.0, fits.test_outputs, errors, size)
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
    assert judged(fits, [1, 2, 3, 4, 5, 6, 7], size=5)["error"] == pytest.approx(40)
    assert judged(fits, [7, 6, 5, 1, 2, 3, 4], size=5)["error"] == pytest.approx(0)
    assert math.isnan(judged(fits, np.arange(7), size=5)["top5"])


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


def test_differences_have_the_interval_of_a_paired_test():
    rows = stored(6, names=("digits",))
    rows = rows[rows["space"] == "mixed"]
    wide = rows.pivot_table(index="split", columns="way", values="error")
    expected = ttest_rel(wide["random"], wide[selection_report.BASE])
    low, high = expected.confidence_interval(0.95)
    found = selection_report.compare(rows).set_index("way").loc["random"]
    assert found["difference"] == pytest.approx((low + high) / 2)
    assert found["width"] == pytest.approx((high - low) / 2)
    one = selection_report.compare(rows[rows["split"] == 0]).set_index("way").loc["random"]
    assert math.isnan(one["width"])  # one split has no interval


def test_only_splits_that_both_ways_have_are_compared():
    rows = stored(3, names=("digits",))
    rows = rows[(rows["way"] != "random") | (rows["split"] > 0)]
    assert selection_report.compare(rows).set_index("way").loc["random", "splits"] == 2


def test_critical_differences_are_those_of_the_literature():
    # Demsar (2006), table 5 and the example of section 3.2.2
    assert selection_report.critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert selection_report.critical_difference(2, 10) == pytest.approx(
        1.960 * math.sqrt(2 * 3 / 60), abs=0.001
    )


def test_the_report_prints_tables_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    selection_report.report(stored(2, ("digits", "breast cancer", "wine")), tmp_path / "ranks.png")
    printed = capsys.readouterr().out
    for expected in ("classification, held back; mixed", "regret by data set; equal", "Nemenyi"):
        assert expected in printed
    assert (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")
    selection_report.report(stored(1)[:0])
    assert "nothing to compare" in capsys.readouterr().out


def test_rows_of_a_unit_are_replaced(tmp_path):
    path = tmp_path / "results" / "rows.csv"
    rows = stored(2, names=("digits",))
    by_unit = [some.to_dict("records") for _, some in rows.groupby(["space", "split"])]
    for unit in [*by_unit, by_unit[0][:1]]:  # the last time with fewer ways
        selection.store_rows(path, unit)
    found = selection.read(path)
    assert len(found) == len(rows) - 2
    assert (found.groupby(["space", "split"]).size() == [1, 3, 3, 3]).all()


@pytest.mark.slow
def test_an_interrupted_study_goes_on(tmp_path):
    options = ("--quick", "--store", tmp_path / "store", "--results", tmp_path / "rows.csv")
    first = run("benchmarks.worth.selection", *options, "--space", "equal")
    assert "wine, equal, split 0, held out" in first
    stored_rows = (tmp_path / "rows.csv").read_text()
    second = run("benchmarks.worth.selection", *options)
    assert "wine, equal, split 0" not in second
    assert "wine, mixed, split 0, held out" in second
    assert stored_rows.splitlines()[1:] == [
        line for line in (tmp_path / "rows.csv").read_text().splitlines() if ",equal," in line
    ]
    (tmp_path / "rows.csv").unlink()
    run("benchmarks.worth.selection", *options, "--space", "equal", "--again")
    assert (tmp_path / "rows.csv").read_text() == stored_rows
