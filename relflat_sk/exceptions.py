"""Exceptions and warnings of relflat_sk that callers may want to catch."""

__all__ = ["FlatnessWarning", "LayerNotFoundError"]


class LayerNotFoundError(ValueError):
    """The network has no such layer, or the layer has no weight matrix."""


class FlatnessWarning(UserWarning):
    """A flatness value was computed (or withheld) under doubtful conditions."""
