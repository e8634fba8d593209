"""Tests of `rank_models`: the table of a search, for models that are trained already."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neural_network import MLPClassifier
from torch import nn

from relflat_sk import FlatnessScorer, FlatnessWarning, rank_models, relative_flatness
from tests.search.examples import X_TEST, Y_TEST, X, Y, logistic, make_net, piped

CE = nn.CrossEntropyLoss()
KAPPA = {"measure": "relative_flatness", "random_state": 0}
OF_MODULE = {"criterion": CE, **KAPPA}


def build(weights=None):
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    if weights is not None:
        net.load_state_dict(weights)
    return net


@pytest.fixture(scope="module")
def steps():
    """State dicts of a network along its training."""
    torch.manual_seed(0)
    net, saved = build(), {}
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(1, 31):
        optimizer.zero_grad()
        CE(net(torch.tensor(X)), torch.tensor(Y)).backward()
        optimizer.step()
        if step % 10 == 0:
            saved[f"step {step}"] = copy.deepcopy(net.state_dict())
    return saved


@pytest.fixture(scope="module")
def expected(steps):
    """What each checkpoint's module alone gives."""
    nets = {name: build(weights) for name, weights in steps.items()}
    return {name: relative_flatness(net, X, Y, criterion=CE) for name, net in nets.items()}


def assert_ranked(table, expected):
    """Compare a table of checkpoints with the flatness of each, by name."""
    found = table.set_index("model")["relative_flatness"].to_dict()
    assert found == pytest.approx(expected, rel=1e-6)
    assert list(found) == sorted(expected, key=expected.get)
    assert table["rank"].tolist() == [1, 2, 3]
    assert table["converged"].all()


def test_the_table_is_that_of_a_search():
    names = ["relative_flatness", "hessian_trace"]
    search = logistic(measure=names).fit(X, Y, X_TEST, Y_TEST)
    models = (search.get_estimator(number) for number in range(3))
    held_out = {"X_test": X_TEST, "y_test": Y_TEST}
    table = rank_models(models, X, Y, measure=names, **held_out, random_state=0)
    assert table.attrs == search.minima_.attrs
    table = table.drop(columns=["model", "param_random_state"])
    # nobody knows how long training took
    assert_frame_equal(table, search.minima_.assign(seconds=np.nan), rtol=1e-12)


def test_rankings_in_threads_give_torchs_random_state_back(steps):
    arguments = [{"module": build(), **OF_MODULE} for _ in range(8)]
    state = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        rankings = [pool.submit(rank_models, steps, X, Y, **each) for each in arguments]
    assert all(ranking.result()["rank"].tolist() == [1, 2, 3] for ranking in rankings)
    assert torch.equal(torch.get_rng_state(), state)


def test_models_of_several_kinds_have_columns_for_what_differs_within_a_kind():
    sgd = {"module__hidden_layer_sizes": (4, 3), "optimizer": torch.optim.SGD}
    nets = [make_net(random_state=0, **params) for params in ({}, {"module__activation": "tanh"})]
    models = [
        *(LogisticRegression(C=C, max_iter=500) for C in (0.5, 1.0)),
        *(*nets, make_net(random_state=0, **sgd)),
        piped(LogisticRegression(max_iter=500)),  # one of its kind
    ]
    fitted = (model.fit(X, Y) for model in models)
    table = rank_models(fitted, X, Y, **KAPPA).set_index("trial").sort_index()
    # all kinds have verbose, 0 or False, and two of them random_state; the first net does not say
    # that its activation is the default
    of_nets = ["random_state", "verbose", "optimizer"]
    of_nets += ["module__hidden_layer_sizes", "module__activation"]
    columns = table.filter(like="param_").columns.tolist()
    assert columns == [f"param_{name}" for name in ("C", *of_nets)]
    assert table["param_C"].tolist()[:2] == [0.5, 1.0]
    assert table["param_module__hidden_layer_sizes"][4] == "(4, 3)"  # as in a search
    assert table["param_optimizer"].tolist()[3:5] == ["Adam", "SGD"]


def test_models_of_different_losses_are_not_compared_in_silence():
    models = [LogisticRegression(max_iter=500), Ridge(), LogisticRegression(class_weight={0: 9})]
    models = [model.fit(X, Y) for model in models]
    entropy, variance = np.log(3), np.var(Y)
    match = f"the models, from {variance:.4g} of '1' to {entropy:.4g} of '0'. They have different"
    with pytest.warns(FlatnessWarning, match=match):
        rank_models(models[:2], X, Y, **KAPPA)
    with pytest.warns(FlatnessWarning, match="losses, weights of classes or units"):
        rank_models(models[::2], X, Y, **KAPPA)


