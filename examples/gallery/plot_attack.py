"""
Flatness along an attack
========================

An attack moves an image in small steps that raise the loss, until the network sees another class.
The loss is sharp where the label flips, and flat again behind it: there the network is wrong and
confident (Walter et al. 2026, "When Flatness Does (Not) Guarantee Adversarial Robustness"). A flat
loss at a sample does not tell that its class is right.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from relflat_sk import RelativeFlatnessRegularizedClassifier, relative_flatness

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
X, X_test, y, y_test = train_test_split(X, y, train_size=800, random_state=0)
net = RelativeFlatnessRegularizedClassifier(flatness_weight=0, random_state=0, verbose=0).fit(X, y)

# %%
# Attack other images
# -------------------
# Each step moves every pixel by 0.01 in the direction in which the loss rises. With ``per_sample``,
# ``relative_flatness`` returns a number for each image.

is_right = net.predict(X_test) == y_test
path, labels = [X_test[is_right]], torch.as_tensor(y_test[is_right])
for _ in range(30):
    images = torch.tensor(path[-1], requires_grad=True)
    loss = torch.nn.functional.cross_entropy(net.module_(images), labels)
    (gradient,) = torch.autograd.grad(loss, images)
    path.append(path[-1] + 0.01 * gradient.sign().numpy())

kappa = np.array([relative_flatness(net, images, per_sample=True) for images in path])
probabilities = np.array([net.predict_proba(images) for images in path])
of_label = probabilities[:, np.arange(len(labels)), labels]
flip = (probabilities.argmax(axis=2) != labels.numpy()).argmax(axis=0)  # the first step

# %%
# Single images, and their mean
# -----------------------------
# Steps are counted from the one at which the label flips.

fig, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
around = np.arange(-8, 16)
for ax, values, name in (
    (axes[0], kappa, "flatness at an image (nats, small is flat)"),
    (axes[1], of_label, "probability of the right class"),
):
    # an image that flips early has no earlier steps
    at = {step: [values[t + step, i] for i, t in enumerate(flip) if 0 <= t + step <= 30]
          for step in around}  # fmt: skip
    for i in range(12):
        steps = np.arange(31) - flip[i]
        shown = (steps >= -8) & (steps < 16)
        ax.plot(steps[shown], values[shown, i], color="0.8")
    ax.plot(around, [np.mean(at[step]) for step in around], "o-", label="mean")
    ax.axvline(0, color="0.6", linestyle="--")
    ax.set(xlabel="step after the label flips", ylabel=name)
axes[0].legend()

at_flip = kappa[flip, np.arange(len(flip))]
assert flip.min() > 0
assert at_flip.mean() > 3 * kappa[0].mean()
assert kappa[-1].mean() < at_flip.mean() / 5
