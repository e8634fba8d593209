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

# for the packages above, not public
from relflat_sk.minima._columns import PARAM_PREFIX as PARAM_PREFIX
from relflat_sk.minima._columns import column_of as column_of
from relflat_sk.minima._columns import find_axes as find_axes
from relflat_sk.minima._columns import find_axis as find_axis
from relflat_sk.minima._columns import is_complete as is_complete
from relflat_sk.minima._columns import is_converged as is_converged
from relflat_sk.minima._columns import is_reserved as is_reserved
from relflat_sk.minima._columns import measure_columns as measure_columns
from relflat_sk.minima._columns import numeric_column as numeric_column
from relflat_sk.minima._columns import parameter_columns as parameter_columns
from relflat_sk.minima._columns import plain_name as plain_name
from relflat_sk.minima._columns import shorten_parameters as shorten_parameters
from relflat_sk.minima._correlation import correlate_measures
from relflat_sk.minima._depth import AT_EQUAL_LOSS as AT_EQUAL_LOSS
from relflat_sk.minima._depth import AUTO as AUTO
from relflat_sk.minima._depth import check_depth_band as check_depth_band
from relflat_sk.minima._depth import depth_of as depth_of
from relflat_sk.minima._depth import find_depth_band as find_depth_band
from relflat_sk.minima._depth import mark_depth_band as mark_depth_band
from relflat_sk.minima._granulated import granulated_kendall
from relflat_sk.minima._mutual_information import conditional_mutual_information
from relflat_sk.minima._ranking import rank_minima
from relflat_sk.minima._resampling import FEWEST_MINIMA as FEWEST_MINIMA
from relflat_sk.minima._resampling import select_minima as select_minima
from relflat_sk.minima._trials import CURVES as CURVES
from relflat_sk.minima._trials import DETAILS as DETAILS
from relflat_sk.minima._trials import MADE_WITH as MADE_WITH
from relflat_sk.minima._trials import MEASURES as MEASURES
from relflat_sk.minima._trials import NO_REASON as NO_REASON
from relflat_sk.minima._trials import STATES as STATES
from relflat_sk.minima._trials import UNITS as UNITS
from relflat_sk.minima._trials import attributes_of as attributes_of
from relflat_sk.minima._trials import curves_of as curves_of
from relflat_sk.minima._trials import minima_table as minima_table
from relflat_sk.minima._trials import remeasured_key as remeasured_key
from relflat_sk.minima._trials import table_of_rows as table_of_rows
from relflat_sk.minima._trials import table_of_trials as table_of_trials

__all__ = [
    "conditional_mutual_information",
    "correlate_measures",
    "granulated_kendall",
    "rank_minima",
]
