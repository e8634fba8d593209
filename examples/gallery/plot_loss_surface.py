"""
A sharp and a flat minimum that compute almost the same
=======================================================

Two networks start from the same weights and are trained to the same loss, with and without the
penalty. Their predictions agree on almost all images, but the loss around them does not look the
same. ``python examples/gallery/plot_loss_surface.py docs/surfaces.png`` draws the picture of the
README.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import ortho_group
from sklearn.datasets import load_digits

from relflat_sk import RelativeFlatnessRegularizedClassifier, StopAtLoss

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)


def train(weight):
    return RelativeFlatnessRegularizedClassifier(
        flatness_weight=weight,
        callbacks=[StopAtLoss(0.02)],
        lr=0.01,
        max_epochs=200,
        random_state=0,
        verbose=0,
    ).fit(X, y)


nets = {"without penalty": train(0.0), "with penalty": train(3.0)}
sharp, flat = nets.values()
agreement = (sharp.predict(X) == flat.predict(X)).mean()
print(f"equal predictions: {agreement:.1%}")

# %%
# The loss in a plane through each minimum
# ----------------------------------------
# The plane changes the last layer's weight W to W + W (s A + t B), with random orthogonal matrices
# A and B, which the two networks share. On average over such matrices, the loss rises by
# kappa / (2 m) times the squared distance, to second order, with the relative flatness kappa and
# the layer's m inputs.

m = sharp.module_[-1].in_features
A, B = (torch.as_tensor(matrix, dtype=torch.float32) for matrix in ortho_group(m, seed=0).rvs(2))
steps = np.linspace(-0.6, 0.6, 17)


@torch.no_grad()
def surface(net):
    """Return the mean loss at all steps along A and B."""
    *layers, last = net.module_
    features = torch.nn.Sequential(*layers)(torch.as_tensor(X))
    moved = [[last.weight + last.weight @ (s * A + t * B) for t in steps] for s in steps]
    loss = torch.nn.CrossEntropyLoss()
    labels = torch.as_tensor(y)
    return np.array([
        [float(loss(features @ W.T + last.bias, labels)) for W in row] for row in moved
    ])


surfaces = {name: surface(net) for name, net in nets.items()}
top = max(losses.max() for losses in surfaces.values())
grid = np.meshgrid(steps, steps, indexing="ij")
fig, axes = plt.subplots(
    1, 2, figsize=(10, 4.4), layout="constrained", subplot_kw={"projection": "3d"}
)
fig.suptitle(f"Two networks with equal predictions on {agreement:.1%} of the images. Small is flat")
for ax, (name, losses) in zip(axes, surfaces.items(), strict=True):
    ax.plot_surface(*grid, losses, cmap="viridis", vmin=0, vmax=top)
    ax.set(xlabel="first direction", ylabel="second direction", zlabel="training loss (nats)")
    ax.set(zlim=(0, top), xticks=[-0.5, 0, 0.5], yticks=[-0.5, 0, 0.5], zticks=[0, 0.1, 0.2])
    ax.set_box_aspect(None, zoom=0.95)  # leaves room for the label of the loss
    ax.set_title(f"trained {name}: relative flatness {nets[name].relative_flatness_:.1f}")
if sys.argv[1:]:
    fig.savefig(sys.argv[1], dpi=160)

assert agreement > 0.98
assert sharp.relative_flatness_ > 2 * flat.relative_flatness_
centre = len(steps) // 2
rise = {name: losses.mean() - losses[centre, centre] for name, losses in surfaces.items()}
assert rise["without penalty"] > 2 * rise["with penalty"]
