"""Nets that are trained together, also by scikit-learn, are those that are trained one by one."""

import logging
import pickle
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from joblib import Parallel, delayed
from sklearn.model_selection import GridSearchCV, cross_validate
from skorch.callbacks import Checkpoint, EarlyStopping, GradientNormClipping, LRScheduler
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from relflat_sk import (
    MLP,
    FleetTrainer,
    StopAtGradientNorm,
    StopAtLoss,
    WeightAverage,
    fleet_training,
)
from relflat_sk.fleet._stack import Stack
from tests.cases import Net
from tests.engine.compare import AtEpoch, assert_same, compare, curve, data
from tests.engine.test_any_engine import OPTIMIZERS
from tests.training.common import Classifier, Double, Sam, make

# steps of 16 samples, the last one of fewer
STEPS = {"batch_size": 16, "max_epochs": 5, "verbose": 0}


def make_each(settings, kind=Classifier):
    return [
        kind(**{"lr": 0.003 * (1 + seed), "random_state": seed, **STEPS, **params})
        for seed, params in enumerate(settings)
    ]


def classifiers(n=5, **arguments):
    return make_each([arguments] * n)


@pytest.fixture(autouse=True)
def stacked(caplog):
    """Fail if nets are trained one by one, unless the test expects it."""
    caplog.set_level(logging.INFO, logger="relflat_sk")
    yield
    messages = [record.getMessage() for record in caplog.get_records("call")]
    for message, reason in zip(messages, getattr(caplog, "reasons", []), strict=True):
        assert message.startswith("trained one by one: ")
        assert reason in message


# -- networks in float64 -----------------------------------------------------------------


def network(run, width=8, **parts):
    """Two layers and other parts, and the function of them that is the forward pass."""
    layers = {"first": nn.Linear(6, width), "last": nn.Linear(width, 3)}
    return Net(run, **(layers | parts)).double()


def plain(net, x):
    return net.last(torch.tanh(net.first(x)))


def normed(net, x):
    return net.last(torch.relu(net.norm(net.first(x))))


def batch_norm(bias=False):
    # a bias in front of the norm has no gradient but rounding errors, of which Adam makes steps
    return network(normed, first=nn.Linear(6, 8, bias), norm=nn.BatchNorm1d(8))


def convolved(net, x):
    return net.last(net.pool(torch.relu(net.first(x))).flatten(1))


def convolution():
    return network(convolved, first=nn.Conv2d(1, 3, 3), pool=nn.MaxPool2d(2), last=nn.Linear(12, 3))


def holding(net, x):
    net.norm = net.last.weight.square().sum()
    return plain(net, x)


def shared_weight(net, x):
    h = torch.tanh(net.first(x))
    return net.last(h + F.linear(h, net.last.weight).sum(1, keepdim=True))


def shared_rows(net, x):
    h = torch.tanh(net.first(x))
    return net.last(h + h.mean(0))


def called_twice(net, x):
    h = torch.tanh(net.first(x))
    return net.last(h + net.last(h).sum(1, keepdim=True))


def mapped(net, x):
    return {"logits": plain(net, x), "other": x}


def scaled(net, x):
    return plain(net, net.activation(x * net.scales[0]))


def configured(scale, activation):
    net = network(scaled)
    net.scales, net.activation = [scale], activation
    return net


def ordered(kind):
    """A chain that uses one of two activations twice."""
    known = {nn.Tanh: nn.Tanh(), nn.Sigmoid: nn.Sigmoid()}
    activations = known[nn.Tanh], known[nn.Sigmoid], known[kind]
    layers = [part for activation in activations for part in (nn.Linear(6, 6), activation)]
    return nn.Sequential(*layers, nn.Linear(6, 3)).double()


class Focal(nn.CrossEntropyLoss):
    def forward(self, output, target):
        losses = F.cross_entropy(output, target, reduction="none")
        return (losses * (1 - (-losses).exp())).mean()


