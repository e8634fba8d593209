"""A skorch net with scikit-learn's rules for parameters, and epochs that other loops train.

Batches are cut from arrays. An epoch is a job of the engine or of a fleet, if nothing in the net
needs its own loop.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet
from skorch.callbacks import Callback, Checkpoint, EpochScoring, PassthroughScoring, PrintLog
from skorch.utils import to_device
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from relflat_sk._checks import check_number, naming_parameters
from relflat_sk._engine.epoch import EPOCH_TRAINER, train_alone
from relflat_sk._engine.job import Job, NeedsOwnLoop, qualify
from relflat_sk._network.batches import LoadedBatches, pair_labels
from relflat_sk.training._data import make_loader, rows_loader, rows_of

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
# torch's optimizers with an implementation in one kernel, on every device that torch 2.6 knows
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}
# a batch of a prediction has so many samples and input values at most, if it is not smaller
_SAMPLES, _NUMBERS = 1024, 2**20
# columns of the history that the net's own callbacks record on validation data
_OF_VALIDATION = ("valid_loss", "valid_loss_best", "valid_acc", "valid_acc_best")
# the methods that make a training step; a subclass that changes them trains in another way
_STEP = (
    "_penalty",
    "_step_optimizer",
    "_zero_grad_optimizer",
    "get_loss",
    "get_train_step_accumulator",
    "infer",
    "notify",
    "on_batch_begin",
    "on_batch_end",
    "on_grad_computed",
    "run_single_epoch",
    "train_step",
    "train_step_single",
)
# what a net's parts are
_TRAINED = (nn.Module, Optimizer)
# what callbacks may do in every step, and those that do nothing
_EVENTS = ("on_batch_begin", "on_batch_end", "on_grad_computed")
_EMPTY = [getattr(Callback, event, None) for event in _EVENTS]


class SkorchNet(NeuralNet):
    """Set nothing but parameters in the constructor, and cut batches out of arrays."""

    _training: Any = None  # the state of the training, while there is one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, default in _UNFITTED.items():
            if self.__dict__[name] == default():
                del self.__dict__[name]
        self._is_made = True

    def __getattr__(self, name: str) -> Any:
        # skorch's __setattr__ takes a missing `initialized_` for a net under construction
        if name in _UNFITTED and "_is_made" in self.__dict__:
            return _UNFITTED[name]()
        return object.__getattribute__(self, name)  # raises the usual AttributeError

    def get_params(self, deep: bool = True, **kwargs: Any) -> dict[str, Any]:
        """List the public parameters; skorch lists attributes that begin with an underscore."""
        found = super().get_params(deep=deep, **kwargs)
        return {name: value for name, value in found.items() if not name.startswith("_")}

    def set_params(self, **kwargs: Any) -> Any:
        """Set parameters; say what was meant by names that are none."""
        with naming_parameters(self, kwargs):
            return super().set_params(**kwargs)

    # -- the parts of a net --------------------------------------------------------------

    def initialize(self) -> Any:
        """Make the parts of the net; say what was meant by names of scikit-learn's networks."""
        for name in ("criterion", "optimizer"):
            value = getattr(self, name)
            if not callable(value):
                raise TypeError(
                    f"{name} must be a class, such as torch.optim.Adam, or a module, got {value!r}."
                )
        try:
            return super().initialize()
        except ValueError as error:
            names = sorted(_OTHER_NAMES.keys() & vars(self).keys())
            instead = [f"in place of {name}, use {_OTHER_NAMES[name]}" for name in names]
            if not instead:
                raise
            advice = f"{error}\nWith nets of relflat_sk, {'; '.join(instead)}."
            raise ValueError(advice) from error

    def initialize_callbacks(self) -> Any:
        """Make the callbacks; refuse those that need validation data if there are none."""
        super().initialize_callbacks()
        for _, callback in self.callbacks_:
            monitor = getattr(callback, "monitor", None)
            if self.train_split is None and monitor in _OF_VALIDATION:
                raise ValueError(
                    f"the callback {type(callback).__name__} reads {monitor!r}, but the net holds "
                    "out no validation data. Pass train_split=skorch.dataset.ValidSplit(5) to the "
                    "net, or a monitor such as 'train_loss' to the callback."
                )
        return self

    def get_params_for_optimizer(self, prefix: str, named_parameters: Any) -> Any:
        """Collect the arguments of an optimizer; ``fused=True`` where torch has that."""
        args, kwargs = super().get_params_for_optimizer(prefix, named_parameters)
        if _can_fuse(getattr(self, prefix), args[0], kwargs, self._parts()):
            kwargs["fused"] = True
        return args, kwargs

    def _parts(self) -> list[nn.Module]:
        """List the net's modules and criteria, and all modules inside of them."""
        made = [value for name, value in vars(self).items() if name.endswith("_")]
        return [part for one in made if isinstance(one, nn.Module) for part in one.modules()]

    # -- batches -------------------------------------------------------------------------

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        """Make the iterator over the batches of a data set.

        It is the user's own if the data are a loader. Arrays are cut into batches without torch's
        loader, unless the user chose a loader or passed it arguments such as `collate_fn`.
        """
        if isinstance(dataset, LoadedBatches):
            return dataset.loader
        name = "iterator_train" if training else "iterator_valid"
        iterator, arguments = getattr(self, name), self.get_params_for(name)
        accepted = inspect.signature(iterator).parameters
        takes = "shuffle" in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        # a stream or a sampler determines the order
        has_sampler = arguments.keys() & {"sampler", "batch_sampler"}
        has_order = isinstance(dataset, IterableDataset) or has_sampler
        if arguments.get("shuffle") and (has_order or not takes):
            del arguments["shuffle"]
        size = arguments.get("batch_size", self.batch_size)
        if isinstance(size, np.integer):
            size = int(size)
        arguments["batch_size"] = len(dataset) if size == -1 else size
        return (make_loader if iterator is DataLoader else iterator)(dataset, **arguments)

    def forward_iter(self, X: Any, training: bool = False, device: str = "cpu") -> Iterator[Any]:
        """Yield the outputs of the module for each batch.

        Batches of arrays are large where the `batch_size` of training does not matter to the
        outputs, and the user chose no other for `iterator_valid`.
        """
        iterator = self.get_iterator(self.get_dataset(X), training=training)
        if isinstance(X, LoadedBatches) and isinstance(iterator.sampler, RandomSampler):
            raise ValueError(
                "X is a data loader that gives the samples in random order, so that nobody knows "
                "which prediction is whose. Pass a loader with shuffle=False, or loader.dataset."
            )
        rows, chosen = rows_of(iterator), self.get_params_for("iterator_valid")
        # batch norms without running statistics know their batch
        knows_batch = any(
            isinstance(part, _BatchNorm) and part.running_mean is None for part in self._parts()
        )
        if rows is not None and not (training or chosen or knows_batch):
            size = min(_SAMPLES, _NUMBERS // max(1, rows.n_numbers))
            iterator = rows_loader(rows, batch_size=max(size, iterator.batch_size))
        made = type(iterator) is DataLoader and not isinstance(X, LoadedBatches)
        unseeded = made and not iterator.num_workers and iterator.generator is None
        if unseeded and self._training is None:
            # torch draws a seed for workers even if there are none, perhaps from the random state
            # that another thread trains with
            iterator.generator = torch.Generator()
        for batch in map(pair_labels, iterator):
            yield to_device(self.evaluation_step(batch, training=training), device=device)

    # -- the training loop ---------------------------------------------------------------

    def run_single_epoch(
        self, iterator: Any, training: bool, prefix: str, step_fn: Any, **fit_params: Any
    ) -> None:
        """Train or validate for an epoch."""
        if iterator is None:
            return
        if training and self._is_trained_otherwise(iterator, fit_params):
            return
        batches = map(pair_labels, iterator)
        super().run_single_epoch(batches, training, prefix, step_fn, **fit_params)

    def _is_trained_otherwise(self, iterator: Any, fit_params: Mapping[str, Any]) -> bool:
        """Train for an epoch together with other nets, or by written-out gradients, if possible."""
        fleet = EPOCH_TRAINER.get()
        try:
            job = make_job(self, iterator, fit_params)
            if fleet is not None and any(
                isinstance(callback, Checkpoint) and callback.load_best
                for _, callback in self.callbacks_
            ):
                raise NeedsOwnLoop("its Checkpoint reads a file that the other nets write, too")
            epoch = train_alone(job) if fleet is None else fleet.train_epoch(job)
        except NeedsOwnLoop as reason:
            if fleet is not None:
                fleet.log_reason(reason)
            return False
        rows = zip(epoch.sizes, epoch.losses, epoch.penalties, epoch.shares, strict=True)
        list.__getitem__(self.history, -1)["batches"].extend(
            {
                "train_loss": loss,
                "train_batch_size": size,
                "flatness_penalty": share * penalty,
                "flatness_clipped": 1.0 - share,
            }
            for size, loss, penalty, share in rows
        )
        self.history.record("train_batch_count", len(epoch.sizes))
        self._state().is_penalised = True
        self._ending = epoch.ending
        return True


# -- epochs --------------------------------------------------------------------------------


def check_start(name: str, start: Any) -> None:
    """Refuse what is no epoch, and no share of a training's epochs."""
    check_number(name, start, positive=False)
    if isinstance(start, float) and start > 1:
        raise ValueError(f"{name}={start!r} is a share of max_epochs: at most 1.0, or an int.")


def epochs_before(start: float, max_epochs: int) -> float:
    """Return the number of epochs before a start that is an epoch, or a share of all if a float."""
    return start * max_epochs if isinstance(start, float) else start


# -- epochs as jobs ------------------------------------------------------------------------


def make_job(net: Any, loader: Any, fit_params: Mapping[str, Any]) -> Job:
    """Read a net and its data for an epoch outside of its own loop; refuse what needs that."""
    _refuse_own_step(net, fit_params)
    samples = rows_of(loader)
    if samples is None or not all(type(x) is Tensor for x in (samples.inputs, samples.targets)):
        raise NeedsOwnLoop("its batches are not cut out of arrays")
    size, drop_last = int(loader.batch_size or 1), bool(loader.drop_last)
    if drop_last and len(samples) < size:
        raise NeedsOwnLoop("it has fewer samples than a batch, and drops them")
    penalty = net._penalty() if net._penalty_weight() else None
    job = Job(
        net.module_,
        net.optimizer_,
        net.criterion_,
        penalty,
        samples.inputs,
        samples.targets,
        torch.from_numpy(samples.rows),
        samples.weights,
        isinstance(loader.sampler, RandomSampler),
        min(size, len(samples)),
        drop_last,
        net._check_output,
    )
    reason = qualify(job)
    if reason is not None:
        raise NeedsOwnLoop(reason)
    return job


def _refuse_own_step(net: Any, fit_params: Mapping[str, Any]) -> None:
    """Refuse a net that does something in its steps that another loop would leave out."""
    if fit_params:
        raise NeedsOwnLoop(f"its network takes further arguments: {sorted(fit_params)}")
    library = next(kind for kind in type(net).__mro__ if kind.__module__.startswith("relflat_sk."))
    for name in _STEP:
        if getattr(type(net), name, None) is not getattr(library, name, None):
            raise NeedsOwnLoop(f"{type(net).__name__} has its own {name}")
    trained = {n for n, v in vars(net).items() if isinstance(v, _TRAINED)}
    if not trained <= {"module", "module_", "criterion", "criterion_", "optimizer_"}:
        raise NeedsOwnLoop("it has other parts than one module, criterion and optimizer")
    if "_orig_mod" in getattr(net.module_, "_modules", {}):
        raise NeedsOwnLoop("its network is compiled")
    for _, callback in net.callbacks_:
        reads_validation = isinstance(callback, EpochScoring) and not callback.on_train
        # LRScheduler of skorch, and WeightAverage
        steps_by_epoch = getattr(callback, "step_every", "batch") == "epoch"
        methods = [getattr(callback, event) for event in _EVENTS]
        does_nothing = [getattr(method, "__func__", method) for method in methods] == _EMPTY
        if not (does_nothing or reads_validation or steps_by_epoch):
            kind = type(callback).__name__
            raise NeedsOwnLoop(f"its callback {kind} is called in each step")


# -- callbacks -----------------------------------------------------------------------------


class EpochMean(PassthroughScoring):
    """skorch's mean of a column over the batches of an epoch, which takes longer to read them."""

    best_score_: np.float64

    def on_epoch_end(self, net: Any, **kwargs: Any) -> None:
        """Record the mean over samples, and whether it is the lowest."""
        size = "train_batch_size" if self.on_train else "valid_batch_size"
        epoch = net.history[-1]
        batches = [batch for batch in epoch["batches"] if self.name in batch]
        if not batches:
            return
        total = sum(batch[size] * batch[self.name] for batch in batches)
        mean = epoch[self.name] = np.float64(total / sum(batch[size] for batch in batches))
        if self.lower_is_better:
            epoch[f"{self.name}_best"] = bool(mean < self.best_score_)
            self.best_score_ = np.fmin(mean, self.best_score_)


class QuietPrintLog(PrintLog):
    """skorch's table of epochs, which is laid out only if somebody sees it."""

    def on_epoch_end(self, net: Any, **kwargs: Any) -> None:
        if net.verbose or self.sink is not print:
            super().on_epoch_end(net, **kwargs)


# -- loaders and optimizers ----------------------------------------------------------------


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
    weights = [p for group in groups for p in group["params"]]
    are_floats = all(p.dtype in (torch.float32, torch.float64) for p in weights)
    return are_floats and all(p.device.type in ("cpu", "cuda") for p in weights)
