"""The table of minima: ranked, correlated and judged."""

from relflat_sk.minima._correlation import correlate
from relflat_sk.minima._granulated import granulated_kendall

# for the packages above, not public
from relflat_sk.minima._hyperparameters import find_axis as find_axis
from relflat_sk.minima._mutual_information import conditional_mutual_information
from relflat_sk.minima._resampling import FEWEST as FEWEST
from relflat_sk.minima._resampling import Bools as Bools
from relflat_sk.minima._resampling import Floats as Floats
from relflat_sk.minima._resampling import Judged as Judged
from relflat_sk.minima._resampling import judge as judge
from relflat_sk.minima._table import NO_REASON as NO_REASON
from relflat_sk.minima._table import PARAM_PREFIX as PARAM_PREFIX
from relflat_sk.minima._table import STATES as STATES
from relflat_sk.minima._table import is_complete as is_complete
from relflat_sk.minima._table import is_converged as is_converged
from relflat_sk.minima._table import later as later
from relflat_sk.minima._table import measure_columns as measure_columns
from relflat_sk.minima._table import minima_table as minima_table
from relflat_sk.minima._table import numeric_column as numeric_column
from relflat_sk.minima._table import rank_minima
from relflat_sk.minima._table import table_of_trials as table_of_trials

__all__ = ["conditional_mutual_information", "correlate", "granulated_kendall", "rank_minima"]
