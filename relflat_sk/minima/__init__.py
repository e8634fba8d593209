"""Rank minima by flatness, and test whether a measure predicts the generalization gap.

All functions take a table with one row per trained network, an Optuna study or a fitted
`FlatMinimaSearch`. A table has these columns, of which only those that a function reads have
to be there:

======================  =======  ===========================================================
column                  type     meaning
======================  =======  ===========================================================
``trial``               int      number of the trial in its study
``model``               str      name of the model; only in tables of `rank_models`
``param_<name>``        any      value of a varied parameter, as in ``cv_results_``
one per measure         float    value of the measure, such as ``relative_flatness``;
                                 small is flat
``train_loss``          float    mean loss on the training data
``test_loss``           float    mean loss on the held-out data, nan without such data
``generalization_gap``  float    ``test_loss - train_loss``
``train_score``         float    the estimator's own ``score`` on the training data
``test_score``          float    the estimator's own ``score`` on the held-out data
``depth``               float    loss of the best constant prediction over ``train_loss``
``converged``           bool     whether training ended in a minimum
``comparable``          bool     whether it is a minimum of the depth that is compared
``ended_by``            str      ``"goal"``, ``"plateau"``, ``"solver"`` or ``"equal loss"``,
                                 for a minimum
``seconds``             float    duration of the training
``state``               str      ``"complete"``, ``"failed"`` or ``"pruned"``
``reason``              str      why there is no comparable minimum; otherwise empty
``rank``                int      1 is flattest; only in ranked tables
======================  =======  ===========================================================

Every other numeric column counts as a measure, so that a table can be extended by hand.
"""

from relflat_sk.minima._correlation import correlate_measures
from relflat_sk.minima._hyperparameters import conditional_mutual_information, granulated_kendall
from relflat_sk.minima._ranking import rank_minima

__all__ = [
    "conditional_mutual_information",
    "correlate_measures",
    "granulated_kendall",
    "rank_minima",
]