def test_a_search_is_ranked_as_its_best_estimator():
    """Its own predictions may be the mean of several networks."""
    search = logistic().fit(X, Y)
    best, other = search.best_estimator_, search.get_estimator(search.minima_["trial"][2])
    table = rank_models([search, best, other], X, Y, **KAPPA).set_index("trial")
    columns = ["train_loss", "train_score", "relative_flatness"]
    np.testing.assert_array_equal(*table.loc[[0, 1], columns].to_numpy())


READERS = {  # what is saved, and the arguments that read it
    "weights": (lambda weights: weights, {"module": build()}),
    "modules": (build, {"load": lambda path: torch.load(path, weights_only=False)}),
}


@pytest.mark.parametrize("saved", READERS)
def test_paths_are_loaded_one_after_the_other(saved, steps, expected, tmp_path):
    content, arguments = READERS[saved]
    paths = [tmp_path / f"{name}.pt" for name in steps]
    for path, weights in zip(paths, steps.values(), strict=True):
        torch.save(content(weights), path)
    of_paths = dict(zip(map(str, paths), expected.values(), strict=True))
    for models, by_name in (
        (tmp_path.glob("*.pt"), of_paths),
        (map(str, paths), of_paths),
        (zip(steps, paths, strict=True), expected),
    ):
        assert_ranked(rank_models(models, X, Y, **arguments, **OF_MODULE), by_name)


def test_state_dicts_of_a_net(steps, expected):
    net = make_net(module__hidden_layer_sizes=(5,), module__activation="tanh").fit(X, Y)
    before = copy.deepcopy(net.module_.state_dict())
    renamed = {name: dict(zip(before, w.values(), strict=True)) for name, w in steps.items()}
    table = rank_models(renamed, X, Y, module=net, X_test=X_TEST, y_test=Y_TEST, **KAPPA)
    assert_ranked(table, expected)
    assert table["ended_by"].eq("").all()  # the record of the net is of other weights
    classes = [build(one)(torch.tensor(X)).argmax(1).numpy() for one in steps.values()]
    scores = [(found == Y).mean() for found in classes]
    assert table.sort_values("trial")["train_score"].tolist() == pytest.approx(scores)
    torch.testing.assert_close(net.module_.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("is_named", [False, True])
def test_an_iterator_holds_one_model_at_a_time(is_named, steps):
    alive = weakref.WeakSet()

    def make(step):
        if alive:  # by a cycle only
            gc.collect()
        assert not alive
        net = build(steps[step])
        alive.add(net)
        return net

    models = {"models": iter(steps), "load": make} if is_named else {"models": map(make, steps)}
    assert len(rank_models(X=X, y=Y, **models, **OF_MODULE)) == 3


@pytest.mark.parametrize("ends", ["well", "measure", "weights"])
def test_the_module_gets_its_own_weights_back(ends, steps):
    module = build().train()
    before = copy.deepcopy(module.state_dict())

    def interrupting(model, inputs, labels):
        assert torch.equal(model[0].weight, steps["step 10"]["0.weight"])
        raise KeyboardInterrupt

    items = [{"0.weight": torch.ones(5, 4)}] if ends == "weights" else [steps["step 10"]]
    options = OF_MODULE | ({"measure": interrupting} if ends == "measure" else {})
    errors = {"measure": KeyboardInterrupt, "weights": ValueError}
    with pytest.raises(errors[ends]) if ends in errors else nullcontext():
        rank_models(items, X, Y, module=module, **options)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())


def scale_head(weights, factor):
    return {key: factor * one if key[0] == "2" else one for key, one in weights.items()}


@pytest.mark.filterwarnings("ignore:.*models are no minima:relflat_sk.FlatnessWarning")
def test_by_default_models_of_all_depths_are_compared_at_equal_loss(steps):
    scaled = {f"x {c}": scale_head(steps["step 30"], c) for c in (0.5, 1, 30)}
    scorer = FlatnessScorer("comparable_flatness", measure_params={"at_loss": 0.3})
    options = {"module": build(), "criterion": CE, "measure": scorer}
    table = rank_models(scaled | {"first": build().state_dict()}, X, Y, **options)
    assert table["comparable"].tolist() == [True, True, True, False]
    depths, values = table["depth"][:3], table["comparable_flatness"][:3]
    assert depths.max() > 3 * depths.min()  # more than a band
    assert values.max() == pytest.approx(values.min(), rel=1e-3)
    assert "no better than a constant" in table["reason"][3]


