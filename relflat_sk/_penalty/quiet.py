"""Keep hooks of users from being called by differentiations that are no step of theirs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

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
    """Backward hooks of modules, which are not called while `is_quiet`.

    torch binds them to the graph in the forward pass, and so has to find guarded ones there.
    """

    def __init__(self) -> None:
        self.is_quiet = False

    @contextmanager
    def guarded(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Guard the hooks of modules for a forward pass inside the context."""
        present = [
            hooks for part in modules for name in _OF_MODULES if (hooks := getattr(part, name))
        ]
        taken = [(hooks, dict(hooks)) for hooks in present]
        for hooks, before in taken:
            hooks.update({key: self._guard(hook) for key, hook in before.items()})
        try:
            yield
        finally:
            for hooks, before in taken:
                hooks.update({key: hook for key, hook in before.items() if key in hooks})

    def _guard(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: None if self.is_quiet else hook(*args)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Call no guarded hook inside the context."""
        self.is_quiet = True
        try:
            yield
        finally:
            self.is_quiet = False


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has backward hooks."""
    return any(getattr(module, name) for name in _OF_MODULES)
