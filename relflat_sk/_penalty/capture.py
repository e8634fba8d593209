"""Record the penalised layers in each step of a training, and keep what the first one found."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from relflat_sk._network import (
    CompiledBody,
    ExplicitLayers,
    Layer,
    Recorder,
    ReplacedForwards,
    explicit_attention,
    find_norms,
    kept_buffers,
    watch_frozen,
    weight_layers,
)
from relflat_sk._penalty.first_pass import FirstPass
from relflat_sk._penalty.plan import Plan, UnfinishedPlan, find_names, make_recorder

__all__ = ["Capture"]


class Capture:
    """The forward passes of one training."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.explicit = ExplicitLayers()
        self._plan: Plan | UnfinishedPlan | None = None
        self._body: CompiledBody | None = None

    def open(
        self, module: nn.Module, asked: tuple[Layer, ...] | None
    ) -> AbstractContextManager[Any]:
        """Record a forward pass."""
        self.recorder = None  # if the forward pass fails, nothing of an earlier one is used
        plan = self._plan
        if not isinstance(plan, Plan) or not plan.is_of(module, asked):
            return self._make_plan(module, asked)
        if plan.in_attention or plan.explicit:
            return self._record_explicitly(module, plan)
        self.explicit = ExplicitLayers()
        self.recorder = plan.recorder(plan.layers)
        return self.recorder

    @contextmanager
    def open_compiled(
        self, compiled: nn.Module, module: nn.Module, asked: tuple[Layer, ...] | None
    ) -> Iterator[None]:
        """Record a forward pass of a compiled network."""
        code, original = compiled.forward, compiled._modules["_orig_mod"]
        assert original is not None
        outputs: list[Any] = []  # of the network and its last layer, in a step without compilation

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._body is not None:
                return self._body.run(code, *args, **kwargs)
            output = original(*args, **kwargs)
            if self.recorder is not None and self.recorder.calls:
                outputs[:] = output, self.recorder[self.recorder.calls[-1]].output
            return output

        with self.open(module, asked), ReplacedForwards([(compiled, run)]):
            yield
        plan = self._plan
        if outputs and outputs[0] is outputs[1] and isinstance(plan, Plan) and not plan.earlier:
            self._body = CompiledBody(module, list(plan.layers)[-1])

    @contextmanager
    def _record_explicitly(self, module: nn.Module, plan: Plan) -> Iterator[None]:
        """Record a forward pass that runs attention and normalisations step by step."""
        attention = explicit_attention(module) if plan.in_attention else nullcontext()
        with attention, ExplicitLayers(plan.explicit) as self.explicit:
            # the projections inside attention are new modules in each step
            layers = {name: module.get_submodule(name) for name in plan.layers}
            with plan.recorder(layers) as self.recorder:
                yield

    @contextmanager
    def _make_plan(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> Iterator[None]:
        """Record all layers in a first forward pass, and find those that later ones need."""
        # the order of the calls is known only afterwards; training keeps the inputs of all
        # layers for the backward pass anyway
        self._body = None
        parts = list(module.modules())
        explicit = find_norms(module)
        with explicit_attention(module), ExplicitLayers(explicit) as self.explicit:
            layers = weight_layers(module)
            names = find_names(module, asked, list(layers))
            # behind the last layer, attention is hardly ever to be differentiated twice
            twice = names if asked == (-1,) else layers
            with watch_frozen(module, layers) as noticed:
                first = FirstPass(noticed)
                with make_recorder(layers, names, twice, first) as recorder:
                    self.recorder = recorder
                    self._plan = UnfinishedPlan(asked, parts, explicit, recorder, first)
                    yield
            self._finish_plan()

    def _finish_plan(self) -> Plan | None:
        """Return the plan; make it if the first forward pass has just shown the layers."""
        if isinstance(self._plan, UnfinishedPlan):
            self._plan = self._plan.finish()
        return self._plan

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the network of the last forward pass."""
        assert self._plan is not None
        return self._plan.parts[0].parameters()

    def kept_buffers(self) -> AbstractContextManager[Any]:
        """Let the code of a compiled network keep what further backward passes need."""
        return nullcontext() if self._body is None else kept_buffers()

    def check(self, output: Tensor) -> None:
        """Refuse a step without a forward pass, or whose output cannot be differentiated."""
        recorder = self.recorder
        if recorder is None or recorder.failed or not recorder.calls:
            raise RuntimeError(
                "the penalty has recorded no forward pass. Call the network inside `with "
                "penalty.capture(module):` before each call of the penalty. If the network is "
                "compiled by torch.compile, capture the compiled module."
            )
        if not len(output):
            raise ValueError(
                f"the batch has no samples: y_pred has shape {tuple(output.shape)}, and the mean "
                "loss of no samples has no flatness. Leave out empty batches."
            )
        if not output.requires_grad:
            raise ValueError(
                "y_pred carries no gradient: it was detached, or the network ran in "
                "torch.no_grad() or torch.inference_mode(). Pass the output as the network "
                "returned it, outside of these. To measure without training, use "
                "relflat_sk.relative_flatness."
            )

    def finish(self, output: Tensor, *, weighted: bool) -> tuple[Plan, Recorder]:
        """End the step: return what was recorded, and what is known of the network."""
        recorder, self.recorder = self.recorder, None
        plan = self._finish_plan()
        assert recorder is not None
        assert plan is not None  # there is one for every recorder
        if plan.first is not None:
            self._plan = plan.completed(output, recorder, self.explicit, weighted=weighted)
        return plan, recorder