def test_models_without_a_value_rank_last_with_a_reason(steps, expected, tmp_path):
    last = steps["step 30"]
    reasons = {  # a model, what its reason says
        "dead": (scale_head(last, 0.0), "no better than a constant"),
        "nan": (scale_head(last, torch.nan), "not finite"),
        "none": (nn.Flatten(), "LayerNotFoundError"),
        "missing": (tmp_path / "none.pt", "^FileNotFoundError"),
        "other": ({"0.weight": torch.ones(5, 4)}, "(?s)0.bias.*2.weight.*2.bias"),
        "empty": (None, "^TypeError: a model of type NoneType"),
    }
    models = {name: model for name, (model, _) in reasons.items()}
    with pytest.warns(FlatnessWarning, match="6 of 9 models are no minima") as warned:
        table = rank_models({**models, **steps}, X, Y, module=build(), **OF_MODULE)
    assert "the training loss is not finite" in str(warned[-1].message)
    assert_ranked(table[:3], expected)
    table = table.set_index("model")
    for name, (_, reason) in reasons.items():
        assert table.loc[[name], "reason"].str.contains(reason).all(), table["reason"][name]
        assert np.isfinite(table["depth"][name]) == (name == "dead")
    assert table["state"][["none", "missing"]].eq("failed").all()


def test_models_may_share_the_weights_of_the_module(steps, expected):
    module = build(steps["step 30"])
    for shared in (module.state_dict(), module):
        models = {**steps, "step 30": shared}
        assert_ranked(rank_models(models, X, Y, module=module, **OF_MODULE), expected)


WEIGHTS = build().state_dict()
WIDER = WEIGHTS | {"2.weight": torch.ones(3, 9)}
MISSPELT = FlatnessScorer(measure_params={"n_probs": 3})


@pytest.mark.parametrize(
    ("models", "arguments", "error", "match"),
    [
        ([], {}, ValueError, "models is empty"),
        (WEIGHTS, {}, TypeError, "got a single OrderedDict"),
        (LogisticRegression(), {}, TypeError, "got a single LogisticRegression"),
        (Path("runs"), {}, TypeError, "got a single .*Path"),
        ([WEIGHTS], {}, ValueError, "pass module="),
        ([Path("none.pt")], {"module": build()}, ValueError, "FileNotFoundError"),
        ([WIDER], {"module": build()}, ValueError, "size mismatch for 2.weight"),
        ([WEIGHTS], {"module": MLPClassifier()}, TypeError, "must be a torch module"),
        ([build()], {"criterion": None}, ValueError, "criterion is needed for a bare module"),
        ([build()], {"measure": FlatnessScorer(layer="5")}, ValueError, "layer='5' cannot be"),
        ([build()], {"X_test": X[:, :2], "y_test": Y}, ValueError, "X_test and y_test cannot"),
        ([build()], {"X_test": X}, ValueError, "X_test and y_test go together"),
        ([build()], {"measure": []}, ValueError, r"measure must be a name, .* got \[\]"),
        ([build()], {"measure": MISSPELT}, TypeError, "'n_probs' is no argument"),
    ],
)
def test_what_cannot_be_ranked_is_refused(models, arguments, error, match):
    with pytest.raises(error, match=match):
        rank_models(models, X, Y, **{**OF_MODULE, **arguments})


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError("disk"), "models ended with OSError: disk"), (KeyboardInterrupt(), "interrupted")],
)
def test_the_table_has_what_was_measured_if_the_call_ends_early(error, why, steps):
    def failing(n):
        yield from list(steps.values())[:n]
        raise error

    options = {"module": build(), **OF_MODULE}
    with pytest.warns(FlatnessWarning, match=f"^{why}: the table has the 2 models"):
        table = rank_models(failing(2), X, Y, **options)
    assert table.attrs["ended"] == why
    assert table.equals(rank_models(list(steps.values())[:2], X, Y, **options))
    with pytest.raises(type(error)):
        rank_models(failing(0), X, Y, **options)
