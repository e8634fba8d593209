"""Tests of resumed studies: what changes results is refused, what does not goes on."""

import functools
import re
from functools import cache

import cloudpickle
import numpy as np
import optuna
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import TrialState
from scipy import sparse, special
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from skorch.callbacks import EarlyStopping, EpochTimer, LRScheduler
from skorch.dataset import Dataset as SkorchDataset
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from relflat_sk import MLP, FlatnessScorer, FlatnessWarning, MinimaObjective, StopAtLoss
from relflat_sk.search._provenance import MADE_WITH, check_made_with, describe, digest
from tests.contracts.pages import blocks
from tests.search import examples
from tests.search.examples import X_TEST, Y_TEST, X, Y, load, make_search


class Linear(nn.Module):
    def __init__(self, n_features=4, n_outputs=3, hidden_layer_sizes=()):
        super().__init__()
        self.layer = nn.Linear(n_features, n_outputs)

    def forward(self, x):
        return self.layer(x)


def make_net(**parameters):
    small = {"module__hidden_layer_sizes": (4,), "batch_size": 32, "max_epochs": 2}
    return examples.make_net(**{**small, "callbacks": [StopAtLoss(0.5)], **parameters})


def of_nets(space=None, **parameters):
    space = {"batch_size": [16, 32]} if space is None else space
    return make_search(make_net(**parameters), space, refit=False)


def of_pipelines(estimator=None, **parameters):
    if estimator is None:
        estimator = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return logistic({"logisticregression__C": [0.5, 1.0]}, estimator.set_params(**parameters))


def logistic(space=None, estimator=None, **parameters):
    return examples.logistic(space or {"C": [0.5, 1.0]}, estimator, **parameters)


def stopping(goal):
    """Optuna knows a callback by a label only."""

    class Stop(StopAtLoss):
        def __repr__(self):
            return "stop"

    return of_nets({"callbacks": [[Stop(goal)], None]}, max_epochs=20)


def of_scaled_nets(**parameters):
    """The rates follow from the estimator's own batch size."""
    return of_nets({"batch_size": [16, 32], "lr_scaling": ["linear"]}, **parameters)


