"""The table of criteria: targets, divisors, best constants, curvature in closed form.

A row of `TABLE` has, for a torch criterion, the task it belongs to, the check of its targets,
the divisors of its mean, the best constant prediction, and the curvature of the loss in a
layer's output ``z`` in closed form, for each function (a *link*) by which the network may turn
``z`` into the criterion's input. Other criteria are differentiated twice instead. Losses and
curvatures are always *summed* over outputs and samples. The divisors are summed as well, so
that sums of batches of any size can be added.
"""

from relflat_sk._losses.class_losses import CLASS_LOSSES
from relflat_sk._losses.output_losses import OUTPUT_LOSSES
from relflat_sk._losses.row import Row

__all__ = ["TABLE"]

TABLE: dict[type, Row] = {**CLASS_LOSSES, **OUTPUT_LOSSES}
