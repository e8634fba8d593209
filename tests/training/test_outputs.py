"""Modules that return mappings, as Hugging Face's do: training, prediction, scores, measures."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from skorch.callbacks import EpochScoring
from skorch.dataset import ValidSplit
from torch import nn

from relflat_sk import (
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    relative_flatness,
)
from relflat_sk.exceptions import FlatnessWarning

N = 60
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4)).astype(np.float32)
LABELS = np.array(["a", "b", "c"])[X[:, :3].argmax(axis=1)]
SETTINGS = {"max_epochs": 3, "verbose": 0, "random_state": 0}


class ModelOutput(OrderedDict):
    """A mapping with attributes, as in the package transformers."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Cache:
    """Something that is no tensor, as the cache of keys and values of a language model."""


class Net(nn.Module):
    """Returns an output of the class's form."""

    def __init__(self, n_features, n_outputs):
        super().__init__()
        self.hidden = nn.Linear(n_features, 8)
        self.head = nn.Linear(8, n_outputs)

    def wrap(self, hidden, logits):
        return logits

    def forward(self, x):
        hidden = torch.relu(self.hidden(x))
        return self.wrap(hidden, self.head(hidden))


class Dict(Net):
    def wrap(self, hidden, logits):
        return {"hidden": hidden, "logits": logits}


class HuggingFace(Net):
    def wrap(self, hidden, logits):
        states = (hidden, logits)
        return ModelOutput(logits=logits, past_key_values=Cache(), hidden_states=states)


class NoLogits(Net):
    def wrap(self, hidden, logits):
        return {"scores": logits}


TASKS = {
    "classes": (RelativeFlatnessRegularizedClassifier, LABELS),
    "binary": (RelativeFlatnessRegularizedBinaryClassifier, LABELS == "a"),
    "regression": (RelativeFlatnessRegularizedRegressor, X[:, 0]),
}


@pytest.mark.parametrize("module", [Dict, HuggingFace])
@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("split", [None, ValidSplit(3)], ids=["all", "split"])
def test_mappings_equal_tensors(module, kind, split):
    estimator, y = TASKS[kind]
    plain, wrapped = (estimator(m, train_split=split, **SETTINGS).fit(X, y) for m in (Net, module))
    assert wrapped.predict(X).tolist() == plain.predict(X).tolist()
    assert wrapped.score(X, y) == plain.score(X, y)
    assert wrapped.relative_flatness_ == plain.relative_flatness_
    assert relative_flatness(wrapped, X, y) == relative_flatness(plain, X, y)
    if kind != "regression":
        assert_allclose(wrapped.predict_proba(X), plain.predict_proba(X), rtol=0, atol=0)


def test_entries_reach_callbacks_and_users():
    net = RelativeFlatnessRegularizedClassifier(Dict, **SETTINGS).fit(X, LABELS)
    (output,) = net.forward_iter(X[:5])
    assert output["hidden"].shape == (5, 8)


def test_half_precision():
    class Half(Dict):
        def __init__(self, n_features, n_outputs):
            super().__init__(n_features, n_outputs)
            self.bfloat16()

    net = RelativeFlatnessRegularizedClassifier(Half, **SETTINGS).fit(X, LABELS)
    assert net.predict_proba(X).dtype == np.float32


def test_scoring_with_the_outputs_of_training():
    scoring = EpochScoring("accuracy", on_train=True, name="acc", lower_is_better=False)
    net = RelativeFlatnessRegularizedClassifier(Dict, callbacks=[scoring], **SETTINGS)
    assert 0 <= net.fit(X, LABELS).history[-1, "acc"] <= 1


def test_a_function_of_the_users_gets_the_logits():
    net = RelativeFlatnessRegularizedClassifier(
        Dict, batch_size=N, predict_nonlinearity=torch.tanh, **SETTINGS
    )
    (output,) = net.fit(X, LABELS).forward_iter(X)
    assert_allclose(net.predict_proba(X), torch.tanh(output["logits"]))