REFUSED = [
    (of_nets, {"module": Linear}, r"module: the default then, Linear \(code \w+\) now"),
    (of_nets, {"module__hidden_layer_sizes": (8,)}, r"_sizes: \[4\] then, \[8\] now"),
    (of_nets, {"callbacks": [StopAtLoss(0.1)]}, r"callbacks: .*StopAtLoss\(loss=0.5\)\] then, "),
    (of_nets, {"optimizer": torch.optim.SGD}, "optimizer: the default then, torch.SGD now"),
    (of_nets, {"flatness_weight": 0.1}, "flatness_weight: 0 then, the default now"),
    (of_nets, {"random_state": 3}, "estimator, random_state: the default then, 3 now"),
    (of_scaled_nets, {"batch_size": 64}, "batch_size: the default then, 64 now"),
    (of_pipelines, {"standardscaler__with_mean": False}, "standardscaler__with_mean: the"),
    (of_pipelines, {"logisticregression__tol": 0.1}, "estimator, logisticregression__tol: the"),
    (of_pipelines, {"standardscaler": "passthrough"}, "standardscaler: sklearn.Standard"),
    (of_pipelines, {"estimator": make_pipeline(LogisticRegression(max_iter=1000))},
     r"steps: \['standardscaler', 'logisticregression'\] then, \['logisticregression'\] now"),
    (logistic, {"random_state": 1}, r"search, random_state: \d+ then, \d+ now"),
    (logistic, {"random_state": None}, r"search, random_state: \d+ then, the default now"),
    (logistic, {"goal": 0.9}, "search, goal: the default then, 0.9 now"),
    (logistic, {"measure": "l2_norm"}, r"measure: \['relative_flatness'\] then, \['l2_norm'\]"),
    (logistic, {"measure": FlatnessScorer(layer=0)}, "_flatness: the default then, layer=0 now"),
    (logistic, {"measure": FlatnessScorer(measure_params={"rtol": 1.0})}, "then, rtol=1.0 now"),
    (logistic, {"space": {"C": [0.1, 0.2]}}, r"another space: 'C' was drawn from Cat.*0\.5"),
    (logistic, {"space": {"tol": [0.1]}}, r"another space: trial . has \{'C': .*'tol': 'no value'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """A function that makes a search, stores its study once, and returns where."""
    folder = tmp_path_factory.mktemp("studies")

    @cache
    def store(make):
        stored = {"storage": folder / f"{make.__name__}.log", "study_name": "sweep"}
        make().set_params(**stored).fit(X, Y)
        return stored

    return store


@pytest.mark.filterwarnings("ignore:no candidate converged")
@pytest.mark.filterwarnings("ignore:.* candidates are no minima")
@pytest.mark.parametrize(("make", "changed", "match"), REFUSED)
def test_what_changes_results_is_refused(studies, make, changed, match):
    stored = studies(make)
    with pytest.raises(ValueError, match=match) as caught:
        make(**changed).set_params(**stored).fit(X, Y)
    assert "study 'sweep' was made " in str(caught.value)
    assert "a study_name of its own" in str(caught.value)
    assert len(load(stored).trials) == 2


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ((X + 1, Y), r"data, X: \(75, 4\) \w+ then, \(75, 4\) \w+ now"),
        ((X, Y[::-1]), r"data, y: \(75,\) \w+ then"),
        ((X, Y, X_TEST[:9], Y_TEST[:9]), r"held-out data, X_test: \(75, 4\) \w+ then"),
    ],
)
def test_other_data_are_refused(stored, data, match):
    logistic(**stored).fit(X, Y, X_TEST, Y_TEST)
    with pytest.raises(ValueError, match=match):
        logistic(**stored).fit(*data)


@pytest.mark.filterwarnings("ignore:no candidate converged")
@pytest.mark.filterwarnings("ignore:.* candidates are no minima")
def test_edits_arguments_of_fit_and_choices_of_the_same_name_are_refused(stored, monkeypatch):
    of_nets(module=Linear).set_params(**stored).fit(X, Y, epochs=2)
    with pytest.raises(ValueError, match="data, epochs: 2 then, 3 now"):
        of_nets(module=Linear).set_params(**stored).fit(X, Y, epochs=3)
    monkeypatch.setattr(Linear, "forward", lambda self, x: 2 * self.layer(x))
    with pytest.raises(ValueError, match=r"module: Linear \(code \w+\) then, Linear \(code"):
        of_nets(module=Linear).set_params(**stored).fit(X, Y, epochs=2)
    stored["study_name"] = "choices"
    stopping(0.6).set_params(**stored).fit(X, Y)
    with pytest.raises(ValueError, match=r"choices, callbacks=\[stop\]: \[Stop.*0\.6\)\] then"):
        stopping(0.7).set_params(**stored).fit(X, Y)


# -- goes on -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (logistic(), logistic(verbose=1)),
        (logistic(), logistic(sampler=RandomSampler(seed=0), n_trials=4)),
        (logistic(), logistic(pruner=optuna.pruners.MedianPruner())),
        (logistic(), logistic({"C": [1.0, 0.5]})),
        (logistic(), logistic(estimator=LogisticRegression(max_iter=1000, C=5.0))),
        (of_pipelines(), of_pipelines(logisticregression__C=7.0)),
        (of_nets(max_epochs=20),
         of_nets(max_epochs=20, callbacks=[StopAtLoss(0.5), EpochTimer()], verbose=1)),
    ],
    ids=["verbose", "sampler", "pruner", "order", "in the space", "in a pipeline", "logging"],
)  # fmt: skip
def test_what_does_not_change_results_goes_on(stored, first, again):
    trials = first.set_params(**stored).fit(X, Y).study_.trials
    assert again.set_params(**stored).fit(X, Y).study_.trials[:2] == trials


@pytest.mark.parametrize("n_trials", [False, True], ids=["grid", "draws"])
def test_choices_can_be_added_in_a_journal(stored, n_trials):
    first = logistic(n_trials=2 if n_trials else None, **stored).fit(X, Y).study_.trials
    wider = {"C": [2.0, 0.5, 0.3, 1.0]}
    wide = logistic(wider, n_trials=4 if n_trials else None, **stored).fit(X, Y)
    assert [trial.params for trial in wide.study_.trials[:2]] == [one.params for one in first]
    alone = logistic(wider).fit(X, Y)
    columns = ["param_C", "relative_flatness", "train_loss", "rank"]
    assert wide.minima_[columns].equals(alone.minima_[columns])
    with pytest.raises(ValueError, match="choices can be added, but not removed"):
        logistic(**stored).fit(X, Y)


@pytest.mark.parametrize(
    ("name", "sampler", "further"),
    [
        ("minima.db", None, {}),
        ("minima.log", None, {"tol": FloatDistribution(1e-5, 1e-4)}),
        ("minima.log", TPESampler(seed=0), {}),
    ],
    ids=["database", "range", "sampler"],
)
def test_a_study_is_copied_to_add_choices(tmp_path, name, sampler, further):
    """Elsewhere, Optuna takes no further choices; the copy is made as docs/searching.md says."""
    parameters = {"storage": tmp_path / name, "sampler": sampler}
    space = {"C": [0.5, 1.0], **further}
    old = logistic(space, n_trials=2, study_name="old", **parameters).fit(X, Y)
    wider = {**space, "C": [2.0, 0.5, 1.0]}
    more = logistic(wider, n_trials=3, study_name="old", **parameters)
    with pytest.raises(ValueError, match=r"fewer choices for \['C'\] than this space.*copy its"):
        more.fit(X, Y)
    (code,) = (one for one in blocks("docs/searching.md") if "add_trial(" in one)
    wide = {"C": CategoricalDistribution([0.5, 1.0, 2.0])}
    exec(code, {"old": old.study_, "wide": wide, "storage": f"sqlite:///{tmp_path / 'wide.db'}"})
    more.set_params(storage=tmp_path / "wide.db", study_name="wide").fit(X, Y)
    before, after = (search.study_.trials for search in (old, more))
    assert [t.values for t in after[:2]] == [t.values for t in before]
    assert len(after) == len(before) + 1


# -- measured later ----------------------------------------------------------------------------


def test_held_out_data_and_measures_that_come_later(kept):
    logistic(**kept).fit(X, Y)
    both = ["relative_flatness", "l2_norm"]
    later = logistic(measure=both, **kept).fit(X, Y, X_TEST, Y_TEST)
    assert len(later.study_.trials) == 2
    whole = logistic(measure=both).fit(X, Y, X_TEST, Y_TEST).minima_
    for name in ("l2_norm", "test_loss", "generalization_gap", "test_score", "train_score"):
        np.testing.assert_allclose(later.minima_[name], whole[name], rtol=1e-6)
    assert later.best_score_ == -whole["relative_flatness"][0]
    # a session without them goes on, and what they are stays known
    assert logistic(**kept).fit(X, Y).minima_["test_loss"].equals(later.minima_["test_loss"])
    with pytest.raises(ValueError, match="held-out data, X_test: "):
        logistic(**kept).fit(X, Y, X_TEST[::-1], Y_TEST)


def test_without_weights_nan_is_explained(stored):
    logistic(**stored).fit(X, Y)
    search = logistic({"C": [0.5, 1.0, 2.0]}, measure=["relative_flatness", "l2_norm"], **stored)
    with pytest.warns(FlatnessWarning, match=r"l2_norm, test_loss of trials \[0, 1\] stay nan"):
        search.fit(X, Y, X_TEST, Y_TEST)
    table = search.minima_.set_index("trial").sort_index()
    assert table["test_loss"].isna().tolist() == [True, True, False]
    assert table["l2_norm"].isna().tolist() == [True, True, False]
    assert table["relative_flatness"].notna().all()


# -- records -----------------------------------------------------------------------------------


def test_studies_of_other_versions_go_on(stored):
    """An earlier one recorded nothing, a later one may record more."""
    study = logistic(**stored).fit(X, Y).study_
    record = study.user_attrs[MADE_WITH]
    study.set_user_attr(MADE_WITH, {})
    with pytest.warns(FlatnessWarning, match="The search takes them to be made by this estimator"):
        again = logistic(**stored).fit(X, Y).study_
    assert again.user_attrs[MADE_WITH] == record
    later = {"compiler": {"name": "new"}}
    study.set_user_attr(MADE_WITH, record | later)
    again = logistic({"C": [0.5, 1.0, 2.0]}, **stored).fit(X, Y).study_  # without a warning
    assert len(again.trials) == 3
    assert again.user_attrs[MADE_WITH] == record | later


def test_a_study_without_minima_can_be_of_anything(stored):
    """A slip, such as a wrong X, binds nobody before there is a minimum."""
    study = logistic(n_trials=1, **stored).fit(X + 1, Y).study_
    new = optuna.create_study(storage=study._storage, study_name="new")
    new.set_user_attr(MADE_WITH, study.user_attrs[MADE_WITH])
    new.add_trial(optuna.trial.create_trial(state=TrialState.FAIL))  # cut short
    again = logistic(storage=stored["storage"], study_name="new").fit(X, Y).study_
    assert again.user_attrs[MADE_WITH]["data"] != study.user_attrs[MADE_WITH]["data"]


def test_the_objective_refuses_a_study_of_something_else(tmp_path):
    def objective(**parameters):
        return MinimaObjective(LogisticRegression(max_iter=1000, **parameters), X, Y, {"C": [0.1]})

    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'minima.db'}")
    study.optimize(objective(), n_trials=2)
    assert study.user_attrs[MADE_WITH]["search"] == {"measure": "['relative_flatness']"}
    study.optimize(objective(), n_trials=1)
    with pytest.raises(ValueError, match="tol: the default then, 0.1 now"):
        study.optimize(objective(tol=0.1), n_trials=1)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3 + ["FAIL"]
    assert "failed" not in study.trials[-1].user_attrs


# -- data --------------------------------------------------------------------------------------


class OwnDataset(Dataset):
    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, row):
        return tuple(tensor[row] for tensor in self.tensors)


class Noisy(OwnDataset):
    def __getitem__(self, row):
        x, y = super().__getitem__(row)
        return x + float(torch.rand(1)[0] < 0.5), y


class Closed(OwnDataset):
    def __getitem__(self, row):
        raise OSError("the file is closed")


def record_of(data):
    """Record a study of data in any form, and return it."""
    net = make_net(module=Linear, module__n_features=4, module__n_outputs=3)
    study = optuna.create_study()
    check_made_with(study, MinimaObjective(net, data, Y, {"lr": [0.1]}))
    return study.user_attrs[MADE_WITH]["data"]["X"]


FORMS = {
    "tensors": TensorDataset,
    "subset": lambda X, Y: Subset(TensorDataset(torch.cat([X, X]), torch.cat([Y, Y])), range(75)),
    "loader": lambda X, Y: DataLoader(TensorDataset(X, Y), batch_size=75),
    "skorch": SkorchDataset,
    "own": OwnDataset,  # by a few samples
    "tuple": lambda X, Y: (X, X),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_in_any_form_are_known_by_their_contents(form):
    labels = torch.from_numpy(Y)
    one, again, other = (
        record_of(FORMS[form](torch.from_numpy(X) + add, labels)) for add in (0, 0, 1)
    )
    assert one == again != other


def test_data_sets_without_known_samples_are_known_by_their_length():
    drawn = []
    for kind in (Closed, Noisy):
        torch.manual_seed(0)
        found = record_of(kind(torch.from_numpy(X), torch.from_numpy(Y)))
        drawn.append(float(torch.rand(())))
        assert re.fullmatch(rf"{kind.__name__} \(code \w+\)\(length=75\)", found)
    assert drawn[0] == drawn[1]  # random states are given back


def test_digests_are_of_numbers_in_any_layout():
    data = np.arange(6.0).reshape(2, 3)
    assert digest(data) == digest(np.asfortranarray(data)) == digest(data.tolist())
    assert digest(np.zeros((0, 3))) is not None
    for other in (None, object(), 3, np.array(3), [[1], [1, 2]]):
        assert digest(other) is None


# -- descriptions ------------------------------------------------------------------------------


class Own:
    def __init__(self):
        self.sizes, self.names, self.other = {3, 1, 2}, {"a", "b", "c"}, object()


def describe_many():
    return describe([
        Own(), {"b": 1, "a": {"x", "y", "z"}}, functools.partial(sorted, key=len), np.log1p,
        np.random.RandomState(3), [StopAtLoss(0.2), ("stop", EarlyStopping(patience=2))],
        FunctionTransformer(np.log1p), make_net(criterion=nn.CrossEntropyLoss),
        lambda trial: 1, np.arange(6).reshape(2, 3), slice(2), float("nan"),
    ])  # fmt: skip


def test_descriptions_hold_no_address_and_no_order_of_a_set():
    """`test_processes.py` compares them with those of other processes."""
    text = describe_many()
    assert "(names={'a', 'b', 'c'}, other=builtins.object(" in text
    assert " at 0x" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.5), "0.5"),
        ((4, [8]), "[4, [8]]"),
        (MLP, "relflat_sk.MLP"),
        (torch.optim.Adam, "torch.Adam"),
        (functools.partial(max, 1),
         "functools.partial(arguments=[builtins.max], state=[builtins.max, [1], {}, {}])"),
        ([StopAtLoss(0.1), EpochTimer()], "[relflat_sk.StopAtLoss(loss=0.1)]"),
        (LRScheduler(policy="StepLR", step_size=3),
         "skorch.LRScheduler(policy='StepLR', step_size=3)"),
        (LogisticRegression(C=2.0, verbose=3, n_jobs=2), "sklearn.LogisticRegression(C=2.0)"),
        (FunctionTransformer(np.log1p), "sklearn.FunctionTransformer(func=numpy.log1p)"),
        (special.expit, "numpy.expit"),
        (StopAtLoss(0.1).on_epoch_end, "relflat_sk.StopAtLoss(loss=0.1).on_epoch_end"),
    ],
)  # fmt: skip
def test_descriptions(value, text):
    assert describe(value) == describe(value) == text


def test_classes_that_cloudpickle_has_made_again_are_the_same():
    before = describe(made_by("4"))
    made = made_by("4")
    assert cloudpickle.loads(cloudpickle.dumps(made)) is made  # with functions without a source
    assert describe(made) == before


def made_by(line, base=nn.Module, default=1):
    """Make a class; other arguments are an edit of it."""
    if line == "relu":

        class Made(base):
            width = 4

            def forward(self, x, width=default):
                return x.relu()

    else:

        class Made(base):
            width = int(line)

            def forward(self, x):
                return x

    return Made


def scaling(factor):
    def scale(x, names=("a", "b")):
        return factor * x

    return scale


def recursive():
    def count(n):
        return 0 if n == 0 else count(n - 1)

    return count


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor, self.layer = factor, nn.Identity()


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(2, 3)


# fmt: off
SAME_AND_OTHER = {
    "method of a class": [made_by(line) for line in ("4", "4", "relu")],
    "attribute of a class": [made_by(line) for line in ("4", "4", "5")],
    "base of a class": [made_by("4", made_by(line)) for line in ("4", "4", "5")],
    "closure": (scaling(2), scaling(2), scaling(3)),
    "code without a source": [eval(f"lambda x: x in {{'a', 'b', {n}}}") for n in (1, 1, 2)],
    "default of a method": [made_by("relu", default=n) for n in (1, 1, 2)],
    "default": [lambda x, factor=factor: factor * x for factor in (2, 2, 3)],
    "lambda": ((lambda x: x + 1), (lambda x:
               x + 1), (lambda x: x + 2)),
    "inner": ((lambda x: lambda: x), (lambda x: lambda: x), (lambda x: lambda: -x)),
    "recursive": (recursive(), recursive(), scaling(1)),
    "numbers of a module": (Scaled(2), Scaled(2).eval(), Scaled(3)),
    "weights": (linear(0), linear(0), linear(1)),
    "layers": (nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())),
    "RandomState": [np.random.RandomState(seed) for seed in (1, 1, 2)],
    "Generator": [np.random.default_rng(seed) for seed in (1, 1, 2)],
    "long": [[*range(1000), last] for last in (1, 1, 2)],
    **{f"data {n}": [make(x) for x in (1, 1, 2)] for n, make in enumerate((
        lambda value: np.array([[1.0, value]]),
        lambda value: np.array(["a", str(value)], dtype=object),
        lambda value: torch.tensor([1.0, value]),
        lambda value: torch.tensor([1.0, value], dtype=torch.bfloat16),
        lambda value: sparse.csr_array([[0.0, value]]),
        lambda value: {"a": np.array([value]), "b": [1]},
        lambda value: np.array([1.0, 2.0, value, 4.0])[::2],
        lambda value: np.array([value], dtype="datetime64[D]"),
    ))},
}
# fmt: on


@pytest.mark.parametrize("name", SAME_AND_OTHER)
def test_descriptions_are_equal_if_training_is(name):
    one, same, other = map(describe, SAME_AND_OTHER[name])
    assert one == same != other
    assert len(one) < 330
