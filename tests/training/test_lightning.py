"""The callback for Lightning, against a plain loop with the same batches."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import RelativeFlatnessPenalty, relative_flatness

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer

from relflat_sk.training import LightningFlatnessCallback

pytestmark = [
    # of Lightning itself: few workers, an epoch shorter than the log interval, no logger
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|is smaller than the logging)"),
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|isinstance.treespec).*"),
]
CRITERION = nn.CrossEntropyLoss()
X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(dim=1)


def network(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


class Classifier(LightningModule):
    """Returns the loss alone, or in a dict."""

    def __init__(self, *, as_dict=False, automatic=True, optimizer=torch.optim.SGD, dropout=0.0):
        super().__init__()
        self.model = network(dropout)
        self.not_called = nn.Linear(4, 3)
        self.as_dict = as_dict
        self.automatic_optimization = automatic
        self.optimizer = optimizer

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, *_, y = batch.values() if isinstance(batch, dict) else batch
        loss = CRITERION(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "other": 1} if self.as_dict else loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.5)


def fit(module, *callbacks, data=None, shuffle=False, **kwargs):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        **{"max_epochs": 2} | dict.fromkeys(quiet, False) | kwargs,
    )
    torch.manual_seed(2)
    data = TensorDataset(X, Y) if data is None else data
    trainer.fit(module, DataLoader(data, batch_size=12, shuffle=shuffle))
    return trainer


def train_by_hand(penalty, accumulate):
    """The same steps in a plain loop: the network, and the mean penalty of the last epoch."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(2):
        penalties = []
        for i, (x, y) in enumerate(zip(X.split(12), Y.split(12), strict=True), start=1):
            with penalty.capture(net):
                output = net(x)
            term = penalty(CRITERION, output, y)
            penalties += [float(term.detach())] * len(y)
            ((CRITERION(output, y) + term) / accumulate).backward()
            if i % accumulate == 0 or i == 3:
                optimizer.step()
                optimizer.zero_grad()
    return net, sum(penalties) / len(X)


@pytest.mark.parametrize(("as_dict", "accumulate"), [(False, 1), (True, 2)])
def test_the_steps_are_those_of_a_plain_loop_with_the_penalty(as_dict, accumulate):
    module = Classifier(as_dict=as_dict)
    callback = LightningFlatnessCallback(CRITERION, network="model", weight=5.0, clip=5.0)
    trainer = fit(module, callback, accumulate_grad_batches=accumulate)
    expected, mean = train_by_hand(RelativeFlatnessPenalty(weight=5.0, clip=5.0), accumulate)
    for found, wanted in zip(module.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
    unpenalised, _ = train_by_hand(RelativeFlatnessPenalty(weight=0.0), accumulate)
    assert (unpenalised[0].weight - module.model[0].weight).abs().max() > 1e-3
    logged = trainer.callback_metrics
    assert float(logged["flatness_penalty"]) == pytest.approx(mean, rel=1e-5)
    flatness = relative_flatness(module.model, X, Y, criterion=CRITERION)
    assert float(logged["relative_flatness"]) == pytest.approx(flatness, rel=1e-5)


def test_measuring_changes_neither_the_training_nor_its_random_state():
    trained = []
    for callbacks in ([], [LightningFlatnessCallback(CRITERION, network="model", weight=0)]):
        module = Classifier(dropout=0.2)
        fit(module, *callbacks, shuffle=True)
        trained.append([*module.parameters(), torch.rand(3)])
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_batches_of_another_kind_the_module_itself_and_other_data():
    data = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    module = Classifier()
    callback = LightningFlatnessCallback(
        CRITERION,
        layer="all",
        every=2,
        dataset=data[:10],
        split_batch=lambda batch: (batch["x"], batch["y"]),
    )
    trainer = fit(module, callback, data=data)
    both = [
        relative_flatness(module.model, X[:10], Y[:10], layer=i, criterion=CRITERION)
        for i in range(2)
    ]
    assert float(trainer.callback_metrics["relative_flatness"]) == pytest.approx(
        sum(both), rel=1e-4
    )


def test_measurements_are_made_every_few_epochs_or_never():
    found = []

    class Note(LightningFlatnessCallback):
        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)
            found.append("relative_flatness" in trainer.callback_metrics)

    fit(Classifier(), Note(CRITERION, network="model", every=2), max_epochs=3)
    fit(Classifier(), Note(CRITERION, network="model", every=None), max_epochs=1)
    assert found == [False, True, True, False]


FLAT = {"network": "model"}
WRONG = {
    "no network": ({"network": "body"}, {}, "'body' is no submodule .*'model', 'not_called'"),
    "another call": ({"network": "not_called"}, {}, "'not_called' 0 times"),
    "by hand": (FLAT, {"automatic": False}, "optimises by hand"),
    "lbfgs": (FLAT, {"optimizer": torch.optim.LBFGS}, "LBFGS evaluates"),
}


@pytest.mark.parametrize("case", WRONG)
def test_trainings_without_a_penalty_are_refused_and_leave_the_module_as_it_was(case):
    flat, arguments, message = WRONG[case]
    module = Classifier(**arguments)
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit(module, LightningFlatnessCallback(CRITERION, **flat))
    assert "training_step" not in vars(module)
    assert not module.model._forward_hooks


def test_batches_that_are_no_pairs_are_refused():
    callback = LightningFlatnessCallback(CRITERION, network="model", weight=0)
    with pytest.raises(ValueError, match="pair of inputs and target, got a list of 3"):
        fit(Classifier(), callback, data=TensorDataset(X, X, Y))


def test_several_callbacks_give_the_module_its_own_step_back():
    callbacks = [
        LightningFlatnessCallback(CRITERION, network="model", layer=layer, every=None)
        for layer in (0, -1)
    ]
    modules = Classifier(), Classifier(), Classifier()
    own = partial(Classifier.training_step, modules[1])
    modules[1].training_step = own
    fit(modules[0], *callbacks)
    fit(modules[1], *callbacks)
    fit(modules[2], callbacks[0])
    steps = [vars(module).get("training_step") for module in modules]
    assert steps == [None, own, None]
    first, second, third = (module.model[0].weight for module in modules)
    assert torch.equal(first, second)
    assert (first - third).abs().max() > 1e-6


def test_a_skipped_step_stays_skipped():
    class Skipping(Classifier):
        def training_step(self, batch, batch_idx):
            self.model(batch[0])

    module = Skipping()
    with pytest.warns(UserWarning, match="returned `None`"):
        fit(module, LightningFlatnessCallback(CRITERION, network="model", every=None))
    assert torch.equal(module.model[0].weight, network()[0].weight)
