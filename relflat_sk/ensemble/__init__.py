"""Training of many nets at the same time, as one stacked model."""

# for the packages above, not public
from relflat_sk.ensemble._fleet import Fleet as Fleet
from relflat_sk.ensemble._measuring import StackedMeasures as StackedMeasures
from relflat_sk.ensemble._measuring import measure_with_others as measure_with_others
from relflat_sk.ensemble._routine import seconds_used as seconds_used
from relflat_sk.ensemble._single import Single
from relflat_sk.ensemble._size import fleet_size as fleet_size
from relflat_sk.ensemble._stacked_training import stacked_training
from relflat_sk.ensemble._trainer import EnsembleTrainer
from relflat_sk.training import set_single_trainer

__all__ = ["EnsembleTrainer", "stacked_training"]

set_single_trainer(Single)