X, Y = data()
IMAGES, LABELS = data(n_features=36)
IMAGES = IMAGES.reshape(-1, 1, 6, 6)
IGNORED = torch.from_numpy(np.where(np.arange(50) % 7, Y, -100))  # 8, fewer than a batch has
WEIGHTS = np.where(Y == 0, 0.0, 1.0 + X[:, 0] ** 2)
OWN_DATA = [
    (X, Y), (X, 2 - Y), (X[::-1].copy(), Y), (X[:20], Y[:20]), (X[:20], Y[-20:]), (X, Y, WEIGHTS)
]  # fmt: skip
SIZES = {"module__n_features": 6, "module__n_outputs": 3}
FREE, FIRST = {"flatness_weight": 0}, {"flatness_layer": 0}
SHORT = {"flatness_weight": 0, "max_epochs": 3}
NORMED = {"module": batch_norm, "optimizer": torch.optim.SGD}
HEAVY_CLASS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
EARLY = [EarlyStopping("train_loss", patience=1, threshold=0.05)]
EARLY += [LRScheduler("StepLR", step_size=2, gamma=0.3)]
# settings of each net, and arguments of `compare`
ALIKE = {
    "batch norm": ([NORMED] * 3, {}),
    "convolutions": ([{"module": convolution}] * 3, {"X": IMAGES, "y": LABELS}),
    "weights of classes in any network": (
        [NORMED | {"criterion__weight": [1.0, heavy, 1.0]} for heavy in (1.0, 5.0)],
        {},
    ),
    "callbacks of epochs": ([{"callbacks": EARLY, "lr": 0.05}] * 5, {"fleet": 3}),
    "averages of weights": ([{"callbacks": [WeightAverage()]}] * 3, {}),
    "data of each": ([{}] * 6, {"each": OWN_DATA}),
    "results of the forward pass": ([{"module": partial(network, holding)}] * 2, {}),
    "mappings": ([{"module": partial(network, mapped), "flatness_weight": w} for w in (1, 2)], {}),
    # nets of several groups, side by side
    "activations in other places": (
        [SHORT | {"module": ordered, "module__kind": kind} for kind in [nn.Tanh, nn.Sigmoid] * 2],
        {},
    ),
    "other attributes": (
        [
            SHORT | {"module": configured, "module__scale": scale, "module__activation": activation}
            for activation in (torch.tanh, torch.sin)
            for scale in (1.0, 2.0, 1.0)
        ],
        {"fleet": 6},
    ),
}


@pytest.mark.parametrize("case", ALIKE)
def test_a_fleet_trains_each_net_as_by_itself(case):
    settings, arguments = ALIKE[case]
    compare(make_each(settings), **arguments)


@pytest.mark.parametrize(
    ("criterion", "y"), [(nn.CrossEntropyLoss, IGNORED), (Focal, torch.from_numpy(Y))]
)
def test_criteria_without_formulas_are_trained_one_by_one(criterion, y, caplog):
    settings = SHORT | SIZES | {"module": Double, "criterion": criterion}
    dataset = TensorDataset(torch.from_numpy(X), y)
    settings["iterator_train__drop_last"] = True
    compare(make_each([settings] * 2), each=[(dataset, None)] * 2)
    caplog.reasons = ["there is no formula for"]


def dropping():
    layers = nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 3)
    return nn.Sequential(*layers).double()


def run_inside(net, x):
    return net.inside(x)


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (dropping, FREE),
        (lambda: Net(run_inside, inside=dropping()), FREE),
        (lambda: Net(run_inside, inside=dropping()), {}),
    ],
    ids=["chain", "module", "penalised"],
)
def test_dropout_has_a_stream_that_depends_on_the_seed_alone(module, settings):
    nets = classifiers(3, module=module, **settings)
    together = FleetTrainer(nets, fleet=3).fit(X, Y).estimators_
    assert_same(together[2], FleetTrainer(nets[1:], fleet=2).fit(X, Y).estimators_[1])


EQUAL = {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9, "lr": 0.02}


@pytest.mark.parametrize("optimizer", [{}, EQUAL], ids=["Adam", "equal SGD"])
def test_members_leave_at_their_goals_and_others_take_their_places(optimizer):
    """A net that begins has no state of its optimizer beside others of the same settings."""
    goals = [StopAtLoss(0.9), StopAtGradientNorm(0.5), StopAtLoss(0.5)] * 2
    settings = [{"max_epochs": 16, "callbacks": [goal], **optimizer} for goal in goals]
    trained = compare(make_each(settings), fleet=3)
    assert len({len(net.history) for net in trained}) > 2
    assert any(net.converged_ for net in trained)


