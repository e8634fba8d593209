"""A skorch net with a faster training loop, where this changes no results."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from skorch.callbacks import Callback
from skorch.dataset import get_len
from skorch.history import History
from skorch.utils import to_device
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from relflat_sk._checks import gather_checks
from relflat_sk._network import LoadedBatches
from relflat_sk.training._array_loader import ArrayLoader, make_loader
from relflat_sk.training._epoch_trainer import EPOCH_TRAINER, EpochTrainer, single_trainer
from relflat_sk.training._sklearn_net import SklearnNet

__all__ = ["FastNet", "knows_its_batch", "record_batch"]


# torch's optimizers with an implementation in one kernel, on every device that torch 2.6 knows
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}
_ORDERS = {"sampler", "batch_sampler"}
# a batch of a prediction has so many samples and input values at most, if it is not smaller
_SAMPLES, _NUMBERS = 1024, 2**20


class FastNet(SklearnNet):
    """Cut batches out of arrays, use torch's fused optimizers, and call no empty functions."""

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        """Make the iterator over the batches of a data set, as skorch does.

        Parameters
        ----------
        dataset : torch Dataset
            The data.
        training : bool, default=False
            Whether to use `iterator_train` instead of `iterator_valid`.

        Returns
        -------
        iterable
            A data loader: the user's own if the data are one. Arrays are cut into batches without
            torch's loader, unless the user chose a loader or passed it arguments such as
            `collate_fn`.

        Raises
        ------
        ValueError
            If `batch_size` is -1, and the data are a stream without a length.
        """
        if isinstance(dataset, LoadedBatches):
            return dataset.loader
        name = "iterator_train" if training else "iterator_valid"
        iterator, arguments = getattr(self, name), self.get_params_for(name)
        if arguments.get("shuffle") and not _can_shuffle(iterator, dataset, arguments):
            del arguments["shuffle"]
        arguments["batch_size"] = _batch_size(arguments.get("batch_size", self.batch_size), dataset)
        # accelerate takes torch's loader apart and makes its own of the parts
        if iterator is DataLoader and getattr(self, "accelerator", None) is None:
            return make_loader(dataset, arguments)
        return iterator(dataset, **arguments)

    def forward_iter(self, X: Any, training: bool = False, device: str = "cpu") -> Iterator[Any]:
        """Yield the outputs of the module for each batch, as skorch does.

        Parameters
        ----------
        X : array-like, dict, list or Dataset
            Inputs.
        training : bool, default=False
            Whether to set the module to training mode.
        device : str, default="cpu"
            Where the outputs go.

        Yields
        ------
        Tensor of shape (n, ...), or tuple or dict of these
            Output of a batch. Batches of arrays are large, up to 1,024 samples, where the
            `batch_size` of training does not matter to the outputs and the user chose no other
            for `iterator_valid`.

        Raises
        ------
        ValueError
            If a data loader gives the samples in random order.
        """
        iterator = self.get_iterator(self.get_dataset(X), training=training)
        if isinstance(X, LoadedBatches) and isinstance(iterator.sampler, RandomSampler):
            raise ValueError(
                "X is a data loader that gives the samples in random order, so that nobody knows "
                "which prediction is whose. Pass a loader with shuffle=False, or loader.dataset."
            )
        chosen = self.get_params_for("iterator_valid")
        if isinstance(iterator, ArrayLoader) and not (
            training or chosen or any(map(knows_its_batch, self._all_parts()))
        ):
            iterator = iterator.enlarged(_SAMPLES, _NUMBERS)
        for batch in iterator:
            yield to_device(self.evaluation_step(batch, training=training), device=device)

    def _all_parts(self) -> list[nn.Module]:
        """List the modules inside of the net's modules and criteria, and these."""
        whole = [getattr(self, f"{name}_") for name in (*self._modules, *self._criteria)]
        return [part for module in whole for part in getattr(module, "modules", list)()]

    def fit_loop(self, *args: Any, **kwargs: Any) -> "FastNet":
        """Train for some epochs, as skorch does.

        Parameters
        ----------
        *args, **kwargs
            Arguments of `skorch.NeuralNet.fit_loop`.

        Returns
        -------
        FastNet
            The net itself.
        """
        try:
            super().fit_loop(*args, **kwargs)
        finally:
            self._epoch_trainer().release(self)
        return self

    def _epoch_trainer(self) -> EpochTrainer:
        """Return what trains the net's epochs, if its own loop need not."""
        trainer = EPOCH_TRAINER.get() or self.__dict__.get("_single_trainer")
        if trainer is None:
            trainer = self.__dict__["_single_trainer"] = single_trainer()
        return trainer

    def run_single_epoch(
        self, iterator: Any, training: bool, prefix: str, step_fn: Any, **fit_params: Any
    ) -> None:
        """Train or validate for an epoch, as skorch does.

        Parameters
        ----------
        iterator : iterable or None
            The data loader; None for nothing to do.
        training : bool
            Whether the epoch trains.
        prefix : {"train", "valid"}
            Beginning of the names in the history.
        step_fn : callable
            Called with each batch.
        **fit_params
            Passed on to `step_fn`.
        """
        if iterator is None:
            return
        if training and self._epoch_trainer().train_epoch(self, iterator, fit_params):
            return
        count = 0
        with gather_checks():
            for count, batch in enumerate(iterator, 1):  # noqa: B007
                self._run_batch(batch, training, prefix, step_fn, fit_params)
        self.history.record(f"{prefix}_batch_count", count)

    def _run_batch(
        self, batch: Any, training: bool, prefix: str, step_fn: Any, fit_params: Mapping[str, Any]
    ) -> None:
        """Make a step with a batch, and record it."""
        self.notify("on_batch_begin", batch=batch, training=training)
        step = step_fn(batch, **fit_params)
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        n = len(inputs) if isinstance(inputs, Tensor) else get_len(inputs)
        record_batch(self.history, {**self._read_step(step, prefix), f"{prefix}_batch_size": n})
        self.notify("on_batch_end", batch=batch, training=training, **step)

    def _read_step(self, step: Mapping[str, Any], prefix: str) -> dict[str, float]:
        """Read from the device what the history records of a step."""
        return {f"{prefix}_loss": step["loss"].item()}

    def notify(self, method_name: str, **cb_kwargs: Any) -> None:
        """Call a method of the net and of the callbacks that do anything in it.

        Parameters
        ----------
        method_name : str
            Such as "on_batch_end".
        **cb_kwargs
            Arguments of the method.
        """
        getattr(self, method_name)(self, **cb_kwargs)
        for callback in self._listeners(method_name):
            getattr(callback, method_name)(self, **cb_kwargs)

    def _listeners(self, method_name: str) -> list[Any]:
        """List the callbacks with a method of their own, which few have for every step."""
        callbacks, listeners = self.__dict__.get("_listening", (None, {}))
        if callbacks != self.callbacks_:
            callbacks, listeners = list(self.callbacks_), {}
            self.__dict__["_listening"] = callbacks, listeners
        if method_name not in listeners:
            listeners[method_name] = [cb for _, cb in callbacks if _listens(cb, method_name)]
        found: list[Any] = listeners[method_name]
        return found

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        for name in ("_listening", "_single_trainer"):
            state.pop(name, None)
        return state

    def _zero_grad_optimizer(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients, without torch's record for its profiler."""
        optimizers = [getattr(self, f"{name}_") for name in self._optimizers]
        if set_to_none is False or any(type(one) not in _FUSED for one in optimizers):
            super()._zero_grad_optimizer(set_to_none)
            return
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _set_training(self, training: bool = True) -> None:
        """Set the mode of modules and criteria, which skorch does again in every step."""
        for name in (*self._modules, *self._criteria):
            module = getattr(self, f"{name}_")
            if isinstance(module, nn.Module) and not _is_in_mode(module, training):
                module.train(training)

    def get_params_for_optimizer(self, prefix: str, named_parameters: Any) -> Any:
        """Collect the arguments of an optimizer, as skorch does.

        Parameters
        ----------
        prefix : str
            The name of the optimizer: "optimizer", if a subclass has no others.
        named_parameters : iterable of (str, Parameter)
            The parameters to optimize.

        Returns
        -------
        args : tuple
            Positional arguments: the groups of parameters.
        kwargs : dict
            Keyword arguments, with ``fused=True`` where torch has a fused implementation and the
            user chose none.
        """
        args, kwargs = super().get_params_for_optimizer(prefix, named_parameters)
        if _can_fuse(getattr(self, prefix, None), args[0], kwargs, self._all_parts()):
            kwargs["fused"] = True
        return args, kwargs


def _listens(callback: Any, method_name: str) -> bool:
    """Return whether a callback has a method that is not skorch's empty one."""
    method = getattr(callback, method_name)
    return getattr(method, "__func__", method) is not getattr(Callback, method_name, None)


def record_batch(history: Any, values: Mapping[str, float]) -> None:
    """Record several values of a batch; in skorch's own history, find the batch only once."""
    if type(history) is History:
        list.__getitem__(history, -1)["batches"][-1].update(values)
        return
    for name, value in values.items():
        history.record_batch(name, value)


def _can_shuffle(iterator: Any, dataset: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether a loader can shuffle: not if a stream or a sampler determines the order."""
    if isinstance(dataset, IterableDataset) or any(arguments.get(name) for name in _ORDERS):
        return False
    try:
        accepted = inspect.signature(iterator).parameters
    except (TypeError, ValueError):  # a callable without signature
        return True
    names = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    return names or "shuffle" in accepted


def knows_its_batch(part: nn.Module) -> bool:
    """Return whether a module's output for a sample depends on the others in evaluation, too."""
    return isinstance(part, _BatchNorm) and part.running_mean is None


def _is_in_mode(module: nn.Module, training: bool) -> bool:
    """Return whether a module and all modules inside it are in train or eval mode."""
    return module.training is training and all(
        child is None or _is_in_mode(child, training) for child in module._modules.values()
    )


def _can_fuse(
    optimizer: Any, groups: Any, arguments: Mapping[str, Any], parts: list[nn.Module]
) -> bool:
    """Return whether torch has a fused implementation, which rounds differently but does the same.

    It takes no sparse gradients, which embeddings may have, and steps of SGD in half precision
    differ by more than rounding.
    """
    if optimizer not in _FUSED or _IMPLEMENTATIONS & arguments.keys():
        return False
    if any(getattr(part, "sparse", False) for part in parts):
        return False
    return all(
        p.dtype in (torch.float32, torch.float64) and p.device.type in ("cpu", "cuda")
        for group in groups
        for p in group["params"]
    )


def _batch_size(size: Any, dataset: Any) -> Any:
    """Return the number of samples in a batch, as torch's loader takes it."""
    if isinstance(size, np.integer):
        size = int(size)
    if size != -1:
        return size
    if isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        raise ValueError(
            f"batch_size=-1 stands for all samples, but the {type(dataset).__name__} is a stream "
            "without a length. Pass the number of samples in a batch."
        )
    return len(dataset)
