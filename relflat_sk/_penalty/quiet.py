"""Keep hooks of users from being called by differentiations that are no step of theirs."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_OF_MODULES = "_backward_hooks", "_backward_pre_hooks"


@contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Differentiate without the hooks of parameters, which come back at the end."""
    taken = [(hooks, dict(hooks)) for p in parameters if (hooks := p._backward_hooks)]
    for hooks, _ in taken:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.update(before)


class QuietHooks:
    """Backward hooks of modules and of activations, which are not called while `is_quiet`.

    torch binds them to the graph in the forward pass, and so has to find guarded ones there.
    """

    def __init__(self) -> None:
        self.is_quiet = False
        self.registers = False  # whether a forward pass has registered hooks of activations
        self.retained: list[weakref.ref[Tensor]] = []  # activations that retain their gradient

    @contextmanager
    def guarded(self, modules: Iterable[nn.Module], *, activations: bool) -> Iterator[None]:
        """Guard the hooks of modules, and those of activations, in a forward pass."""
        of_modules = [getattr(part, name) for part in modules for name in _OF_MODULES]
        taken = [(hooks, dict(hooks)) for hooks in of_modules if hooks]
        for hooks, before in taken:
            hooks.update({key: _Guarded(self, hook) for key, hook in before.items()})
        self.retained.clear()
        try:
            with _OfActivations(self) if activations else nullcontext():
                yield
        finally:
            for hooks, before in taken:
                hooks.update({key: hook for key, hook in before.items() if key in hooks})

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Call no guarded hook inside the context, and retain no gradient."""
        before = [(t, t.grad) for kept in self.retained if (t := kept()) is not None]
        self.is_quiet = True
        try:
            yield
        finally:
            self.is_quiet = False
            for activation, gradient in before:
                activation.grad = gradient


@dataclass(frozen=True)
class _Guarded:
    """A hook that does nothing while all are quiet; a copy of it is the hook itself."""

    hooks: QuietHooks
    hook: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return None if self.hooks.is_quiet else self.hook(*args)

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _same, (self.hook,)


def _same(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


class _OfActivations(TorchFunctionMode):
    """Guards the hooks that a forward pass registers, and notes which activations have any."""

    def __init__(self, hooks: QuietHooks) -> None:
        super().__init__()
        self._hooks = hooks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if func is Tensor.register_hook:
            self._hooks.registers = True
            activation, hook = args
            return activation.register_hook(_Guarded(self._hooks, hook))
        if func is Tensor.retain_grad:
            self._hooks.registers = True
            self._hooks.retained.append(weakref.ref(args[0]))
        return func(*args, **kwargs)
