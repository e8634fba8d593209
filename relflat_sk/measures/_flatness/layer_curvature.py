"""One pass over the data: what every flatness measure needs to see of a network.

`observe` streams the samples through the network once and yields, batch by batch, what
reaches each layer and the curvature of the loss behind it. Memory does not grow with the
number of samples.

The curvature comes in one of three ways, established from what the network did:

closed form
    The layer's output is what the criterion takes: the table has ``B_i``.
gradients
    The network behind the layer is piecewise linear, with Jacobian ``J_i``, and the table
    has the curvature ``R_i R_i^T`` of the loss in its output: then ``B_i = (J_i^T R_i)
    (J_i^T R_i)^T``, one backward pass for each column of ``R_i``, shared by all layers.
products
    Anything else: ``B_i v_i`` by differentiating twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from relflat_sk._losses import ClosedForm, Curvature, Loss, product_curvature
from relflat_sk._network import (
    Batch,
    Layer,
    LayerMap,
    LayerRecord,
    Network,
    Recorder,
    check_layer,
    find_layer,
    find_link,
    hands_on,
    is_piecewise_linear,
    layer_map,
    record_order,
    record_tail,
    sample_weight,
    weight_layers,
)

__all__ = ["LayerView", "View", "observe", "scan"]


@dataclass(frozen=True)
class LayerView:
    """One layer in one batch of n samples."""

    name: str
    map: LayerMap
    weight: Tensor  # (d, m), float64
    features: Tensor  # as the layer received them
    bump: Tensor  # zeros added to the layer's output, to differentiate by
    link: str | None  # from the layer's output to the network's, see `find_link`
    closed: ClosedForm | None  # curvature of the summed loss in the layer's output
    by_gradients: bool  # whether the network behind is piecewise linear
    summed_loss: Tensor

    @property
    def flat(self) -> bool:
        """Whether each sample has one position, features of shape (n, m)."""
        return self.map.is_flat(self.features)

    @property
    def how(self) -> str:
        """Where the curvature comes from: "closed form", "gradients" or "products"."""
        if self.closed is not None:
            return "closed form"
        return "gradients" if self.by_gradients else "products"

    @property
    def loss_gradient(self) -> Tensor:
        """Gradient of each sample's loss in the layer's output: rows."""
        found = None
        if self.summed_loss.requires_grad:
            (found,) = torch.autograd.grad(
                self.summed_loss, self.bump, retain_graph=True, allow_unused=True
            )
        found = torch.zeros_like(self.bump) if found is None else found
        if self.flat:  # also where tokens count as samples
            return found.reshape(len(self.features), -1, 1)
        return self.map.to_rows(found)

    @cached_property
    def products(self) -> Curvature:
        """The curvature through products, which always work."""
        return product_curvature(self.summed_loss, self.bump)

    def product(self, rows: Tensor) -> Tensor:
        """Products ``B_i v_i`` of rows of shape (n, d, P)."""
        if self.closed is not None:
            return self.closed.product(rows[:, :, 0])[:, :, None]
        vectors = self.map.from_rows(rows.to(self.bump.dtype), self.bump)
        return self.map.to_rows(self.products.product(vectors))

    def forms(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Forms ``v_i^T B_i v_i`` of several directions, each rows (n, d, P): each (n,)."""
        if self.closed is not None or len(directions) == 1:
            products = [self.product(rows) for rows in directions]
        else:
            vectors = [self.map.from_rows(v.to(self.bump.dtype), self.bump) for v in directions]
            try:
                found = self.products.product(torch.stack(vectors))
            except (
                RuntimeError,
                ValueError,
            ):  # a user's own autograd function need not know of vmap
                return [form for rows in directions for form in self.forms([rows])]
            products = [self.map.to_rows(one) for one in found]
        return [
            (product.double() * rows).sum(dim=(1, 2))
            for product, rows in zip(products, directions, strict=True)
        ]


