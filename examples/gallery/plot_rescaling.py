"""
A rescaling that fools the trace and not relative flatness
==========================================================

In a ReLU network, one layer can be multiplied by a factor and the next one divided by it without
any change of the predictions (Dinh et al. 2017). A measure of flatness that changes under such a
rescaling cannot tell how well a network generalises. Here the trace of the Hessian changes by
four orders of magnitude, and relative flatness does not change.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits

from relflat_sk import RelativeFlatnessRegularizedClassifier, measure, reparameterize

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
net = RelativeFlatnessRegularizedClassifier(
    flatness_weight=0.0, max_epochs=20, random_state=0, verbose=0
).fit(X, y)

# %%
# Copies of the network with the same predictions
# -----------------------------------------------
# The first layer is multiplied by a factor, and the last one divided by it.

factors = np.logspace(-1, 1, 9)
copies = [reparameterize(net.module_, [factor, 1 / factor], X=X) for factor in factors]
criterion = torch.nn.CrossEntropyLoss()
names = ["hessian_trace", "relative_flatness"]
values = {
    name: [float(measure(name, copy, X, y, criterion=criterion)) for copy in copies]
    for name in names
}

# %%
# The trace grows with the square of the factor
# ---------------------------------------------
# The last layer receives features that are larger by the factor.

fig, ax = plt.subplots(layout="constrained")
for name, marker in zip(names, "os", strict=True):
    ax.loglog(factors, np.array(values[name]) / values[name][4], marker=marker, label=name)
ax.set(
    xlabel="factor of the first layer",
    ylabel="measure, relative to that of the trained network",
    title="The same function, with other weights",
)
ax.legend()

with torch.no_grad():
    outputs = [copy(torch.as_tensor(X)) for copy in copies]
torch.testing.assert_close(outputs[0], outputs[-1], rtol=1e-3, atol=1e-3)
assert values["hessian_trace"][-1] > 1e3 * values["hessian_trace"][0]
assert np.ptp(values["relative_flatness"]) < 1e-3 * values["relative_flatness"][0]
