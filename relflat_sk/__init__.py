"""Relative flatness of trained networks for scikit-learn, skorch and Optuna.

Ten names to begin with:

- measure: `relative_flatness`, `flatness_report`, `FlatnessScorer`
- train: `RelativeFlatnessRegularizedClassifier`, `RelativeFlatnessRegularizedRegressor`,
  `RelativeFlatnessPenaltyCV` (chooses layer and weight), `RelativeFlatnessPenalty` (plain torch)
- search and average: `FlatMinimaSearch`, `rank_models`
- study a measure: `correlate_measures`

The public names stand in ``__init__.pyi``. A package is imported when a name of it is first used.
"""

from typing import Any as _Any

import lazy_loader

__version__ = "0.2.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
del lazy_loader


def __getattr__(name: str) -> _Any:
    """Import a public name when it is used; suggest one for a name that is misspelt."""
    from difflib import get_close_matches  # noqa: PLC0415 - where a name is wrong

    if name in __all__:
        return _load(name)
    close = get_close_matches(name, __all__, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise AttributeError(f"relflat_sk has no {name!r}.{hint}", name=name)
