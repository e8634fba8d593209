"""A skorch net that follows scikit-learn's rules for parameters and attributes."""

from collections.abc import Callable
from typing import Any

from sklearn.base import clone
from skorch import NeuralNet

from relflat_sk._checks import did_you_mean

__all__ = ["SklearnNet", "check_parameters"]


# skorch sets these attributes in __init__, where scikit-learn allows nothing but parameters
_UNFITTED: dict[str, Callable[[], Any]] = {
    "history_": lambda: None,
    "initialized_": lambda: False,
    "virtual_params_": dict,
}


# parameters of scikit-learn's networks that have other names here
_OTHER_NAMES = {
    "activation": "module__activation",
    "alpha": "optimizer__weight_decay",
    "class_weight": "criterion__weight (an array), or sample_weight in fit",
    "early_stopping": "callbacks=[skorch.callbacks.EarlyStopping()] with train_split="
    "skorch.dataset.ValidSplit(5)",
    "epochs": "max_epochs",
    "hidden_layer_sizes": "module__hidden_layer_sizes",
    "learning_rate_init": "lr",
    "max_iter": "max_epochs",
    "solver": "optimizer (a class)",
}


class SklearnNet(NeuralNet):
    """Set nothing but parameters in the constructor, and list nothing but public parameters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, default in _UNFITTED.items():
            if self.__dict__[name] == default():
                del self.__dict__[name]

    def __getattr__(self, name: str) -> Any:
        # skorch's __setattr__ takes a missing `initialized_` for a net under construction, and
        # `_params_to_validate` is set where the construction ends
        if name in _UNFITTED and "_params_to_validate" in self.__dict__:
            return _UNFITTED[name]()
        return object.__getattribute__(self, name)  # raises the usual AttributeError

    def _validate_params(self) -> None:
        """Check the names of parameters as skorch does, and say what they are called here."""
        try:
            super()._validate_params()
        except ValueError as error:
            names = [name for name in _OTHER_NAMES if name in self._params_to_validate]
            instead = "; ".join(f"in place of {name}, use {_OTHER_NAMES[name]}" for name in names)
            advice = f"\nWith nets of relflat_sk, {instead}." if names else ""
            raise ValueError(f"{error}{self._find_similar()}{advice}") from None

    def _find_similar(self) -> str:
        """Ask whether other parameters were meant than those that the net does not have."""
        known = self.get_params(deep=False).keys() - self._params_to_validate
        # skorch finds what is meant by a name that begins as one of its prefixes
        prefixes = tuple(self.prefixes_)
        names = sorted(self._params_to_validate - _OTHER_NAMES.keys())
        unknown = [name for name in names if not name.startswith(prefixes)]
        return "".join(did_you_mean(name, known) for name in unknown)

    def initialize_callbacks(self) -> "SklearnNet":
        """Make the callbacks, as skorch does.

        Returns
        -------
        SklearnNet
            The net.

        Raises
        ------
        TypeError
            If the callbacks are not in a list.
        """
        if not isinstance(self.callbacks, list | None):
            raise TypeError(
                "callbacks must be a list, such as [StopAtLoss(0.1)], got "
                f"{type(self.callbacks).__name__}."
            )
        super().initialize_callbacks()
        return self

    def _get_param_names(self) -> list[str]:
        # skorch lists every attribute that does not end in an underscore
        return [name for name in super()._get_param_names() if not name.startswith("_")]


def check_parameters(net: NeuralNet) -> None:
    """Check the names of a net's parameters without making it."""
    unfitted = clone(net)
    # skorch learns the names of these parts only where it makes them
    vars(unfitted)["prefixes_"] = [*unfitted.prefixes_, "module", "criterion", "optimizer"]
    unfitted._validate_params()
