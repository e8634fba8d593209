"""Every kind of model gives the same flatness as the bare module inside it."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.datasets import make_classification, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from skorch import NeuralNet, NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from skorch.dataset import Dataset
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import (
    FlatnessWarning,
    LayerNotFoundError,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
    relative_flatness,
)
from relflat_sk._models.network_of import DataOptions, describe, name_layer, to_network
from tests.data_kinds import memmap
from tests.rounding import FLOAT32

CE = nn.CrossEntropyLoss()
X, Y = make_classification(60, 4, n_informative=4, n_redundant=0, n_classes=3,
                           n_clusters_per_class=1, random_state=0)  # fmt: skip
X32 = X.astype(np.float32)


class Softmaxed(nn.Sequential):
    def __init__(self, n_out=3, tail=nn.Softmax):
        tails = [tail(dim=1)] if tail else []
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, n_out), *tails)


def fitted(cls, module=Softmaxed, y=Y, **arguments):
    return cls(module, max_epochs=3, lr=0.1, verbose=0, **arguments).fit(X32, y)


def logits_of(net):
    return nn.Sequential(*list(net.module_)[:3])


class One(Softmaxed):
    def __init__(self):
        super().__init__(1, None)


class Tempered(NeuralNet):
    def get_loss(self, y_pred, y_true, X=None, training=False):
        return super().get_loss(y_pred / 3, y_true, X=X, training=training)


WEIGHT = torch.tensor([1.0, 5.0, 0.5])
POSITIVE = (Y > 0).astype(np.float32)
LOGITS = {"criterion": nn.CrossEntropyLoss, "module__tail": None}
DROPS = {"train_split": None, "iterator_valid__drop_last": True}
# a net, its targets, and the criterion of the module's first three layers
NETS = {
    "probabilities": (partial(fitted, NeuralNetClassifier), Y, CE),
    "logits": (partial(fitted, NeuralNetClassifier, **LOGITS), Y, CE),
    # all samples count, also if predictions leave some out
    "drops samples": (partial(fitted, NeuralNetClassifier, **DROPS), Y, CE),
    "weights of classes": (
        partial(fitted, NeuralNetClassifier, criterion__weight=WEIGHT),
        Y, nn.CrossEntropyLoss(WEIGHT),
    ),
    "binary": (
        partial(fitted, NeuralNetBinaryClassifier, One), POSITIVE, nn.BCEWithLogitsLoss(),
    ),
    "regressor": (partial(fitted, NeuralNetRegressor, One), POSITIVE[:, None], nn.MSELoss()),
    "loss of its own": (
        partial(fitted, Tempered, **LOGITS, train_split=None), Y, lambda z, y: CE(z / 3, y),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NETS)
def test_the_criterion_is_the_net_s_own(kind):
    make, y, criterion = NETS[kind]
    net = make(y=y)
    targets = y[:, None] if kind == "binary" else y
    for layer, rel in ((-1, 1e-5), (0, 1e-3)):
        at = relative_flatness(logits_of(net), X, targets, layer=layer, criterion=criterion)
        found = relative_flatness(net, X, y, layer=layer, batch_size=7)
        assert found == pytest.approx(at, rel=rel)


class Doubled(Dataset):
    def transform(self, X, y):
        return super().transform(2 * X, y)


def test_skorch_own_dataset_and_loader_are_used():
    net = fitted(NeuralNetClassifier, dataset=Doubled)
    expected = relative_flatness(logits_of(net), 2 * X32, Y, criterion=CE)
    assert relative_flatness(net, X32, Y) == pytest.approx(expected, rel=FLOAT32)
    with pytest.raises(ValueError, match="sample_weight needs X and y as arrays"):
        relative_flatness(net, X32, Y, sample_weight=np.ones(60))
    with pytest.raises(ValueError, match="X has no samples"):
        relative_flatness(net, X32[:0], Y[:0])


def test_pipelines_transform_their_inputs():
    columns = ColumnTransformer([("all", "passthrough", [0, 1, 2, 3])])
    steps = StandardScaler(), "passthrough", make_pipeline(columns), LogisticRegression()
    model = make_pipeline(*steps).fit(X, Y)
    expected = relative_flatness(model[-1], StandardScaler().fit_transform(X), Y)
    assert relative_flatness(model, X, Y) == pytest.approx(expected, rel=1e-12)
    alone = relative_flatness(model[-1], X, Y)
    assert relative_flatness(make_pipeline(model[-1]), X, Y) == pytest.approx(alone, rel=1e-12)
    frame = pd.DataFrame(X, columns=list("abcd"))
    model.set_output(transform="pandas").fit(frame, Y)
    assert relative_flatness(model, frame, Y) == pytest.approx(expected, rel=1e-9)


class Doubling(BaseEstimator):
    """A sampler as of imbalanced-learn, which has no `transform`."""

    def fit_resample(self, X, y):
        return np.concatenate([X, X[y == 0]]), np.concatenate([y, y[y == 0]])


def test_a_pipeline_that_resamples_says_on_which_rows_it_is_measured():
    sampler = Doubling()
    rows = sampler.fit_resample(X, Y)
    last = LogisticRegression().fit(*rows)
    model, expected = Pipeline([("double", sampler), ("last", last)]), relative_flatness(last, X, Y)
    match = "Doubling .* LogisticRegression is measured on the rows of X as they are"
    with pytest.warns(FlatnessWarning, match=match):
        assert relative_flatness(model, X, Y) == expected
    assert relative_flatness(last, *rows) != pytest.approx(expected, rel=1e-3)


def test_search_objects_and_thresholds():
    pipeline = make_pipeline(StandardScaler(), LogisticRegression())
    search = GridSearchCV(pipeline, {"logisticregression__C": [0.1, 10]}).fit(X, Y)
    assert relative_flatness(search, X, Y) == relative_flatness(search.best_estimator_, X, Y)
    threshold = FixedThresholdClassifier(LogisticRegression(), threshold=0.3).fit(X, Y > 0)
    inside = relative_flatness(threshold.estimator_, X, Y > 0)
    assert relative_flatness(threshold, X, Y > 0) == inside
    unfitted = GridSearchCV(LogisticRegression(), {"C": [1]}, refit=False).fit(X, Y)
    with pytest.raises(NotFittedError, match="holds no fitted estimator.*with refit=True"):
        relative_flatness(unfitted, X, Y)


def test_transformed_targets():
    A, b = make_regression(50, 4, random_state=0)
    model = TransformedTargetRegressor(Ridge(), transformer=StandardScaler()).fit(A, b)
    expected = 2 * (A**2).sum(1).mean() * (model.regressor_.coef_**2).sum()
    assert relative_flatness(model.regressor_, A) == pytest.approx(expected, rel=1e-12)
    assert relative_flatness(model, A, b) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: NeuralNetClassifier(Softmaxed), NotFittedError, "is not fitted yet"),
        (lambda: RelativeFlatnessRegularizedClassifier(), NotFittedError, "is not fitted yet"),
        (lambda: make_pipeline(StandardScaler(), LogisticRegression()), NotFittedError, "not fit"),
        (lambda: make_pipeline(StandardScaler()).fit(X), TypeError, "StandardScaler"),
        (lambda: LogisticRegression().fit(X[:, :2], Y), ValueError, "X has 4 features, but Logi"),
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 3))), TypeError, "torch.jit"),
    ],
)
def test_models_that_cannot_be_measured(model, error, message):
    with pytest.raises(error, match=message):
        relative_flatness(model(), X, Y)


class InParallel(DistributedDataParallel):
    """What the wrapper is without a group of processes."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), InParallel])
