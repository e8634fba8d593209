"""What the measures refuse: one table of calls, errors and texts."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from relflat_sk import (
    FlatnessScorer,
    LayerNotFoundError,
    RelativeFlatnessRegularizedClassifier,
    flatness_report,
    layer_sensitivity,
    measure,
    relative_flatness,
)
from relflat_sk.measures._sharpness import keskar_sharpness
from tests.cases import Net
from tests.measures.nets import CE, UNTRAINED, make, network
from tests.measures.test_own import returns, size_of_weights

pytestmark = UNTRAINED
V, T, L = ValueError, TypeError, LayerNotFoundError
NET, X, Y = make("mlp relu")
CONV, IMAGES, LABELS = make("conv")
LINE, INPUTS, NUMBERS = nn.Linear(3, 1).double(), torch.randn(12, 3).double(), torch.randn(12, 1)
IRIS = load_iris(return_X_y=True)
LOGISTIC = LogisticRegression(max_iter=500).fit(*IRIS)
MSE, BCE, IGNORING = nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss(ignore_index=1)
ONES, HALVES = torch.ones(4).long(), torch.full((4, 2), 0.5)


def calls(function, *args, **defaults):
    """Return what makes calls of a function with other arguments, to be made later."""
    return lambda *more, **own: partial(function, *more, *args, **defaults | own)


on_net = calls(measure, NET, X, y=Y, criterion=CE)
flat = calls(relative_flatness, NET, X, y=Y, criterion=CE)
sensitive = calls(layer_sensitivity, NET, X, y=Y, criterion=CE)
report = calls(flatness_report, CONV, IMAGES, LABELS, criterion=CE)
line = calls(measure, LINE, INPUTS, NUMBERS.double(), criterion=MSE)
on_iris = calls(measure, LOGISTIC, *IRIS)


def margin(n_outputs, criterion, y, **own):
    at = nn.Linear(3, n_outputs), torch.randn(4, 3), y
    return partial(measure, "inverse_margin", *at, criterion=criterion, **own)


def scores(*args, **own):
    return lambda: FlatnessScorer(*args, **own)(LOGISTIC, *IRIS)


def called(name):
    def function(model, X, y):
        return 1.0

    function.__name__ = name
    return function


def train_loss(model, X, y):
    return 1.0


def mixing(z, y):
    return (z - y).pow(4).sum(1).mean()


class OnceCube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, outer):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * outer


def half(net, x):
    """Half of what the first layer puts out takes a way that has a second derivative."""
    h = net.first(x)
    return net.last(OnceCube.apply(h) + h.tanh())


ONCE = Net(half, first=nn.Linear(4, 5), last=nn.Linear(5, 3))
once = calls(measure, ONCE, X.float(), Y, criterion=CE)


def once_in_loss(z, y):
    """Torch does not mark this gradient: the one that it is made of is constant."""
    return nn.functional.cross_entropy(z, y) + OnceCube.apply(z).mean()


in_loss = calls(measure, nn.Linear(4, 3), X.float(), Y, criterion=once_in_loss)


HOOKED = nn.CrossEntropyLoss()
HOOKED.register_forward_hook(lambda _, args, loss: 3 * loss)
LAYER_WISE = ["relative_flatness", "trace_flatness", "eigenvalue_flatness", "neuron_flatness_max"]
WHOLE = ["joint_eigenvalue_flatness", "fisher_rao_norm"]
TWICE = [*LAYER_WISE, "joint_eigenvalue_flatness", "hessian_trace", "hessian_max_eigenvalue"]
# values that an argument cannot have
BAD = {
    "relative_flatness": {"n_probes": 1, "rtol": 0, "atol": -1, "max_passes": 2, "batch_size": 0},
    "hessian_trace": {"weight_decay": -1, "layer": 1.5},
    "inverse_margin": {"percentile": 101},
    "group_norm_product": {"p": 0.5, "q": math.nan},
    "expected_sharpness": {"alpha": 0, "n_draws": 1.0},
    "adaptive_sharpness": {"rho": np.inf, "kind": "best", "n_steps": 0},
    "pac_bayes_flatness": {"target": 0.0, "risk": "margin", "n_draws": 1, "random_state": "seed"},
    "pac_bayes_magnitude_flatness": {"eps": -1},
}
METHODS = r"\('auto', 'exact', 'hutchinson'\)"
CHOICES = r"\['adaptive_sharpness', 'comparable_flatness'"
COLUMN = "is a measure or a column of relflat_sk"
REFUSED = [
    *[
        (on_net(name, **{argument: value}), (V, T), f"{argument} must be .*got {value!r}")
        for name, values in BAD.items()
        for argument, value in values.items()
    ],
    # arguments of the measures of layers
    (flat(method="guess"), V, rf"method must be one of {METHODS}, got 'g"),
    (flat(method="hutchinson", random_state="a"), V, "random_state must be an int"),
    (flat(criterion=None), V, "criterion is needed for a bare module"),
    (flat(criterion="mse"), T, "criterion must be a torch loss .* got 'mse'"),
    (flat(criterion=nn.MultiMarginLoss()), V, r"cannot be differentiated twice: .*multi_margin"),
    (flat(y=None, layer=0), V, "y is needed: .* at layer '0'"),
    (flat(y=1 + 0 * Y, criterion=IGNORING), V, "no sample counts in the mean loss"),
    (line("relative_flatness", criterion=mixing, sample_weight=np.ones(12)), V, "for 12 samples"),
    # at equal loss
    (flat(at_loss=1.5), V, "between 0 and 1"),
    (flat(y=None, at_loss=0.1), V, "y is needed"),
    (on_net("l2_norm", at_loss=0.1), V, "no effect on l2_norm"),
    (line("adaptive_sharpness", at_loss=0.1, normalize_logits=True), V, "pass one of the two"),
    (line("comparable_flatness", criterion=nn.HuberLoss()), V, "HuberLoss has none"),
    (on_net("hessian_trace", criterion=once_in_loss, at_loss=0.1), V, "once_in_loss has none"),
    (on_net("hessian_trace", criterion=HOOKED, at_loss=0.1), V, "with hooks has none"),
    # terms of samples
    (on_iris("eigenvalue_flatness", per_sample=True), V, "per_sample=True .* eigenvalue_flatness"),
    (on_iris("relative_flatness", per_sample=True, aggregate="max"), V, "aggregate='max' asks"),
    # sensitivity
    (sensitive(bits=(8, 4.5)), V, "bits must be an integer of at least 2"),
    (sensitive(bits="8"), V, "bits must be an integer of at least 2, got '8'"),
    (sensitive(bits=[]), V, "bits must be an integer of at least 2, got None"),
    (sensitive(layers=9), V, "there is no layer 9"),
    (sensitive(y=None), V, "y is needed"),
    # a function that torch differentiates once only is never taken for flat
    *[(once(name, layer=0), V, "once_differentiable") for name in LAYER_WISE],
    *[(once(name), V, "once_differentiable") for name in WHOLE],
    *[(in_loss(name), V, "once_differentiable") for name in TWICE],
    # names
    (on_net("sharp"), V, f"no measure 'sharp'. Choose from {CHOICES}.* function of model, X and y"),
    (on_net("hessian_trace", aggregate="mean"), V, "aggregate must be 'max', 'sum' or None, got"),
    (lambda: measure(LOGISTIC, "l2_norm", *IRIS), T, "name before the model, .*'l2_norm'"),
    (lambda: measure(LOGISTIC, *IRIS), V, "no measure LogisticRegression"),
    # reports
    (report(measures=[]), T, r"measures must be a name, .* got \[\]"),
    (report(measures=1), T, "measures must be a name, .* got 1"),
    (report(measures=[["l2_norm"]]), V, r"there is no measure \['l2_norm'\]"),
    (report(weight_decay=0.1, measures="normalized_relative_flatness"), V, "weight_decay=0.1 has"),
    (report(layers=[]), V, r'layers must be "all", a layer or a list .* got \[\]'),
    (report(layers=[[0]]), T, r"layer must be an int, .* got \[0\] of type list"),
    (report(layers=7), L, "there is no layer 7"),
    (report(layer=0), T, "'layer' is no argument"),
    # the whole network has no layer
    *[
        (use, V, f"{name} measures the network as a whole.*got .?0")
        for name in ("l2_norm", "network_flatness", "fisher_rao_norm")
        for use in (
            on_iris(name, layer=0), scores(name, layer=0), report(measures=name, layers=[0])
        )
    ],
    # norms, margin and robustness
    (margin(1, MSE, torch.ones(4, 1)), V, "MSELoss is not known as a class"),
    (margin(2, lambda z, y: z.sum(dim=1).mean(), torch.ones(4)), V, "<lambda> is not known"),
    (margin(2, CE, None), V, "y is needed: the margin is that of the true class"),
    (margin(2, CE, ONES, sample_weight=2 * np.ones(4)), V, "leave sample_w"),
    (on_net("log_robustness", sample_weight=2 * np.ones(7)), V, "leave sample_weight out"),
    (margin(2, CE, HALVES), V, "one label for each sample.*float"),
    (margin(1, CE, 0 * ONES), V, "two classes or more"),
    (margin(2, IGNORING, ONES), V, "the criterion ignores all labels"),
    (margin(2, BCE, torch.ones(4, 2)), V, r"0 or 1 for a single logit.* of shape \(4, 2\)"),
    (margin(1, BCE, HALVES[:, :1]), V, r"targets of torch.float\d\d such as \[0.5"),
    (line("l2_norm", over_margin=True), V, "MSELoss is not known as a classification loss"),
    # sharpness
    (lambda: keskar_sharpness(network(nn.Identity(), MSE, [[1.0]], [[1.0]])), V, "no parameters"),
    (line("adaptive_sharpness", normalize_logits=True), V, "normalize_logits .* got MSELoss"),
    (
        calls(measure, nn.Conv1d(2, 3, 1), torch.randn(5, 2, 4), torch.zeros(5, 4).long())(
            "adaptive_sharpness", criterion=CE, normalize_logits=True
        ), V, r"needs outputs of shape .n, n_classes., got .5, 3, 4.",
    ),
    (on_net("fisher_rao_norm", y=None), V, "y is needed to compute a loss"),
    (line("pac_bayes_flatness", risk="error"), V, "a share of errors needs a classifier"),
    (line("pac_bayes_magnitude_flatness", eps=10.0, random_state=0), V, "Use a smaller eps"),
    # measures of the user's own
    *[
        (on_iris(returns(value)), T, "the measure 'own' must return a number, or a pair")
        for value in ("3", None, [1.0, 2.0], (1.0, 2.0, 3.0), 1j, np.ones(2))
    ],
    (report(measures=[returns(1.0), returns(2.0)]), V, "two measures have the name 'own'"),
    (on_iris(size_of_weights, layer=0), V, "size_of_weights measures the network as a whole"),
    (on_iris(lambda model, X: 1.0), T, r"a measure must be a function of model.*\(model, X\)"),
    (on_iris(size_of_weights, radius=1), T, r"'radius' is no .* size_of_weights. .*\['order'"),
    (on_iris(size_of_weights, weight_decay=0.1), V, "weight_decay=0.1 .* size_of_weights"),
    (on_iris(size_of_weights, sample_weight=np.ones(150)), V, "not take sample weights"),
    (on_iris(train_loss), V, f"'train_loss' {COLUMN}"),
    *[
        (on_iris(called(name)), V, f"'{name}' {COLUMN}")
        for name in ("l2_norm", "rank", "param_lr", "artifact_id", "seed", "in_fleet")
    ],
    (on_iris(FlatnessScorer()), T, r"FlatnessScorer\(\) is greater .*only searches and rank_m"),
    # the scorer
    (scores("flatness"), V, "no measure 'flatness'. Did you mean .*'relative_flatness'.*'norm"),
    (scores(["relative_flatness", "l2_norm"]), V, r"no measure \['relative_flatness', 'l2_norm'\]"),
    (scores(data="test"), V, "data='test', expected one of given, train"),
    (scores(non_minimum=False), V, "non_minimum=False, expected one of accept, reject, warn"),
    (scores(measure_params=[1]), V, r"measure_params=\[1\], expected None or a dict"),
    (scores(data="train", measure_params={"rtol": 8}), V, r'data="train" .* \{\'rtol\': 8\}'),
    (scores(data="train"), V, r"records its flatness in fit.*; the LogisticRegression did not"),
    (scores("hessian_trace", data="train"), V, "recorded in fit.* got 'hessian_trace' and None"),
    *[
        (scores(measure_params={name: True}), T, f"'{name}' is no argument")
        for name in ("layer", "normalize", "per_sample")
    ],
    (
        lambda: FlatnessScorer()(RandomForestClassifier(2).fit(*IRIS), *IRIS), T,
        "RandomForestClassifier is not a network",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_function_that_is_differentiated_once_may_lie_before_the_layer_and_has_no_penalty():
    assert once("relative_flatness")() > 0
    params = {"max_epochs": 1, "verbose": 0}
    of_loss = type("Own", (nn.Module,), {"forward": lambda _, z, y: once_in_loss(z, y)})
    for net in (
        RelativeFlatnessRegularizedClassifier(ONCE, flatness_layer=0, **params),
        RelativeFlatnessRegularizedClassifier(criterion=of_loss, **params),
    ):
        with pytest.raises(V, match="once_differentiable"):
            net.fit(X.float().numpy(), Y.numpy())