class WholeOutput(nn.Module):
    """A criterion that takes the module's mapping."""

    def forward(self, output, target):
        loss = nn.functional.cross_entropy(output["logits"], target)
        return loss + 0.01 * output["hidden"].square().mean()


@pytest.mark.parametrize("split", [None, ValidSplit(3)], ids=["all", "split"])
def test_a_criterion_of_the_mapping_trains_without_penalty(split):
    net = RelativeFlatnessRegularizedClassifier(
        Dict, criterion=WholeOutput, flatness_weight=0, train_split=split, **SETTINGS
    )
    with pytest.warns(FlatnessWarning, match="takes the module's whole output, but"):
        net.fit(X, LABELS)
    with pytest.raises(ValueError, match="or pass one with the argument criterion of the measure"):
        relative_flatness(net, X, LABELS)
    assert relative_flatness(net, X, LABELS, criterion=nn.CrossEntropyLoss()) > 0
    assert np.isnan(net.relative_flatness_)
    losses = net.history[:, "train_loss"]
    assert losses[-1] < losses[0]
    assert net.history[-1, "flatness_penalty"] == 0
    assert net.predict(X).shape == (N,)


def test_a_criterion_of_the_mapping_is_refused_with_a_penalty():
    net = RelativeFlatnessRegularizedClassifier(Dict, criterion=WholeOutput, **SETTINGS)
    with pytest.raises(
        ValueError,
        match=r"WholeOutput takes the module's whole output, but the "
        r"flatness penalty needs .* or train with flatness_weight=0",
    ):
        net.fit(X, LABELS)


def test_a_criterion_of_the_mapping_is_refused_with_sample_weights():
    net = RelativeFlatnessRegularizedClassifier(
        Dict, criterion=WholeOutput, flatness_weight=0, **SETTINGS
    )
    with pytest.raises(ValueError, match="sample_weight needs .* or leave the weights out"):
        net.fit(X, LABELS, sample_weight=np.ones(N))


def test_a_criterion_of_the_mapping_cannot_be_measured():
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="neither the entry 'logits'"):
        relative_flatness(
            Dict(4, 3), X, X[:, :3].argmax(axis=1), criterion=lambda out, y: out.logits.sum()
        )


class Logits(nn.Module):
    """A criterion of one tensor that is not in the table of losses."""

    def forward(self, output, target):
        return nn.functional.cross_entropy(output, target) * 2


def test_an_unknown_criterion_of_the_logits():
    losses = [
        RelativeFlatnessRegularizedClassifier(m, criterion=Logits, **SETTINGS)
        .fit(X, LABELS)
        .history[:, "train_loss"]
        for m in (Net, Dict)
    ]
    assert losses[0] == losses[1]


def test_a_criterion_that_takes_neither():
    def criterion(output, target):
        return output["logit"].mean()

    class Wrong(nn.Module):
        def forward(self, output, target):
            return criterion(output, target)

    net = RelativeFlatnessRegularizedClassifier(Dict, criterion=Wrong, **SETTINGS)
    with pytest.raises(
        ValueError,
        match=r"neither the entry 'logits' \(.*\) nor the whole output \(KeyError: 'logit'",
    ):
        net.fit(X, LABELS)


def test_a_mapping_without_logits():
    net = RelativeFlatnessRegularizedClassifier(NoLogits, **SETTINGS)
    with pytest.raises(TypeError, match="or a mapping with 'logits', got dict"):
        net.fit(X, LABELS)

    class Scores(nn.Module):
        def forward(self, output, target):
            return nn.functional.cross_entropy(output["scores"], target)

    net = RelativeFlatnessRegularizedClassifier(
        NoLogits, criterion=Scores, flatness_weight=0, **SETTINGS
    )
    with pytest.warns(FlatnessWarning, match="Scores takes the module's whole output"):
        net.fit(X, LABELS)
    with pytest.raises(TypeError, match="a mapping with 'logits', got dict"):
        net.predict(X)
    net.set_params(predict_nonlinearity=lambda output: output["scores"])
    assert net.predict(X).shape == (N,)
