"""Tests of descriptions: equal exactly if training is equal, in every process."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse, special
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from skorch import NeuralNetClassifier
from skorch.callbacks import EarlyStopping, EpochTimer, LRScheduler
from torch import nn

from relflat_sk import MLP, StopAtLoss
from relflat_sk.search._trial.description import describe, same
from relflat_sk.search._trial.digests import digest

VALUES = """
import functools, sys
import numpy as np
from sklearn.preprocessing import FunctionTransformer
from skorch import NeuralNetClassifier
from skorch.callbacks import EarlyStopping
from torch import nn
from relflat_sk import MLP, StopAtLoss
from relflat_sk.search._trial.description import describe

class Own:
    def __init__(self):
        self.sizes, self.names, self.other = {3, 1, 2}, {"a", "b", "c"}, object()

print(describe([
    Own(), {"b": 1, "a": {"x", "y", "z"}}, functools.partial(sorted, key=len), np.log1p,
    np.random.RandomState(3), [StopAtLoss(0.2), ("stop", EarlyStopping(patience=2))],
    FunctionTransformer(np.log1p), NeuralNetClassifier(MLP, criterion=nn.CrossEntropyLoss),
    lambda trial: 1, np.arange(6).reshape(2, 3), slice(2), float("nan"),
]))
"""


def test_every_process_finds_the_same():
    """Hashes of Python are seeded in each process, and addresses differ."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = {
        subprocess.run(
            [sys.executable, "-c", VALUES],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    (text,) = found
    assert " at 0x" not in text
    # from Python 3.13 on, the source of a command is known
    text = re.sub(r" \(source [0-9a-f]{8}\)", "", text)
    assert "Own(names={'a', 'b', 'c'}, other=builtins.object(<object object>)" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.5), "0.5"),
        ((4, [8]), "[4, [8]]"),
        (MLP, "relflat_sk.MLP"),
        (torch.optim.Adam, "torch.Adam"),
        (functools.partial(max, 1), "partial(builtins.max, 1, {})"),
        ([StopAtLoss(0.1), EpochTimer()], "[relflat_sk.StopAtLoss(loss=0.1)]"),
        (LRScheduler(policy="StepLR", step_size=3), None),
        (LogisticRegression(C=2.0, verbose=3, n_jobs=2), "sklearn.LogisticRegression(C=2.0)"),
        (FunctionTransformer(np.log1p), "sklearn.FunctionTransformer(func=numpy.log1p)"),
        (special.expit, "numpy.expit"),
        (StopAtLoss(0.1).on_epoch_end, "relflat_sk.StopAtLoss(loss=0.1).on_epoch_end"),
    ],
)
def test_descriptions(value, text):
    found = describe(value)
    assert found == describe(value)
    assert text is None or found == text


class First(nn.Module):
    """A module."""

    width = 4

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)  # the only one

    def forward(self, x):
        return self.layer(x)


class Commented(nn.Module):
    width = 4

    def __init__(self):
        """Make the layer."""
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        # of shape (n, 3)
        return self.layer(x)


class Changed(nn.Module):
    width = 4

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).relu()


class Wider(Commented):
    width = 5


def source(kind):
    return describe(kind).partition(" (source ")[2]


def test_an_edit_of_the_module_is_noticed():
    assert len(source(First)) == 9
    assert source(Commented) == source(First)
    assert source(Changed) != source(First)
    assert source(Wider) != source(First)


def test_a_source_that_is_not_known_is_not_compared():
    assert same(describe(First), "First")
    assert same("First", describe(First))
    assert not same(describe(First), "Second")
    assert not same(describe(First), describe(First).replace(source(First), "00000000)"))
    assert same(None, None)
    assert not same(None, "1")


def test_code_without_a_source_has_a_name():
    scope = {"__name__": "made"}
    exec("def double(x):\n    return 2 * x\nclass Made:\n    def run(self): pass", scope)
    assert describe(scope["double"]) == "double"
    assert describe(scope["Made"]) == "Made"


def scaling(factor):
    def scale(x, names=("a", "b")):
        return factor * x

    return scale


def recursive():
    def count(n):
        return 0 if n == 0 else count(n - 1)

    return count


