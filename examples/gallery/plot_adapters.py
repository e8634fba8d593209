"""
Rank the checkpoints of an adapter
==================================

A small transformer learns one task, and is fine-tuned on another one by a low-rank adapter of
PEFT. ``rank_models`` takes the saved adapters one after the other from a generator, which loads
each into the model. It measures at a layer's merged weight, or at the factors of the adapter. To
choose a checkpoint, take the last, or hold out data ("Does it help?").
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from relflat_sk import FlatnessScorer, rank_models

torch.manual_seed(0)
criterion = nn.CrossEntropyLoss()
base = BertForSequenceClassification(
    BertConfig(
        vocab_size=6,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=3,
    )
)


def make_task(n, first):
    """Sequences of tokens, and which of three tokens is the most frequent in them."""
    tokens = torch.randint(6, (n, 15))
    counts = torch.stack([(tokens == first + i).sum(1) for i in range(3)], dim=1)
    return {"input_ids": tokens}, counts.argmax(1)  # the first of several


def train(model, X, y, epochs, lr):
    """Train for some epochs, and yield their numbers."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in torch.randperm(len(y)).split(20):
            optimizer.zero_grad()
            logits = model(input_ids=X["input_ids"][batch]).logits
            criterion(logits, y[batch]).backward()
            optimizer.step()
        yield epoch


for _ in train(base, *make_task(2000, first=0), epochs=6, lr=5e-3):
    pass

# %%
# Fine-tune by an adapter
# -----------------------
# The adapter has factors of rank 4 at queries, values and all dense layers. The new task counts
# other tokens, and has 200 training samples.

X, y = make_task(200, first=3)
X_test, y_test = make_task(1000, first=3)
config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value", "dense"])
folder = tempfile.TemporaryDirectory()
adapted = get_peft_model(base, config)
for epoch in train(adapted, X, y, epochs=40, lr=5e-3):
    if epoch % 8 == 0:
        adapted.save_pretrained(Path(folder.name) / f"checkpoint-{epoch}")

# %%
# Rank the checkpoints
# --------------------
# The layer's name says what is measured: that of the adapted layer stands for the merged weight
# ``W + s B A``, and the factors A and B have names of their own. Checkpoints are compared where
# their losses are 30% of a constant prediction's; one that cannot reach this loss has no value.


def checkpoints():
    """Load one adapter after the other into the model."""
    for epoch in range(8, 41, 8):
        weights = load_peft_weights(Path(folder.name) / f"checkpoint-{epoch}", device="cpu")
        set_peft_model_state_dict(adapted, weights)
        yield f"epoch {epoch}", adapted


value = "base_model.model.bert.encoder.layer.0.attention.self.value"
params = {"at_loss": 0.3, "rtol": 0.1, "n_probes": 20}
tables = {
    where: rank_models(
        checkpoints(),
        X,
        y,
        criterion=criterion,
        measure=FlatnessScorer("comparable_flatness", layer=layer, measure_params=params),
        X_test=X_test,
        y_test=y_test,
        random_state=0,
    )
    for where, layer in {
        "head": -1,
        "merged weight": value,
        "factor A": f"{value}.lora_A.default",
        "factor B": f"{value}.lora_B.default",
    }.items()
}
minima = tables["head"]
minima[["model", "comparable_flatness", "train_loss", "test_loss", "reason", "rank"]].round(4)

# %%
# Along the fine-tuning
# ---------------------

fig, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True, layout="constrained")
along = minima.sort_values("trial")
for name, label in {"train_loss": "training data", "test_loss": "other data"}.items():
    axes[0].plot(8 * (along["trial"] + 1), along[name], ".-", label=label)
for where, table in tables.items():
    along = table.sort_values("trial")
    axes[1].plot(8 * (along["trial"] + 1), along["comparable_flatness"], ".-", label=where)
axes[0].set(xlabel="epoch", ylabel="loss (nats)")
axes[1].set(xlabel="epoch", ylabel="comparable flatness (small is flat)", yscale="log")
for ax in axes:
    ax.legend()
folder.cleanup()

assert len(minima) == 5
assert all(table["comparable_flatness"].notna().any() for table in tables.values())
