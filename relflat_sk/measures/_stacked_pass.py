"""A pass over the data by many networks of one architecture at once, as one stacked model.

`torch.func.vmap` runs the sums of a single network for all of them, at the last layer, where the
curvature has a closed form: nothing is differentiated or drawn.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relflat_sk._checks import gather_checks
from relflat_sk._losses import Loss, Target
from relflat_sk._network import Batch, Layer, Network, borrowed, layer_map, sample_weight
from relflat_sk._numerics import full_precision
from relflat_sk.measures._layer_measures import TRACE_LIKE, TraceMeasures, finish_measures
from relflat_sk.measures._layer_pass import ClosedFormLayerPass
from relflat_sk.measures._quantities import ByClosedForm, Key
from relflat_sk.measures._results import Found, Summary
from relflat_sk.measures._scan import ForwardPass, run_first_batch

# samples of each network that run at once, as in the checks of goals
_AT_ONCE = 256

# from inputs to the network's outputs and the features of its last layer
Run = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StackedPass:
    """A pass over the data, in which `torch.func.vmap` can run many networks."""

    network: Network
    names: Sequence[str]
    layer: str
    order: list[str]

    def sums(self, weight: Tensor, run: Run) -> tuple[dict[Key, Tensor], Tensor]:
        """Run a network on all the data, and sum up what its measures are made of.

        Shapes: `weight` (d, m); returns totals (q,), outputs (n, d).
        """
        measures, outputs = self._measures(self.network), []
        for batch in self._batches():
            z, features = run(batch.x)
            measures.add(self._forward(batch, z, features, weight))
            outputs.append(z)
        return measures.totals, torch.cat(outputs)

    def summaries(self, weights: Tensor, outputs: Tensor) -> list[Summary]:
        """Sum up the losses of all networks.

        This takes no `torch.func.vmap`, which imports half of torch for a cross-entropy: samples
        of different networks are samples of one batch.

        Shapes: `weights` (k, d, m), `outputs` (k, n, d).
        """
        (k, n, d), first = outputs.shape, 0
        losses, divisor = (outputs.new_zeros(shape, dtype=torch.float64) for shape in (k, ()))
        for batch in self._batches():
            z = full_precision(outputs[:, first : first + len(batch.x)])
            first += len(batch.x)
            loss, target = self._read(batch, z[0])
            values = target.values.repeat(k, *[1] * (target.values.ndim - 1))
            each = loss.losses(z.flatten(0, 1), values, each=True).view(z.shape[:2])
            own = sample_weight(batch, z.shape[1], z.device)
            losses += each.double() @ own
            divisor += loss.divisors(z[0], target.relevant).double() @ own
        return [
            Summary(
                divisor, losses[i], n, torch.Size([d]), "identity", True,
                {self.layer: weights[i].double()}, self.order,
            )
            for i in range(k)
        ]  # fmt: skip

    def results(self, network: Network, totals: dict[Key, Tensor], summary: Summary) -> Found:
        """Compute the measures of a network from its sums. Shapes: `totals` (q,)."""
        measures = self._measures(network)
        measures.adopt(totals, ByClosedForm.method)
        return finish_measures([measures], summary, self.names)

    def _measures(self, network: Network) -> TraceMeasures:
        return TraceMeasures(
            network, self.names, method="auto", n_probes=None, rtol=0.01, random_state=0
        )

    def _batches(self) -> Iterator[Batch]:
        """Cut the batches of the data into parts."""
        for batch in self.network.batches():
            for first in range(0, len(batch.x), _AT_ONCE):
                part = slice(first, first + _AT_ONCE)
                weight = None if batch.weight is None else batch.weight[part]
                x, y = self.network.prepare(batch.x[part]), batch.y
                yield Batch(x, None if y is None else y[part], weight)

    def _read(self, batch: Batch, z: Tensor) -> tuple[Loss, Target]:
        """Return the loss and the labels for outputs of a network."""
        loss = self.network.loss.to(z.device, z.dtype)
        assert batch.y is not None
        return loss, loss.read_target(z, batch.y)

    def _forward(self, batch: Batch, z: Tensor, features: Tensor, weight: Tensor) -> ForwardPass:
        """Make a forward pass of a network; its losses are summed up by `summaries`."""
        output = full_precision(z)
        loss, target = self._read(batch, output)
        form = loss.closed_form("identity", z.double(), target.relevant)
        assert form is not None
        as_map = layer_map(self.network.module.get_submodule(self.layer), weight)
        none = torch.zeros_like(output[:, 0])
        layer = ClosedFormLayerPass(self.layer, as_map, features, z, none, form)
        return ForwardPass(
            layers={self.layer: layer},
            curvatures=[ByClosedForm(layer)],
            sample_weight=sample_weight(batch, len(z), z.device),
            divisor=0.0,
            loss=none.sum(),
            output_shape=z.shape[1:],
            link="identity",
            has_labels=True,
        )


def plan_stacked_pass(network: Network, names: Sequence[str], layer: Layer) -> StackedPass | None:
    """Plan a stacked pass, by running and checking one of the networks on the first batch."""
    if any(name not in TRACE_LIKE or TRACE_LIKE[name].normalized for name in names):
        return None
    with borrowed(network.module), gather_checks():
        batch, forward, order = run_first_batch(network, layer)
        mixes = isinstance(batch.x, Tensor) and _mixes_samples(network, batch.x)
    (curvature,) = forward.curvatures
    if not isinstance(curvature, ByClosedForm) or not isinstance(batch.x, Tensor):
        return None
    last = curvature.layer
    if (
        type(last) is not ClosedFormLayerPass
        or last.name != order[-1]
        or forward.link != "identity"
        or forward.output_shape != last.offset.shape[1:]
        or not forward.has_labels
        or mixes
    ):
        return None
    return StackedPass(network, names, last.name, order)


def _mixes_samples(network: Network, x: Tensor) -> bool:
    """Return whether outputs of samples in a part of a batch differ by more than rounding."""
    if len(x) <= _AT_ONCE:
        return False
    with torch.no_grad():
        outputs, others = network(x)[:_AT_ONCE], network(x[:_AT_ONCE])
    return bool((outputs - others).abs().max() > 1e-4 * outputs.abs().max())