@pytest.mark.parametrize("layer", [-1, "all"])
@pytest.mark.parametrize("weighted", [False, True])
def test_folds_of_unequal_size_and_other_optimizers_are_one_stack(layer, weighted, monkeypatch):
    sizes, made = [], Stack.__init__
    monkeypatch.setattr(
        Stack, "__init__", lambda self, jobs: (sizes.append(len(jobs)), made(self, jobs))[1]
    )
    optimizers = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD] * 2
    nets = make_each([
        {"optimizer": optimizer, "flatness_layer": layer, "batch_size": 8, "max_epochs": 3}
        for optimizer in optimizers
    ])
    # 6 batches each, of which the last ones have 2 to 5 samples
    each = [(X[:n], Y[:n], *([WEIGHTS[:n]] if weighted else [])) for n in (45, 44, 43, 42, 45, 44)]
    compare(nets, each=each, fleet=6)
    assert sizes == [6] * 3


def test_a_net_that_diverges_harms_no_other():
    nets = classifiers(4, optimizer=torch.optim.SGD)
    nets[1].set_params(lr=1e30)
    with pytest.warns(match="has diverged"):
        trained = FleetTrainer(nets, fleet=4).fit(X, Y).estimators_
    with pytest.warns(match="has diverged"):
        singles = [net.fit(X, Y) for net in nets]
    for net, member in zip(singles, trained, strict=True):
        np.testing.assert_allclose(curve(net), curve(member), atol=1e-8)


def test_data_that_callbacks_change_are_each_members_own():
    def change(by, net, dataset):
        dataset.X[:] += by
        dataset.y[:] = dataset.y[::-1].copy()

    changes = [[], [AtEpoch(3, partial(change, 1.0))], [AtEpoch(3, partial(change, 2.0))], []]
    settings = [{"train_split": None, "callbacks": callbacks} for callbacks in changes]
    compare(make_each(settings), X=X.tolist(), y=Y)  # each fit makes an array of its own


def test_a_trained_net_holds_its_own_tensors_only():
    trained = FleetTrainer(classifiers(8), fleet=8).fit(X, Y).estimators_
    alone = classifiers(1)[0].fit(X, Y)
    assert len(pickle.dumps(trained[0])) < 1.1 * len(pickle.dumps(alone))
    assert len(trained[0].partial_fit(X, Y).history) == 2 * STEPS["max_epochs"]


def test_seeds_and_torchs_random_state_stay_apart():
    net = Classifier(max_epochs=2, verbose=0)
    curves = []
    for _ in range(2):
        torch.manual_seed(0)
        trained = FleetTrainer([net] * 3, fleet=2).fit(X, Y).estimators_
        curves.append([curve(member) for member in trained])
    assert curves[0] == curves[1]
    assert curves[0][0] != curves[0][1]
    before = torch.get_rng_state()
    FleetTrainer([net.set_params(random_state=1)], fleet=None).fit(X, Y)
    assert torch.equal(before, torch.get_rng_state())


def test_fleets_and_fits_in_threads_take_turns():
    """Torch has one random state for all threads."""

    def curves(seeds):
        nets = [make(max_epochs=15, random_state=seed) for seed in seeds]
        together = len(seeds) > 1
        fitted = FleetTrainer(nets).fit(X, Y).estimators_ if together else [nets[0].fit(X, Y)]
        return [curve(net) for net in fitted]

    each, state = [range(4), range(4, 8), [8], [9]], torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(curves, each))
    np.testing.assert_array_equal(torch.get_rng_state(), state)
    for own, expected in zip(found, map(curves, each), strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)


def partly(net, x):
    """Use no layer `unused`, and let no gradient go back through the layer `fixed`."""
    return plain(net, x + net.fixed(x).detach())


def chain(change):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    change(net)
    return net


# modules, and those of their parameters that have no gradient
PARTLY_USED = (
    lambda: network(partly, unused=nn.Linear(2, 3), fixed=nn.Linear(6, 6)),
    {"unused.weight", "unused.bias", "fixed.weight", "fixed.bias"},
)
WITH_SCALE = (
    lambda: chain(lambda net: net.register_parameter("scale", nn.Parameter(HEAVY_CLASS.clone()))),
    {"scale"},
)


