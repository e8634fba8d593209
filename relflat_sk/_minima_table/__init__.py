"""The table of minima: its columns, its hyper-parameters, and how Optuna's trials become rows.

`relflat_sk.minima` documents the columns. The statistics, the displays and the search read
the table with these functions only.
"""

from relflat_sk._minima_table.columns import (
    PARAM_PREFIX,
    column_of,
    is_complete,
    is_converged,
    is_reserved,
    is_score,
    measure_columns,
    numeric_column,
)
from relflat_sk._minima_table.depth import (
    DEPTH_BAND,
    check_depth_band,
    depth_of,
    find_depth_band,
    mark_depth_band,
)
from relflat_sk._minima_table.hyperparameters import (
    find_axes,
    find_axis,
    number_levels,
    parameter_columns,
    plain_name,
    shorten_parameters,
)
from relflat_sk._minima_table.trials import (
    CURVES,
    MADE_WITH,
    NO_REASON,
    STATES,
    UNITS,
    curves_of,
    minima_table,
    remeasured_key,
    table_of_trials,
)

__all__ = [
    "CURVES",
    "DEPTH_BAND",
    "MADE_WITH",
    "NO_REASON",
    "PARAM_PREFIX",
    "STATES",
    "UNITS",
    "check_depth_band",
    "column_of",
    "curves_of",
    "depth_of",
    "find_axes",
    "find_axis",
    "find_depth_band",
    "is_complete",
    "is_converged",
    "is_reserved",
    "is_score",
    "mark_depth_band",
    "measure_columns",
    "minima_table",
    "number_levels",
    "numeric_column",
    "parameter_columns",
    "plain_name",
    "remeasured_key",
    "shorten_parameters",
    "table_of_trials",
]
