"""skorch's loggers receive penalty and flatness of every epoch."""

import pytest
from skorch.callbacks import EpochScoring, MlflowLogger, TensorBoard

from relflat_sk import relative_flatness
from tests.training.common import NAMES, X, make


def mlflow(folder):
    tracking = pytest.importorskip("mlflow.tracking", reason="needs mlflow")
    client = tracking.MlflowClient(tracking_uri=folder.as_uri())
    run = client.create_run(client.create_experiment("flat"))

    def read(name):
        history = client.get_metric_history(run.info.run_id, name)
        return [(metric.step, metric.value) for metric in history]

    return MlflowLogger(run, client), read


def tensorboard(folder):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    def read(name):
        written = EventAccumulator(str(folder))
        written.Reload()
        return [(event.step, event.value) for event in written.Scalars(name)]

    return TensorBoard(SummaryWriter(str(folder))), read


@pytest.mark.parametrize("make_logger", [mlflow, tensorboard])
def test_loggers_receive_penalty_and_flatness(make_logger, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger, read = make_logger(tmp_path)
    scoring = EpochScoring(relative_flatness, name="relative_flatness", on_train=True)
    net = make(callbacks=[scoring, logger]).fit(X, NAMES)
    assert net.history[-1, "relative_flatness"] == pytest.approx(net.relative_flatness_, rel=1e-6)
    for name in ("flatness_penalty", "relative_flatness"):
        values = net.history[:, name]
        assert min(values) > 0
        assert read(name) == [
            (epoch, pytest.approx(value, rel=1e-6)) for epoch, value in enumerate(values, 1)
        ]
