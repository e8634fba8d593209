"""
The flatness of each layer of a transformer
===========================================

``flatness_report`` measures every layer with a weight matrix in one pass: linear layers,
convolutions, and the projections within attention. The network here reads the eight rows of an
image of a digit as eight tokens.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from relflat_sk import LayerFlatnessDisplay, RelativeFlatnessRegularizedClassifier, flatness_report


class RowTransformer(nn.Module):
    """Attend to the rows of an image, and classify the mean token."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.encoder = nn.TransformerEncoderLayer(
            width, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, 10)

    def forward(self, X):
        return self.head(self.encoder(self.embed(X) + self.place).mean(dim=1))


X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32).reshape(-1, 8, 8)
net = RelativeFlatnessRegularizedClassifier(
    RowTransformer, flatness_weight=0.0, lr=0.005, max_epochs=15, random_state=0, verbose=0
).fit(X, y)
print(f"accuracy {net.score(X, y):.3f}")

# %%
# One row for each layer
# ----------------------
# At layers that attention or a smooth function follows, the measure is computed by Hessian-vector
# products: exactly if few of them suffice, and otherwise by random probes, with a standard error.

report = flatness_report(
    net, X[:200], y[:200], measures="relative_flatness", n_probes=20, random_state=0
)
print(report[["layer", "value", "stderr"]].to_string(index=False))

display = LayerFlatnessDisplay(report=report).plot()
display.ax_.set_title("A transformer on rows of digits")

assert (report["value"] > 0).all()
assert report["stderr"].iloc[-1] == 0  # exact at the last layer
