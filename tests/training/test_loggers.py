"""skorch's loggers receive penalty and flatness of every epoch."""

import numpy as np
import pytest
from sklearn.datasets import load_iris
from skorch.callbacks import EpochScoring, MlflowLogger, TensorBoard, WandbLogger

from relflat_sk import RelativeFlatnessRegularizedClassifier, relative_flatness

NAMES = ("flatness_penalty", "relative_flatness")
X, Y = load_iris(return_X_y=True)


def fit(logger, **kwargs):
    scoring = EpochScoring(relative_flatness, name="relative_flatness", on_train=True)
    net = RelativeFlatnessRegularizedClassifier(
        max_epochs=2, callbacks=[scoring, logger], random_state=0, verbose=0, **kwargs
    ).fit(X.astype(np.float32), Y)
    assert net.history[-1, "relative_flatness"] == pytest.approx(net.relative_flatness_, rel=1e-6)
    assert all(value > 0 for name in NAMES for value in net.history[:, name])
    return net


def test_mlflow(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking", reason="needs mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = tracking.MlflowClient(tracking_uri=tmp_path.as_uri())
    run = client.create_run(client.create_experiment("flat"))
    net = fit(MlflowLogger(run, client))
    for name in NAMES:
        found = client.get_metric_history(run.info.run_id, name)
        assert [(metric.step, metric.value) for metric in found] == [
            (epoch, pytest.approx(value)) for epoch, value in enumerate(net.history[:, name], 1)
        ]


def test_tensorboard(tmp_path):
    reason = "needs tensorboard"
    pytest.importorskip("tensorboard", reason=reason)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    net = fit(TensorBoard(SummaryWriter(str(tmp_path))))
    written = EventAccumulator(str(tmp_path))
    written.Reload()
    for name in NAMES:
        assert [(event.step, event.value) for event in written.Scalars(name)] == [
            (epoch, pytest.approx(value, rel=1e-6))
            for epoch, value in enumerate(net.history[:, name], 1)
        ]


class Run:
    """What skorch's logger uses of a run of W&B."""

    def __init__(self):
        self.logged = []

    def watch(self, module):
        pass

    def log(self, values):
        self.logged.append(values)


def test_wandb():
    run = Run()
    # the logger's default saves the net of the best validation loss, which needs validation data
    net = fit(WandbLogger(run, save_model=False))
    for name in NAMES:
        assert [values[name] for values in run.logged] == net.history[:, name]
