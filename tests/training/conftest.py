"""Nets of skorch's accelerate mixin, whose state of the process is given back."""

import pytest

from tests.training.common import Classifier, make


@pytest.fixture
def accelerated():
    """A function that makes a net of a class with mixins, `AccelerateMixin` the last of them."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from skorch.hf import AccelerateMixin

    def build(*mixins, mixed_precision="no", **params):
        accelerator = accelerate.Accelerator(mixed_precision=mixed_precision, cpu=True)
        kind = type("Accelerated", (*mixins, AccelerateMixin, Classifier), {})
        return make(kind, accelerator=accelerator, **params)

    yield build
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