@pytest.mark.parametrize(
    ("case", "optimizer"), [(PARTLY_USED, "Nesterov"), (PARTLY_USED, "Adam"), (WITH_SCALE, "AdamW")]
)
def test_parameters_without_gradient_stay_as_they_are(case, optimizer, caplog):
    module, unused = case
    for net in compare(classifiers(2, module=module, max_epochs=2, **OPTIMIZERS[optimizer])):
        named = dict(net.module_.named_parameters())
        assert {name for name, parameter in named.items() if parameter.grad is None} == unused
        assert not any(net.optimizer_.state.get(named[name]) for name in unused)
    caplog.reasons = ["does not depend on"]


@pytest.mark.parametrize(
    ("run", "layer", "text"),
    [
        (shared_weight, -1, "the weight of layer 'last' outside of the layer's call"),
        (shared_rows, 0, "depend on other rows"),
        (called_twice, -1, "layer 'last' was called 2 times"),
    ],
)
def test_a_penalty_that_a_net_refuses_is_refused_in_a_fleet(run, layer, text, caplog):
    nets = classifiers(2, module=partial(network, run), flatness_layer=layer)
    for trainer in (nets[0], FleetTrainer(nets, fleet=2)):
        with pytest.raises(ValueError, match=re.escape(text)):
            trainer.fit(X, Y)
    caplog.reasons = [text]


# -- what is trained one by one ----------------------------------------------------------


def drops_twice(net, x):
    return net.last(net.dropout(net.dropout(net.first(x))))


def noisy(net, x):
    return plain(net, x + 0.1 * torch.randn_like(x))


def branching(net, x):
    return plain(net, x if x.mean() > 0 else -x)


def anneals(net, x):
    net.passes += net.training
    return plain(net, x) / (1 + 1 / (1 + net.passes))


def annealing():
    net = network(anneals)
    net.passes = 0
    return net


def double_forward(net):
    first = net[0]
    first.forward = lambda x: 2 * F.linear(x, first.weight, first.bias)


def tie(net):
    net.insert(2, nn.Linear(5, 5).double())
    net.insert(2, net[2])


HOOKED = [
    lambda net: net[0].register_forward_hook(lambda module, inputs, output: 2 * output),
    lambda net: net[0].weight.register_hook(lambda gradient: 2 * gradient),
    double_forward,
]


def own(name):
    """A class of nets with a method of its own, which does what it did."""
    inherited = getattr(Classifier, name)

    def method(self, *args, **kwargs):
        return inherited(self, *args, **kwargs)

    return type("Own", (Classifier,), {name: method})


LARGE_BIAS = {"module": lambda: batch_norm(bias=True).float()}
# in the second epoch; in the others, the nets are trained together
HOOKS = [
    AtEpoch(2, lambda net, _: net.module_.register_forward_hook(lambda *args: None)),
    AtEpoch(3, lambda net, _: net.module_._forward_hooks.clear()),
    StopAtLoss(0.5),
]
FREEZES = [
    AtEpoch(2, lambda net, _: net.module_.hidden0.requires_grad_(False)),
    AtEpoch(3, lambda net, _: net.module_.hidden0.requires_grad_(True)),
]
TRIPLES = AtEpoch(1, lambda net, _: net.criterion_.register_forward_hook(lambda *args: 3 * args[2]))
# parts of the reasons that are logged, and the settings
REASONS = [
    (["callback GradientNormClipping"], {"callbacks": [GradientNormClipping(1.0)]}),
    (["callback WeightAverage"], {"callbacks": [WeightAverage(decay=0.8)]}),
    (["at earlier layers"], FIRST | {"module": batch_norm}),
    # without float64, its bias in front of batch norm would take other steps
    (["rounding errors of first.bias"], FREE | LARGE_BIAS),
    (["flatness_normalize=True"], {"flatness_normalize": True}),
    (["CrossEntropyLoss (reduction='sum'"], {"criterion__reduction": "sum", "lr": 1e-4}),
    (["groups of parameters"], {"optimizer__param_groups": [("hidden*", {"lr": 0.001})]}),
    (["RMSprop"], {"optimizer": torch.optim.RMSprop}),
    (["frozen", "fewer steps"], {"callbacks": FREEZES, "max_epochs": 4}),
    (["its network has hooks"], {"callbacks": HOOKS, "max_epochs": 4}),
    *((["its network has hooks"], {"module": partial(chain, change)}) for change in HOOKED),
    (["parameter twice"], {"module": partial(chain, tie)}),
    (["layer of dropout once"], {"module": lambda: network(drops_twice, dropout=nn.Dropout())}),
    (["bfloat16"], {"module": lambda: chain(lambda net: net.bfloat16())}),
    (["its criterion has hooks"], FREE | {"callbacks": [TRIPLES]}),
    (["attribute passes"], {"module": annealing}),
    (["vmap: called random"], FREE | {"module": partial(network, noisy)}),
    (["torch.func cannot"], FREE | {"module": partial(network, branching)}),
    (["Sam has its own"], {"kind": Sam}),
    *(
        ([f"Own has its own {name}"], {"kind": own(name)})
        for name in ("on_batch_end", "on_grad_computed", "_step_optimizer", "notify")
    ),
]