@dataclass(frozen=True)
class View:
    """What one batch of n samples shows. All sums are over the batch."""

    layers: dict[str, LayerView]  # in forward order
    sample_weight: Tensor  # (n,), float64
    divisor: float  # what the criterion's mean divides this batch's sum by
    loss: float  # summed loss; nan without labels
    output_shape: torch.Size  # of one sample
    link: str | None  # from the last of the layers to the network's output
    base: Tensor | None  # (n, o), with graph: where the table's curvature applies
    curvature: ClosedForm | None  # of the summed loss in `base`

    def __len__(self) -> int:
        return len(self.sample_weight)

    def weights(self, n: int) -> Tensor:
        """Sample weights for n samples, or for the n tokens of the samples."""
        return self.sample_weight.repeat_interleave(n // len(self))

    def weighted_sum(self, per_sample: Tensor) -> Tensor:
        """Sum an array of shape (n, k) over samples, in float64: (k,)."""
        return self.weights(len(per_sample)) @ per_sample.double()

    @cached_property
    def root(self) -> Tensor:
        """A root of the curvature of the loss in `base`: (n, o, r), float64."""
        assert self.curvature is not None
        return self.curvature.root()

    def gradients(self, cotangent: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Pull vectors (n, o) in the network's output back to the layers.

        That is to rows (n, d, 1) of a flat layer's output, and to the weight (n, d, m) of any
        other: all quantities there share that sum over positions, which is what costs.
        """
        assert self.base is not None
        views = [self.layers[name] for name in names]
        found = torch.autograd.grad(
            self.base,
            [view.bump for view in views],
            cotangent.to(self.base.dtype),
            retain_graph=True,
            allow_unused=True,
        )
        pulled = {}
        for view, g in zip(views, found, strict=True):
            rows = view.map.to_rows(torch.zeros_like(view.bump) if g is None else g)
            pulled[view.name] = rows if view.flat else view.map.transpose(view.features, rows)
        return pulled


def observe(network: Network, layers: Sequence[Layer] | str) -> Iterator[View]:
    """Stream the data through the network and look at some of its layers.

    To be used within `borrowed`.

    Parameters
    ----------
    network : Network
    layers : sequence of int, str or nn.Module, or "all"
        See `relflat_sk._network.layers.find_layer`; positions count in forward order.

    Yields
    ------
    View
        One for each batch.

    Raises
    ------
    LayerNotFoundError, TypeError, ValueError
        If the layers, the data or the criterion do not fit the network.
    """
    if layers != "all":
        layers = [int(at) if isinstance(at, np.integer) else at for at in layers]
    names: list[str] = []
    for batch in network.batches():
        if not names:
            names, output, records = _first_pass(network, layers, batch)
            for name in names:
                _check_linear(network.module, records[name])
        else:
            output, records = _forward(network, names, batch)
        view = _look(network, names, batch, output, records)
        del output, records
        yield view
        del view  # nothing of a batch is alive when the next one is run


def scan(
    network: Network, layers: Sequence[Layer] | str, *visits: Callable[[View], object]
) -> None:
    """Run the network on all the data once, and call functions on every batch.

    To be used within `borrowed`.

    Parameters
    ----------
    network : Network
        The network, with its loss and data.
    layers : sequence of int, str or nn.Module, or "all"
        The layers to record, see `observe`.
    *visits : callable
        Called with the `View` of each batch, in this order. Nothing of a batch is alive when
        the network runs on the next one, unless one of the functions holds on to it.
    """
    for view in observe(network, layers):
        for visit in visits:
            visit(view)
        del view


def _first_pass(
    network: Network, layers: Sequence[Layer] | str, batch: Batch
) -> tuple[list[str], Tensor, Recorder]:
    """Run the first batch, and find the layers by the order in which they are called."""
    module = network.module
    registered = list(weight_layers(module))
    # most networks register layers in the order of their calls: a guess, checked below
    guess = registered if layers == "all" else [_guess(module, at, registered) for at in layers]
    with record_order(module) as recorder:
        output, records = _forward(network, guess, batch)
    order = recorder.order
    if layers == "all":
        if not order:
            find_layer(module, -1)  # says that there is none
        return order, output, records
    names = [
        find_layer(module, at, order) if isinstance(at, int) else name
        for at, name in zip(layers, guess, strict=True)
    ]
    # in forward order, each once: the base of all gradients is behind the last of them
    position = {name: at for at, name in enumerate(order)}
    names = sorted(dict.fromkeys(names), key=lambda name: position.get(name, -1))
    if not all(name in records for name in names):
        output, records = _forward(network, names, batch)
    return names, output, records


def _guess(module: nn.Module, layer: Layer, registered: list[str]) -> str:
    if isinstance(layer, int) and not isinstance(layer, bool) and registered:
        within = -len(registered) <= layer < len(registered)
        return registered[layer] if within else registered[0]
    return find_layer(module, layer)


def _forward(network: Network, names: Sequence[str], batch: Batch) -> tuple[Tensor, Recorder]:
    with torch.no_grad(), record_tail(network.module, *names) as records:
        return network(batch.x), records


def _check_linear(module: nn.Module, record: LayerRecord) -> None:
    name = record.name
    layer = check_layer(module, name)
    as_map = layer_map(layer)
    features, z = (array[:8] for array in record.check())
    with torch.no_grad():
        rows = as_map.apply(features, as_map.weight.to(features.dtype))
        bias = getattr(layer, "bias", None)
        expected = rows if bias is None else rows + bias[:, None]
        error = (as_map.to_rows(z) - expected).abs().max()
        scale = expected.abs().max()
    if not bool(error <= 0.01 * scale) and bool(torch.isfinite(scale)):
        raise ValueError(
            f"layer {name!r} does not compute W x + b with its own weight (a subclass with "
            "another forward?), so the curvature in its "
            "weight is not that of a linear layer. Measure another layer."
        )


def _look(
    network: Network, names: list[str], batch: Batch, output: Tensor, records: Recorder
) -> View:
    n = len(output)
    for name in names:
        _check_samples(records[name], output)
    loss = network.loss.to(output.device, output.dtype)
    output = loss.classes_second(output, batch.y)
    target = relevant = None
    if batch.y is not None:
        target, relevant = loss.read_target(output, batch.y.to(output.device))
    links = {name: find_link(output, records[name].node) for name in names}
    last = names[-1]
    loss.warn_of(links[last])
    by_token = {last} if _tokens_are_samples(loss, output, records[last]) else set()
    for name in names:
        flat = records[name].check()[1].ndim == 2
        closed = name in by_token or (flat and loss.has_closed_form(links[name]))
        if target is None and (loss.needs_target or not closed):
            raise ValueError(
                f"y is needed: the curvature of {type(loss.criterion).__name__} at layer "
                f"{name!r} depends on the labels here. Pass y."
            )
    all_closed = by_token == set(names) or all(map(loss.has_closed_form, links.values()))
    base = curvature = None
    if not all_closed and target is not None:
        base, curvature = _base(loss, output, links[last], records[last], relevant)
    if target is None:
        losses, divisors = output.new_full((n,), torch.nan), loss.divisors(output, None)
    else:
        with torch.enable_grad():
            losses, divisors = loss.terms(output, target, each=batch.weight is not None)
    weights = sample_weight(batch, n, output.device)
    layers = {}
    for name in names:
        features, z = records[name].check()
        bump = records[name].offset
        assert bump is not None
        as_map = layer_map(check_layer(network.module, name))
        # float64 from here on: probabilities close to one keep their distance from one
        closed_form = loss.closed_form(links[name], z.double(), relevant)
        if name in by_token:
            features = features.reshape(-1, features.shape[-1])
            z = z.reshape(-1, z.shape[-1]).double()
            closed_form = loss.closed_form("identity", z, loss.per_token(relevant))
        layers[name] = LayerView(
            name=name,
            map=as_map,
            weight=as_map.weight.double(),
            features=features,
            bump=bump,
            link=links[name],
            closed=closed_form,
            by_gradients=base is not None and is_piecewise_linear(base, records[name].node),
            summed_loss=losses.sum(),
        )
    return View(
        layers=layers,
        sample_weight=weights,
        divisor=float(weights @ divisors.detach().double()),
        loss=float(weights @ losses.detach().double()),
        output_shape=output.shape[1:],
        link=links[last],
        base=base,
        curvature=curvature,
    )


def _tokens_are_samples(loss: Loss, output: Tensor, record: LayerRecord) -> bool:
    """Whether each position's loss depends on that position's output alone: an LM head."""
    _, z = record.check()
    return z.ndim > 2 and loss.has_closed_form("identity") and hands_on(output, record.node, z)


def _check_samples(record: LayerRecord, output: Tensor) -> None:
    n = len(record.check()[1])
    if len(output) != n:
        raise ValueError(
            f"the network turned {n} rows at layer {record.name!r} into outputs of shape "
            f"{tuple(output.shape)}; expected one output for each sample."
        )


def _base(
    loss: Loss, output: Tensor, link: str | None, last: LayerRecord, relevant: Tensor | None
) -> tuple[Tensor | None, ClosedForm | None]:
    """Find where the table's curvature applies, and that curvature.

    That is the network's output where the criterion takes logits, and what the last layer
    puts out where the network turns those into probabilities first.
    """
    if loss.has_closed_form("identity"):
        base, applies = output, "identity"
    elif last.tail_input is not None and loss.has_closed_form(link):
        base, applies = last.tail_input, link or ""
    else:
        return None, None
    if base.ndim > 2 or (base.ndim == 1 and not loss.acts_on_each_output):
        return None, None
    with torch.enable_grad():
        base = base.reshape(len(base), -1)
    return base, loss.closed_form(applies, base.detach().double(), relevant)
