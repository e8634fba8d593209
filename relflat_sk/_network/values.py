"""Whether the parameters of a network have values, and whether these are finite."""

from torch import nn

__all__ = ["check_stored", "find_non_finite"]


def check_stored(module: nn.Module) -> None:
    """Refuse a network on the meta device."""
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(
            "the network, or a part of it, is on the meta device, where tensors have shapes but "
            "no values. Give it memory and its weights first, for example by "
            "module.to_empty(device='cpu') and module.load_state_dict(...)."
        )


def find_non_finite(module: nn.Module) -> str | None:
    """Return the name of the first parameter or buffer that contains nan or an infinite number."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return next((name for name, tensor in tensors if not bool(tensor.isfinite().all())), None)
