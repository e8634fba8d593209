"""The flatness penalty and the history of relative flatness in PyTorch Lightning."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS

from relflat_sk.training._other_trainers import FlatTraining, rows_in_order

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise ImportError(
        "LightningFlatnessCallback needs PyTorch Lightning, which is not installed. "
        'Install it with: pip install "relflat_sk[lightning]"'
    ) from error


class LightningFlatnessCallback(Callback):
    r"""Add the flatness penalty to the loss of a `LightningModule`, and log its flatness.

    In each step, ``weight * kappa / (2 m)`` of the batch is added to the loss that `training_step`
    returns, with the network's flatness :math:`\kappa` at a layer with m inputs; see
    `RelativeFlatnessPenalty`. At the end of an epoch, the flatness is measured on all training
    data, in evaluation mode. Both are logged, so that loggers and other callbacks receive them:
    the mean penalty of the epoch as ``flatness_penalty``, and the measurement as
    ``relative_flatness``.

    Parameters
    ----------
    criterion : nn.Module or callable
        The loss of which the flatness is penalised and measured, called as
        ``criterion(output, target)``. Terms that `training_step` adds to it do not count.
    network : str or None, default=None
        Dotted name of the submodule that makes the predictions, which `training_step` must call
        once per step. None: the `LightningModule` itself, called as ``self(x)``.
    layer : int, str, a sequence of these, or "all", default=-1
        The layer in the network: its position in the order of the forward pass, or its dotted
        name. The values of several layers are added.
    weight : float, default=0.1
        Factor of the penalty; 0 for no penalty.
    clip : float or None, default=0.5
        Limit of the penalty, see `RelativeFlatnessPenalty`.
    every : int or None, default=1
        Number of epochs between measurements; None for no measurement. One takes a forward pass
        over the data.
    dataset : Dataset or None, default=None
        The samples to measure, which the training loader's `collate_fn` puts together. None: the
        training data.
    split_batch : callable or None, default=None
        Returns inputs and target of a batch. None: batches are pairs.

    Raises
    ------
    ImportError
        If Lightning is not installed; ``pip install "relflat_sk[lightning]"`` installs it.
    ValueError
        If an argument is out of range, or, when training begins, if there is no such network, the
        module optimises by hand, or the optimizer is LBFGS. In training, if a batch is no pair, or
        the data cannot be read by number.
    RuntimeError
        In training, if a step does not call the network once.

    See Also
    --------
    RelativeFlatnessPenalty : The penalty in a loop of your own, or in `training_step`.
    TransformersFlatnessCallback : The same for the `Trainer` of Hugging Face.

    Notes
    -----
    The loss that `training_step` logs itself is without the penalty.

    Each process of a distributed training measures all samples. Strategies that divide the weights
    among devices are not supported.

    Examples
    --------
    >>> import torch
    >>> from lightning import LightningModule
    >>> from relflat_sk.training import LightningFlatnessCallback
    >>> class Classifier(LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.model = torch.nn.Linear(4, 3)
    ...     def training_step(self, batch, batch_idx):
    ...         x, y = batch
    ...         return torch.nn.functional.cross_entropy(self.model(x), y)
    ...     def configure_optimizers(self):
    ...         return torch.optim.Adam(self.parameters())
    >>> flat = LightningFlatnessCallback(torch.nn.CrossEntropyLoss(), network="model", weight=1.0)

    ``Trainer(callbacks=[flat]).fit(Classifier(), loader)`` trains with the penalty.
    """

    def __init__(
        self,
        criterion: Any,
        *,
        network: str | None = None,
        layer: Any = -1,
        weight: float = 0.1,
        clip: float | None = 0.5,
        every: int | None = 1,
        dataset: Any = None,
        split_batch: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> None:
        self.criterion = criterion
        self.network = network
        self.split_batch = split_batch or _split_pair
        self._training = FlatTraining(layer, weight, clip, every, dataset)
        self._open = ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the training, and let `training_step` return the loss with the penalty."""
        network = self._network(pl_module)
        if not self._training.is_penalised:
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(pl_module).__name__} optimises by hand (automatic_optimization=False), so "
                "that its training_step has computed the gradient before a callback sees the "
                "loss. Use RelativeFlatnessPenalty inside training_step, and weight=0 here."
            )
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise ValueError(
                "LBFGS evaluates the objective several times per step and compares the values, but "
                "the penalty may use new random probes each time. Use another optimizer, such as "
                "SGD or Adam, or weight=0."
            )
        plain_step = pl_module.training_step

        @wraps(plain_step)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            outputs: list[Any] = []
            hook = network.register_forward_hook(lambda _, __, output: outputs.append(output))
            try:
                with self._training.penalty.capture(network):
                    result = plain_step(batch, *args, **kwargs)
                    self._check_calls(pl_module, len(outputs))
            finally:
                hook.remove()
            return None if result is None else self._add(pl_module, result, outputs[0], batch)

        # another callback of this kind may have wrapped the step before
        own = vars(pl_module).get("training_step")
        own = getattr(own, "without_penalty", own)
        vars(training_step)["without_penalty"] = own
        pl_module.training_step = training_step
        self._open.callback(_restore, pl_module, own)

    def _network(self, pl_module: Any) -> nn.Module:
        """Return the network that makes the predictions."""
        if self.network is None:
            return pl_module  # type: ignore[no-any-return]
        try:
            found: nn.Module = pl_module.get_submodule(self.network)
        except AttributeError as error:
            children = [name for name, _ in pl_module.named_children()]
            raise ValueError(
                f"network={self.network!r} is no submodule of {type(pl_module).__name__}, which "
                f"has {children}."
            ) from error
        return found

    def _check_calls(self, pl_module: Any, n_calls: int) -> None:
        """Refuse a step without a single forward pass."""
        if n_calls != 1:
            raise RuntimeError(
                f"training_step called the network {self.network or type(pl_module).__name__!r} "
                f"{n_calls} times, but the penalty needs one forward pass per step. Name the "
                "submodule that makes the predictions, such as network='model'."
            )

    def _add(self, pl_module: Any, result: Any, output: Any, batch: Any) -> Any:
        """Add the penalty to the result of a step, and log it."""
        target = self.split_batch(batch)[1]
        penalty = self._training.penalty(self.criterion, output, target)
        pl_module.log(
            "flatness_penalty",
            penalty.detach(),
            on_step=False,
            on_epoch=True,
            batch_size=len(target),
        )
        if isinstance(result, Mapping):
            return {**result, "loss": result["loss"] + penalty}
        assert isinstance(result, Tensor)  # Lightning takes nothing else
        return result + penalty

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure the flatness, and log it."""
        if not self._training.is_due(trainer.current_epoch + 1):
            return
        loader = trainer.train_dataloader
        size = getattr(loader, "batch_size", None)
        rows = rows_in_order(loader, self._training.dataset, self.split_batch, size)
        found = self._training.measure(self._network(pl_module), rows, self.criterion)
        pl_module.log("relative_flatness", found)

    def on_train_end(self, trainer: Any, pl_module: Any, exception: Any = None) -> None:
        """Give the module its own `training_step` back."""
        self._open.close()

    on_exception = on_train_end


def _restore(pl_module: Any, own_step: Any) -> None:
    """Give a module the `training_step` back that it had itself, or else that of its class."""
    vars(pl_module).pop("training_step", None)
    if own_step is not None:
        pl_module.training_step = own_step


def _split_pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and target of a batch that is a pair."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise ValueError(
        f"a batch must be a pair of inputs and target, got a {type(batch).__name__}{size}. Pass "
        "split_batch, a function that returns the two, such as lambda batch: (batch['x'], "
        "batch['y'])."
    )
