"""Give a network the weights of one checkpoint after the other, and then its own again."""

import copy
import json
import pickle
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._models.network_of import final_estimator

Weights = Mapping[str, Any]

ADAPTER = "adapter_config.json"  # in the folder of an adapter of PEFT
# the files with the weights in a folder of transformers
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_FILES = (*_WHOLE, *(f"{name}.index.json" for name in _WHOLE))
_SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors")
# the entries of files that hold more than weights, as of Lightning and of usual loops
_ENTRIES = ("state_dict", "model_state_dict", "model")
_FEW = 5  # names in an error


def is_weights(item: Any) -> bool:
    """Return whether something is a state dict."""
    return isinstance(item, Mapping) and any(isinstance(one, Tensor) for one in item.values())


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, in the order of their steps; a checkpoint is its own."""
    if not folder.is_dir():
        return [folder]
    inside = sorted(folder.iterdir(), key=_by_numbers)
    found = [one for one in inside if one.is_dir() and _is_checkpoint(one)]
    if not found and not _is_checkpoint(folder):
        found = [one for one in inside if one.suffix in _SUFFIXES]
    if not found and not _is_checkpoint(folder):
        raise ValueError(
            f"there are no checkpoints in {str(folder)!r}. Expected files that end with "
            f"{', '.join(_SUFFIXES)}, or folders with {', '.join((*_FILES, ADAPTER))}."
        )
    return found or [folder]


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).exists() for name in (*_FILES, ADAPTER))


def _by_numbers(path: Path) -> list[tuple[str, int]]:
    """Return a key that sorts step 90 before step 100."""
    parts = re.findall(r"(\D*)(\d*)", path.name)
    return [(text, int(number or 0)) for text, number in parts]


# -- reading ---------------------------------------------------------------------------------------


def read_weights(path: Path) -> Weights:
    """Read the weights from a file, or from a folder of transformers, without running code."""
    if not path.is_dir():
        return _read_file(path)
    name = next((name for name in _FILES if (path / name).exists()), None)
    if name is None:
        raise ValueError(
            f"{str(path)!r} is no checkpoint: it has none of the files {', '.join(_FILES)}."
        )
    if not name.endswith(".json"):
        return _read_file(path / name)
    index = json.loads((path / name).read_text(encoding="utf-8"))
    parts = [_read_file(path / part) for part in sorted(set(index["weight_map"].values()))]
    return {name: tensor for part in parts for name, tensor in part.items()}


def _read_file(path: Path) -> Weights:
    """Read the weights from one file."""
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file  # noqa: PLC0415
        except ImportError as error:
            raise ImportError(
                f"{str(path)!r} needs safetensors, which is not installed. Install it with: pip "
                "install safetensors"
            ) from error
        loaded: Weights = load_file(path)
        return loaded
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        kinds = []
        with suppress(ValueError):  # an older format, whose types cannot be listed
            kinds = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        listed = f" ({', '.join(kinds)})" if kinds else ""
        raise ValueError(
            f"{str(path)!r} holds other objects than tensors{listed}, and loading these may run "
            "code. If you trust the file, call rank_models within "
            "torch.serialization.safe_globals([...]) with these types, or pass the state dict in "
            "what torch.load(path, weights_only=False) returns."
        ) from error
    except (EOFError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read: it is no file of torch.save, or was not written to its "
            "end. Remove it, or save it again."
        ) from error
    inside = found if isinstance(found, Mapping) else {}
    found = next((inside[name] for name in _ENTRIES if is_weights(inside.get(name))), found)
    if not is_weights(found):
        raise ValueError(
            f"{str(path)!r} holds no state dict, but {type(found).__name__}. Save "
            "module.state_dict(), or pass the state dict itself."
        )
    weights: Weights = found
    return weights


# -- loading ---------------------------------------------------------------------------------------


def find_module(model: Any) -> nn.Module:
    """Find the module of `rank_models` that takes the weights: itself, or that of a fitted net."""
    inside = final_estimator(model)
    module = getattr(inside, "module_", inside)
    if not isinstance(module, nn.Module):
        raise TypeError(
            "module must be a torch module or a fitted skorch net, which takes the weights, got "
            f"{type(module).__name__}."
        )
    return getattr(module, "_orig_mod", module)  # a compiled one names its weights otherwise


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Give a module its own weights back at the end, also after an exception."""
    own = copy.deepcopy(module.state_dict())
    try:
        yield
    finally:
        module.load_state_dict(own)


def load_into(module: nn.Module, weights: Weights, name: str) -> None:
    """Load weights into a module; those of a larger module that contains it are found by name."""
    own = module.state_dict(keep_vars=True)
    prefix = _find_prefix(own.keys(), weights.keys(), name)
    part = {
        key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)
    }
    # transformers saves one of the names of a tied weight
    held = {id(own[key]) for key in part.keys() & own.keys()}
    missing = [key for key in own if key not in part and id(own[key]) not in held]
    check_names(name, missing, [key for key in part if key not in own])
    try:
        module.load_state_dict(part, strict=False)
    except RuntimeError as error:
        raise ValueError(f"the weights of {name!r} do not fit module: {error}") from error


def check_names(name: str, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Refuse weights of another network."""
    if missing or unexpected:
        listed = " and ".join(
            f"{what} {len(names)}: {', '.join(map(repr, sorted(names)[:_FEW]))}"
            + ", ..." * (len(names) > _FEW)
            for what, names in (("lack", missing), ("have further", unexpected))
            if names
        )
        raise ValueError(
            f"the weights of {name!r} are not those of module: they {listed}. Pass the module that "
            "was trained, with the same sizes."
        )


def _find_prefix(own: Collection[str], names: Collection[str], name: str) -> str:
    """Find what stands before a module's names in the weights of one that contains it."""
    prefixes: Counter[str] = Counter()
    for key in names:
        starts = [0, *(match.end() for match in re.finditer(r"\.", key))]
        prefixes.update(key[:start] for start in starts if key[start:] in own)
    most = max(prefixes.values(), default=0)
    found = [prefix for prefix, count in prefixes.items() if count == most]
    if len(found) > 1 and "" not in found:
        raise ValueError(
            f"the weights of {name!r} fit module in several ways, under the names {found}. Load "
            "the file, and pass a state dict with the names of the module."
        )
    return "" if "" in found or not found else found[0]


# -- adapters of PEFT ------------------------------------------------------------------------------


def load_adapter(module: nn.Module, folder: Path) -> nn.Module:
    """Load an adapter of PEFT into its module, or put it on a copy of the base model."""
    try:
        import peft  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            f"{str(folder)!r} is an adapter of PEFT, which is not installed. Install it with: pip "
            'install "relflat_sk[peft]"'
        ) from error
    weights = peft.load_peft_weights(str(folder), device="cpu")
    if isinstance(module, peft.PeftModel):
        adapted: nn.Module = module
        name = module.active_adapter
    else:
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(module), str(folder))
        name = "default"
    own = peft.get_peft_model_state_dict(adapted, adapter_name=name)
    check_names(str(folder), own.keys() - weights.keys(), weights.keys() - own.keys())
    if adapted is module:
        peft.set_peft_model_state_dict(module, weights, adapter_name=name)
    return adapted