def test_numbers_that_a_function_gets_from_around_it_are_noticed():
    assert describe(scaling(2)) == describe(scaling(2))
    assert describe(scaling(2)) != describe(scaling(3))
    assert " (contents " not in describe(recursive())
    factor_of = {factor: lambda x, factor=factor: factor * x for factor in (2, 3)}
    assert describe(factor_of[2]) != describe(factor_of[3])
    # an earlier version did not note them
    earlier = describe(scaling(2)).partition(" (contents ")[0]
    assert same(earlier, describe(scaling(2)))
    assert not same(describe(scaling(3)), describe(scaling(2)))


# fmt: off
LAMBDAS = {
    "one": (lambda x: x + 1),
    "spaces and quotes": ((lambda x: f'{x}a'), (lambda x: (f"{x}a" ))),
    "lines": (lambda x:
              x * 2),
    "inner": (lambda x: lambda y: x + y),
    "beside": ((lambda x: x + 2), (lambda x: x + 3)),
}
# fmt: on


def test_lambdas_are_known_by_their_source():
    assert describe(LAMBDAS["one"]) == describe(lambda x: x + 1) != describe(lambda x: 1 + x)
    one, again = map(describe, LAMBDAS["spaces and quotes"])
    assert one == again
    assert describe(LAMBDAS["lines"]) == describe(lambda x: x * 2)
    inner = lambda y: x + y  # noqa: E731, F821
    assert describe(LAMBDAS["inner"](1)).partition(" (contents ")[0] == describe(inner)
    assert describe(LAMBDAS["inner"]) != describe(inner)
    beside, other = map(describe, LAMBDAS["beside"])
    assert beside == describe(lambda x: x + 2)
    assert other == describe(lambda x: x + 3)
    assert same("<lambda>", beside)  # an earlier version did not note them
    assert describe(eval("lambda x: x + 2")) == "<lambda>"


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor, self.layer = factor, nn.Identity()


def test_numbers_that_a_module_holds_are_noticed():
    assert describe(Scaled(2)) == describe(Scaled(2).eval())
    assert describe(nn.Sequential(Scaled(2))) != describe(nn.Sequential(Scaled(3)))
    assert " (contents " not in describe(nn.Sequential(nn.Dropout(0.1)))


def test_equal_networks_are_equal_and_others_are_not():
    torch.manual_seed(0)
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    assert describe(one) != describe(other)
    other.load_state_dict(one.state_dict())
    assert describe(one) == describe(other)
    assert describe(nn.Sequential(nn.ReLU())) != describe(nn.Sequential(nn.Tanh()))


def test_random_states_are_equal_if_their_draws_are():
    seeded = lambda seed: torch.Generator().manual_seed(seed)  # noqa: E731
    for make_state in (np.random.RandomState, np.random.default_rng, seeded):
        assert describe(make_state(1)) == describe(make_state(1))
        assert describe(make_state(1)) != describe(make_state(2))


def test_long_descriptions_are_cut_and_still_differ():
    one, other = (describe([*range(1000), last]) for last in (1, 2))
    assert len(one) < 330
    assert one != other


def test_nested_estimators_are_described():
    net = NeuralNetClassifier(MLP, module__n_features=4, callbacks=[("stop", EarlyStopping())])
    text = describe(make_pipeline(StandardScaler(with_mean=False), net))
    assert "sklearn.StandardScaler(with_mean=False)" in text
    assert "['stop', skorch.EarlyStopping()]" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda value: np.array([[1.0, value]]),
        lambda value: [[1.0, value]],
        lambda value: np.array(["a", str(value)], dtype=object),
        lambda value: torch.tensor([1.0, value]),
        lambda value: sparse.csr_array([[0.0, value]]),
        lambda value: {"a": np.array([value]), "b": [1]},
        lambda value: np.array([1.0, 2.0, value, 4.0])[::2],
        lambda value: np.array([value], dtype="datetime64[D]"),
    ],
)
def test_digests_change_with_the_data(make):
    assert digest(make(1)) == digest(make(1))
    assert digest(make(1)) != digest(make(2))


@pytest.mark.parametrize("data", [None, object(), 3, np.array(3), [[1], [1, 2]], {"a": object()}])
def test_data_without_a_digest(data):
    assert digest(data) is None