def test_the_module_inside_a_wrapper_is_measured(wrap):
    module = Softmaxed(tail=None)
    for layer in (-1, module[0]):
        at = partial(relative_flatness, X=X, y=Y, criterion=CE, layer=layer)
        assert at(wrap(module)) == at(module)


@pytest.mark.parametrize("kind", ["module", "net", "pipeline", "search"])
def test_a_layer_given_as_a_module_has_the_same_name_in_a_copy_on_another_device(kind, monkeypatch):
    # the meta device, which measures refuse, stands for one that every machine has
    monkeypatch.setattr("relflat_sk._models.network_of.check_device", lambda device: None)
    net = fitted(NeuralNetClassifier)
    pipeline = make_pipeline(StandardScaler().fit(X32), net)
    search = GridSearchCV(pipeline, {})
    search.best_estimator_ = pipeline
    model = {"module": net.module_, "net": net, "pipeline": pipeline, "search": search}[kind]
    network = to_network(model, X32, Y, DataOptions(CE, device="meta"))
    assert network.device.type == "meta"
    assert net.module_[2].weight.device.type == "cpu"
    assert [name_layer(model, layer) for layer in (net.module_[2], -1)] == ["2", -1]
    with pytest.raises(LayerNotFoundError, match="not part of the network"):
        name_layer(model, nn.Linear(8, 3))
    with pytest.raises(LayerNotFoundError, match="not part of the network"):
        relative_flatness(LogisticRegression().fit(X, Y), X, Y, layer=nn.Linear(4, 3))


