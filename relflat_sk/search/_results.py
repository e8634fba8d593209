"""What a search shows of its table of minima: as scikit-learn's searches do, and in words."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from optuna.trial import FrozenTrial

from relflat_sk.minima import is_complete, is_converged
from relflat_sk.search._trial import Space

__all__ = ["cv_results", "list_reasons"]


def list_reasons(table: pd.DataFrame) -> str:
    """Say how often what went wrong, most frequent first."""
    counts = table["reason"].value_counts().head(5)
    return "\n".join(f"  {count} x {str(reason)[:500]}" for reason, count in counts.items())


def cv_results(
    table: pd.DataFrame,
    ranked: pd.DataFrame,
    by: str,
    space: Space,
    trials: Sequence[FrozenTrial],
) -> dict[str, Any]:
    """Arrange the table as scikit-learn's searches do, one entry per candidate."""
    minima = is_converged(table) & is_complete(table)
    counted = minima if minima.any() else is_complete(table)
    scores = np.where(counted, -table[by].to_numpy(dtype=float), np.nan)
    params = [space.values(trials[number]) for number in table["trial"].tolist()]
    results: dict[str, Any] = {
        "mean_fit_time": table["seconds"].to_numpy(dtype=float),
        "std_fit_time": np.zeros(len(table)),
    }
    for name in space.entries:
        values = np.ma.array(np.empty(len(table), dtype=object), mask=True)
        for index, drawn in enumerate(params):
            if name in drawn:
                values[index] = drawn[name]
        results[f"param_{name}"] = values
    results["params"] = params
    results["split0_test_score"] = scores
    results["mean_test_score"] = scores.copy()
    results["std_test_score"] = np.zeros(len(table))
    ranks = ranked.set_index("trial")["rank"]
    results["rank_test_score"] = ranks.loc[table["trial"]].to_numpy(dtype=np.int32)
    return results