@pytest.mark.parametrize(("reasons", "settings"), REASONS, ids=[row[0][0] for row in REASONS])
def test_what_cannot_be_stacked_is_trained_one_by_one_and_why_is_logged(reasons, settings, caplog):
    settings = {"kind": Classifier, "max_epochs": 2, **settings}
    kind = settings.pop("kind")
    compare(make_each([settings] * 3, kind))
    caplog.reasons = reasons


def test_a_net_that_cannot_be_stacked_is_penalised_in_the_same_steps(caplog):
    compare(classifiers(1, module=partial(network, branching), flatness_every=2))
    caplog.reasons = ["torch.func cannot"]


def test_nets_with_one_file_of_the_best_weights_are_trained_one_by_one(tmp_path, caplog):
    best = Checkpoint("train_loss_best", dirname=tmp_path, load_best=True)
    settings = {"callbacks": [best], "lr": 0.5, "max_epochs": 7, "flatness_weight": 0}
    compare(make_each([settings] * 3))
    caplog.reasons = ["Checkpoint"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [(convolution, "convolutions are faster one by one"), (MLP, "more than 10 weights")],
)
def test_auto_trains_nets_one_by_one_that_are_about_as_fast_so(module, reason, caplog, monkeypatch):
    monkeypatch.setattr("relflat_sk.fleet._fleet._MANY_NUMBERS", 10 if module is MLP else 10**6)
    nets = classifiers(2, module=module, flatness_weight=0, max_epochs=1)
    FleetTrainer(nets, fleet="auto").fit(X if module is MLP else IMAGES, Y)
    caplog.reasons = [reason]


def test_penalties_of_many_classes_are_trained_one_by_one(monkeypatch, caplog):
    monkeypatch.setattr("relflat_sk._network.tail.MANY", 2)
    monkeypatch.setattr("relflat_sk._engine.job.MANY", 2)
    compare(classifiers(2, max_epochs=2))
    caplog.reasons = ["too many classes"]


def test_arguments_of_the_network_are_passed_on(caplog):
    class Scaled(Double):
        def forward(self, X, scale=1.0):
            return super().forward(X * scale)

    nets = classifiers(2, module=Scaled, **SIZES, flatness_weight=0)
    trained = FleetTrainer(nets).fit(X, Y, scale=2.0).estimators_
    for net, member in zip(nets, trained, strict=True):
        assert_same(net.fit(X, Y, scale=2.0), member)
    caplog.reasons = ["['scale']"]


def too_large(net, x):
    """Need more memory than there is, but for one network alone."""
    try:
        net.last.weight.data_ptr()
    except RuntimeError as error:  # there is none inside of torch.func.vmap
        raise torch.OutOfMemoryError("CUDA out of memory") from error
    return plain(net, x)


def test_a_stack_that_does_not_fit_into_memory_is_not_trained_one_by_one():
    nets = classifiers(2, module=partial(network, too_large), flatness_weight=0)
    with pytest.raises(torch.OutOfMemoryError):
        FleetTrainer(nets).fit(X, Y)


def test_errors_end_all_trainings(same_threads):
    nets = classifiers(3)
    nets[2].set_params(flatness_layer="nowhere")
    with pytest.raises(Exception, match="nowhere"):
        FleetTrainer(nets, fleet=3).fit(X, Y)