def test_columns_of_estimators_keep_their_names_and_order():
    frame = pd.DataFrame(X, columns=list("abcd"))
    model = LogisticRegression(max_iter=500).fit(frame, Y)
    with pytest.raises(ValueError, match="feature names should match"):
        relative_flatness(model, frame[list("dcba")], Y)
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        found = relative_flatness(model, X, Y)
    assert found == pytest.approx(relative_flatness(model, frame, Y), rel=1e-12)


def of_all_rows(X):
    return (X - np.mean(X, axis=0)) / np.std(X, axis=0)


STEPS = {
    "all rows": [FunctionTransformer(of_all_rows)],
    "all rows, later": [StandardScaler(), FunctionTransformer(of_all_rows)],
    "text": [FunctionTransformer(lambda X: X.astype(str)), FunctionTransformer(np.float64)],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_steps_that_are_not_row_wise_take_data_of_any_kind(steps, tmp_path):
    model = make_pipeline(*steps, LogisticRegression()).fit(X32, Y)
    expected = float(relative_flatness(model, X32, Y))
    data = TensorDataset(torch.as_tensor(X32), torch.as_tensor(Y))
    for same in ((memmap(tmp_path, X32), Y), (data, None), (DataLoader(data, 7), None)):
        found = relative_flatness(model, *same, batch_size=32)
        assert float(found) == pytest.approx(expected, rel=1e-5)


class Projects:
    """A transformer made of torch, which does not mind the caller's mixed precision."""

    def fit(self, X, y=None):
        return self

    def transform(self, X):
        with torch.no_grad():
            return torch.tensor(X32).mul(3).matmul(torch.eye(4) / 3).float().numpy()


def test_steps_do_not_see_the_caller_s_mixed_precision():
    model = make_pipeline(Projects(), LogisticRegression()).fit(X, Y)
    expected = relative_flatness(model, X, Y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_flatness(model, X, Y) == expected
        assert torch.is_autocast_enabled("cpu")


def test_descriptions_have_the_parameters_that_differ_from_the_defaults():
    net = RelativeFlatnessRegularizedClassifier(
        callbacks=[StopAtLoss(0.2)], optimizer=torch.optim.SGD, optimizer__momentum=0.9
    )
    expected = "(optimizer=SGD, callbacks=[StopAtLoss(0.2)], optimizer__momentum=0.9)"
    assert describe(net) == f"{type(net).__name__}{expected}"
