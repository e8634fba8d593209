r"""Choose how the curvature of the loss in the outputs of layers is computed.

The *tail* of a network is its part behind a layer, up to the loss. Let ``B_i`` be the Hessian of
the loss of sample i in the layer's output. What the tail computed in a forward pass decides which
of four ways to ``B_i`` there are:

closed form
    The layer's output is what the criterion takes, or is turned into that by one function that
    the table of losses knows: the table has ``B_i``. The same holds for each token of a language
    model whose last layer puts out the logits.
many classes
    The same for a softmax over thousands of classes, as at the head of a language model: sums over
    the classes run over chunks of them.
gradients
    The tail up to the criterion's input is piecewise linear, with Jacobian ``J_i``, and the table
    has the curvature ``R_i R_i^T`` of the loss in that input: then ``B_i = (J_i^T R_i)
    (J_i^T R_i)^T``. A backward pass pulls one vector of each sample back to all layers at once.
products
    Anything else: products ``B_i v_i`` by differentiating twice.

The measures and the penalty both choose here, and each of them makes its own four objects of
what was chosen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor, nn

from relflat_sk._losses import MANY, ClosedForm, Loss, ManyClasses, Target
from relflat_sk._network.borrowing import has_own_forward
from relflat_sk._network.graph import find_link, is_piecewise_linear, only_moves_axes
from relflat_sk._network.recording import LayerRecord

CurvatureT = TypeVar("CurvatureT")
CurvatureT_co = TypeVar("CurvatureT_co", covariant=True)


class _Ways(Protocol[CurvatureT_co]):
    """Makes an object for each of the four ways to a curvature."""

    def closed_form(
        self, record: LayerRecord, features: Tensor, curvature: ClosedForm
    ) -> CurvatureT_co:
        """Make the object of a layer whose curvature the table of losses has.

        Shapes: `features` (n, m).
        """

    def many_classes(
        self, record: LayerRecord, features: Tensor, curvature: ManyClasses
    ) -> CurvatureT_co:
        """Make the object of a layer that puts out the logits of very many classes.

        Shapes: `features` (n, m).
        """

    def gradients(
        self, records: Sequence[LayerRecord], base: Tensor, curvature: ClosedForm
    ) -> CurvatureT_co:
        """Make the object of all layers behind which the network is piecewise linear.

        Shapes: `base` (n, o).
        """

    def products(self, records: Sequence[LayerRecord]) -> CurvatureT_co:
        """Make the object of all other layers."""


@dataclass(slots=True)
class Tail:
    """The network's output and the loss, behind some layers in one forward pass."""

    loss: Loss
    output: Tensor
    target: Target | None
    last: LayerRecord
    precise: Callable[[Tensor], Tensor]

    @property
    def relevant(self) -> Tensor | None:
        """The labels, if curvatures depend on them."""
        return None if self.target is None else self.target.relevant

    def closed_form(self, record: LayerRecord, ways: _Ways[CurvatureT]) -> CurvatureT | None:
        """Make the object of a layer whose curvature the table of losses has."""
        features, z = record.check()
        loss, relevant = self.loss, self.relevant
        if z.ndim == 2:
            link = self._link(record)
        elif loss.has_closed_form("identity") and only_moves_axes(self.output, record.node, z):
            link, relevant = "identity", loss.per_token(relevant)
            z = z.reshape(-1, z.shape[-1])
            features = features.reshape(len(z), -1)
        else:
            return None
        if not loss.has_closed_form(link):
            return None
        if z.shape[1] >= MANY:
            many = ManyClasses.of(loss.closed_form(link, z, relevant))
            if many is not None:
                return ways.many_classes(record, features, many)
        curvature = loss.closed_form(link, self.precise(z), relevant)
        return None if curvature is None else ways.closed_form(record, features, curvature)

    def _link(self, record: LayerRecord) -> str | None:
        """Return the function behind a layer; None where the criterion sees other axes than it."""
        z = record.output
        same = self.output.ndim <= 2 and z is not None and len(self.output) == len(z)
        return find_link(self.output, record.node) if same else None

    def base(self) -> tuple[Tensor, ClosedForm] | None:
        """Return where the table's curvature applies, as (n, o), and that curvature."""
        loss, base, link = self.loss, self.output, "identity"
        if not loss.has_closed_form(link):
            if self.last.calls != 1:
                return None
            _, z = self.last.check()
            base = z if self.last.tail_input is None else self.last.tail_input
            link = self._link(self.last) or ""
        if base.ndim > 2 or (base.ndim == 1 and not loss.acts_on_each_output):
            return None
        base = base.reshape(len(base), -1)
        curvature = loss.closed_form(link, self.precise(base), self.relevant)
        return None if curvature is None else (base, curvature)


def choose_curvatures(
    tail: Tail,
    records: Sequence[LayerRecord],
    ways: _Ways[CurvatureT],
    *,
    together: bool = False,
) -> list[CurvatureT]:
    """Choose how the curvatures at some layers are computed."""
    closed, others = [], []
    for record in records:
        found = tail.closed_form(record, ways)
        if found is None:
            others.append(record)
        else:
            closed.append(found)
    if not others:
        return closed
    chosen = []
    base = tail.base()
    if base is not None:
        linear, others = _split_by_linearity(base[0], others, together)
        if linear:
            chosen.append(ways.gradients(linear, *base))
    if others:
        chosen.append(ways.products(others))
    return chosen + closed


def _split_by_linearity(
    base: Tensor, records: list[LayerRecord], together: bool
) -> tuple[list[LayerRecord], list[LayerRecord]]:
    """Tell the layers behind which the network is piecewise linear up to `base` from others."""
    # a network that is piecewise linear in all outputs together is so in each of them
    if is_piecewise_linear(base, *(record.node for record in records)):
        return records, []
    if together or len(records) == 1:
        return [], records
    linear = [is_piecewise_linear(base, record.node) for record in records]
    return (
        [record for record, is_linear in zip(records, linear, strict=True) if is_linear],
        [record for record, is_linear in zip(records, linear, strict=True) if not is_linear],
    )


def is_large_head(layer: nn.Module) -> bool:
    """Return whether a layer is linear and nothing else, with very many outputs."""
    if type(layer) is not nn.Linear or has_own_forward(layer):
        return False
    return layer.out_features >= MANY and "weight" in layer._parameters
