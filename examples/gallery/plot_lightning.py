"""
The penalty in Lightning
========================

``LightningFlatnessCallback`` adds the penalty to the loss of a ``LightningModule``, which stays as
it is, and logs penalty and relative flatness in each epoch.
"""

import logging
import warnings

import matplotlib.pyplot as plt
import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk.training import LightningFlatnessCallback

# a list of devices, and advice on workers
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
digits = load_digits()
data = TensorDataset(
    torch.as_tensor(digits.data / 16, dtype=torch.float32), torch.as_tensor(digits.target)
)


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        X, y = batch
        loss = nn.functional.cross_entropy(self.network(X), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Curves(Callback):
    """Keep what is logged, as loggers do."""

    def __init__(self):
        self.rows = []

    def on_train_epoch_end(self, trainer, pl_module):
        names = ("train_loss", "relative_flatness")
        self.rows.append([float(trainer.callback_metrics[name]) for name in names])


# %%
# One callback is all that the penalty takes
# ------------------------------------------


def train(weight):
    seed_everything(0, verbose=False)
    curves = Curves()
    flat = LightningFlatnessCallback(nn.CrossEntropyLoss(), network="network", weight=weight)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[flat, curves],
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=64, shuffle=True))
    return torch.tensor(curves.rows)


curves = {weight: train(weight) for weight in (0.0, 10.0)}
fig, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for weight, values in curves.items():
    for ax, column in zip(axes, values.T, strict=True):
        ax.plot(range(1, len(column) + 1), column, ".-", label=f"weight {weight:g}")
for ax, name in zip(
    axes, ("training loss (nats)", "relative flatness (small is flat)"), strict=True
):
    ax.set(xlabel="epoch", ylabel=name, ylim=(0, None))
axes[0].legend()

(loss, flatness), (flat_loss, flat_flatness) = (values[-1] for values in curves.values())
assert flat_flatness < flatness / 2
assert flat_loss < 2 * loss