# -- fits of scikit-learn ----------------------------------------------------------------


@pytest.mark.usefixtures("same_threads")
@pytest.mark.parametrize("fleet", [4, "auto"])
def test_a_grid_search_finds_the_same(sizes, fleet):
    grid = {"lr": [0.003, 0.03], "random_state": [0, 1]}
    # no share of right labels, which one rounding error may change
    alone, together = (GridSearchCV(make(), grid, cv=3, scoring="neg_log_loss") for _ in range(2))
    alone.fit(*data(48))  # folds of the same size
    with fleet_training(fleet):
        together.fit(*data(48))
    assert max(sizes) == (4 if fleet == 4 else 12)
    for key, values in alone.cv_results_.items():
        if "score" in key and "time" not in key:
            np.testing.assert_allclose(together.cv_results_[key], values, rtol=1e-6, atol=1e-8)
    assert together.cv_results_["params"] == alone.cv_results_["params"]
    assert_same(together.best_estimator_, alone.best_estimator_)


def test_a_search_inside_of_a_fit_runs_in_order(sizes):
    search = GridSearchCV(make(max_epochs=1), {"lr": [0.003, 0.03]}, cv=2, scoring="neg_log_loss")
    alone = cross_validate(search, X, Y, cv=3)["test_score"]
    with fleet_training():
        found = cross_validate(search, X, Y, cv=3)["test_score"]
    np.testing.assert_allclose(found, alone, rtol=1e-6)
    assert max(sizes) == 3


def test_as_many_functions_as_one_likes_in_their_order():
    def score(lr):
        return make(lr=lr, max_epochs=1).fit(X, Y).lr

    rates = np.linspace(0.001, 0.01, 20).tolist()
    with fleet_training(2):
        assert Parallel()(delayed(score)(lr) for lr in rates) == rates
        with Parallel() as parallel:
            for part in (rates[:3], rates[3:5]):
                assert parallel(delayed(score)(lr) for lr in part) == part
        # joblib hands out four functions at first; the next ones wait until it knows of an end
        for n in (1, 4, 5, 9):
            assert Parallel()(delayed(abs)(-i) for i in range(n)) == list(range(n))
    assert Parallel()(delayed(abs)(i) for i in range(3)) == [0, 1, 2]


def searched(error):
    """A search among nets of which one learning rate raises in its second epoch."""

    def fail(net, dataset):
        if net.lr == 0.01:
            raise error

    net = make(callbacks=[AtEpoch(2, fail)])
    return GridSearchCV(net, {"lr": [0.003, 0.01, 0.03]}, cv=2, refit=False)


@pytest.mark.usefixtures("same_threads")
@pytest.mark.filterwarnings("ignore:.* test scores are non-finite")
def test_errors_are_those_of_scikit_learn():
    search = searched(RuntimeError("no luck"))
    with fleet_training(4), pytest.warns(match="2 fits failed out of a total of 6"):
        search.fit(X, Y)
    assert np.isnan(search.cv_results_["mean_test_score"]).tolist() == [False, True, False]
    with fleet_training(4), pytest.raises(RuntimeError, match="no luck"):
        search.set_params(error_score="raise").fit(X, Y)


@pytest.mark.usefixtures("same_threads")
def test_what_ends_the_program_ends_all_fits():
    with fleet_training(4), pytest.raises(SystemExit, match="enough"):
        searched(SystemExit("enough")).fit(X, Y)


def test_filters_of_warnings_are_given_back():
    def fit(lr):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f"rate {lr}")
            make(lr=lr, max_epochs=int(1000 * lr)).fit(X, Y)

    before = list(warnings.filters)
    with fleet_training(4):
        Parallel()(delayed(fit)(lr) for lr in (0.003, 0.01, 0.004))
    assert warnings.filters == before


def test_sizes_and_estimators_are_checked():
    for size in (None, 0, 1.5, "all"):
        with pytest.raises(ValueError, match="fleet must be"), fleet_training(size):
            pass
    with pytest.raises(ValueError, match="at least one estimator"):
        FleetTrainer([]).fit(X, Y)
    with pytest.raises(TypeError, match="must be a list, got a Rel"):
        FleetTrainer(Classifier()).fit(X, Y)
