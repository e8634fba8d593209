"""Find the estimator that holds the network, inside pipelines and wrappers."""

from typing import Any


def last_step(estimator: Any) -> Any:
    """Find the unfitted estimator that is going to hold the network."""
    return _descend(estimator)[1]


def last_prefix(estimator: Any) -> str:
    """Return what stands before the parameters of the estimator that holds the network."""
    return _descend(estimator)[0]


def _descend(estimator: Any, prefix: str = "") -> tuple[str, Any]:
    around = [(name, getattr(estimator, name, None)) for name in ("regressor", "estimator")]
    for name, inner in [*getattr(estimator, "steps", [])[-1:], *around]:
        if hasattr(inner, "fit"):
            return _descend(inner, f"{prefix}{name}__")
    return prefix, estimator
