"""
The penalty in Hugging Face's Trainer
=====================================

``TransformersFlatnessCallback`` adds the penalty to the loss that a model of transformers computes,
and adds penalty and relative flatness to the trainer's logs. The model here is a small vision
transformer, which starts from random weights.
"""

import tempfile

import matplotlib.pyplot as plt
import pandas as pd
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import (
    PrinterCallback,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from relflat_sk.training import TransformersFlatnessCallback


class Digits(Dataset):
    def __init__(self):
        digits = load_digits()
        self.images = torch.as_tensor(digits.images / 16, dtype=torch.float32)[:, None]
        self.labels = digits.target.tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixel_values": self.images[i], "labels": self.labels[i]}


# %%
# A model of two by two patches
# -----------------------------

config = ViTConfig(
    image_size=8,
    patch_size=4,
    num_channels=1,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0.0,
    num_labels=10,
)


def train(weight):
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=5,
            per_device_train_batch_size=64,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="epoch",
            disable_tqdm=True,
        )
        flat = TransformersFlatnessCallback(weight=weight)
        trainer = Trainer(
            ViTForImageClassification(config), arguments, train_dataset=Digits(), callbacks=[flat]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    log = pd.DataFrame(trainer.state.log_history)
    return log[log["relative_flatness"].notna()]


logs = {weight: train(weight) for weight in (0.0, 10.0)}

# %%
# Loss and flatness of each epoch
# -------------------------------
# The trainer's own loss contains the penalty, which is subtracted here.

fig, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
losses = {
    weight: log["loss"] - (log["flatness_penalty"] if weight else 0) for weight, log in logs.items()
}
for weight, log in logs.items():
    loss = losses[weight]
    for ax, column in zip(axes, (loss, log["relative_flatness"]), strict=True):
        ax.plot(log["epoch"], column, ".-", label=f"weight {weight:g}")
for ax, name in zip(
    axes, ("training loss (nats)", "relative flatness (small is flat)"), strict=True
):
    ax.set(xlabel="epoch", ylabel=name, xticks=log["epoch"], ylim=(0, None))
axes[0].legend()

plain, flat = (log["relative_flatness"].iloc[-1] for log in logs.values())
assert flat < 0.8 * plain
assert losses[10.0].iloc[-1] < losses[10.0].iloc[0] / 2
