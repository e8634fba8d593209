"""What the first forward pass of a training shows of a network, and later ones need not."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from relflat_sk._network import (
    ExplicitLayers,
    LayerRecord,
    Recorder,
    check_linear,
    check_rows,
    check_uses,
    depends_on,
    few_rows,
    uses_elsewhere,
)
from relflat_sk._numerics import without_autocast

__all__ = ["FirstPass", "check_is_of_pass"]


@dataclass(frozen=True)
class FirstPass:
    """The layers of a network in its first forward pass."""

    noticed: Collection[str] = ()
    rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def keep_rows(self, record: LayerRecord, features: Tensor, z: Tensor) -> None:
        """Copy some inputs and outputs of a layer."""
        few_features, few_z = few_rows(record, features, z)
        self.rows[record.name] = few_features.clone(), few_z.clone()

    def check(
        self,
        output: Tensor,
        records: Sequence[LayerRecord],
        explicit: ExplicitLayers,
        *,
        weighted: bool,
    ) -> None:
        """Refuse layers at which the penalty would not be that of the criterion."""
        for record in records:
            elsewhere = uses_elsewhere(output, record) or record.name in self.noticed
            check_uses(record.name, [record.name] if elsewhere else [])
            check_linear(record, *self.rows[record.name])
        with without_autocast(output):
            check_rows(output, records, partial(explicit.pull_back, linear=True), in_order=weighted)


def check_is_of_pass(output: Tensor, recorder: Recorder) -> None:
    """Refuse an output that depends on no recorded layer: that of another forward pass."""
    nodes = [recorder[name].node for name in recorder.order if recorder[name].node is not None]
    if nodes and not any(depends_on(output, node) for node in reversed(nodes)):
        raise ValueError(
            "y_pred is not the output of the captured forward pass. Call the network once, inside "
            "`with penalty.capture(module):`, and pass the output of this call: "
            "y_pred = module(X)."
        )
