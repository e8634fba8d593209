"""An epoch of nets that train by written-out gradients: batches and steps."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.nn.functional import pad

from relflat_sk._engine.chain import find_chain
from relflat_sk._engine.earlier import ChainTerms
from relflat_sk._engine.job import Epoch, Job, NeedsOwnLoop
from relflat_sk._engine.step import Own, Step, StepBatch, settings_of
from relflat_sk._losses.curvature import namespace
from relflat_sk._network.batches import cast_inputs
from relflat_sk._network.layers import find_names
from relflat_sk._random import n_words

# what trains the epochs of all nets that are fitted in this context, for instance of many nets
# together: its `train_epoch(job)` returns an `Epoch`, or raises `NeedsOwnLoop`; None if each net
# trains by itself
EPOCH_TRAINER: ContextVar[Any] = ContextVar("EPOCH_TRAINER", default=None)

# input values of batches that are cut at a time
_NUMBERS = 2**20


def train_alone(job: Job) -> Epoch:
    """Train a network for an epoch by written-out gradients, with its own optimizer."""
    nets = ChainNets(job)
    job.start_epoch()
    (epoch,) = nets.train([job], Own(job))
    torch.set_rng_state(job.random_state)
    return epoch


class ChainNets:
    """Networks that are chains of the same layers, which train by formulas."""

    def __init__(self, job: Job) -> None:
        chain = find_chain(job.module, tuple(job.inputs.shape[1:]))
        if chain is None or chain.names != {name for name, _ in job.parts.parameters}:
            raise NeedsOwnLoop("its network is no chain of layers")
        if job.penalty is not None:
            names = [layer.name for layer in chain.linear]
            penalised = find_names(job.module, job.penalty.layers, names)
            chain.at_last = names[-1] in penalised
            # in the order in which they are named, as a net's own loop draws signs
            chain.earlier = [names.index(name) for name in penalised if name != names[-1]]
            if chain.earlier and not chain.is_linear_in_pieces(min(chain.earlier)):
                raise NeedsOwnLoop("its penalty is at layers with smooth functions behind")
        self._chain, self.n_outputs = chain, chain.n_outputs
        job.prepare(self.n_outputs)

    def length(self, job: Job) -> Hashable:
        """Return what epochs trained together have in common: last batches may differ in size."""
        *others, last = job.sizes
        return len(others), n_words((last, self.n_outputs)) if self._chain.earlier else 0

    def train(self, jobs: Sequence[Job], stack: Any) -> list[Epoch]:
        """Train networks for an epoch, whose tensors are in a stack."""
        chain, loss, like = self._chain, jobs[0].loss, stack.slopes
        small = like.device.type == "cpu" and chain.is_small(jobs[0].batch_size)

        def convert(tensor: Tensor) -> Any:
            return tensor.numpy() if small else tensor

        chain.bind(
            {name: convert(weight) for name, weight in stack.weights.items()},
            {name: convert(gradient) for name, gradient in stack.gradients.items()},
            convert(stack.slopes),
            convert(like.new_ones(1, 1, jobs[0].batch_size)),
        )
        for layer in chain.dropout:
            layer.seed(make_generators(jobs, like.device), like, small=small)
        earlier = ChainTerms(chain, loss, jobs, like) if chain.earlier else None
        step = Step(chain, loss, at_last=chain.at_last, earlier=earlier)
        with _one_blas_thread() if small else nullcontext():
            epochs = train_epoch(step, jobs, stack, small=small)
        if earlier is not None:
            earlier.finish()
        return epochs


# -- batches and steps ------------------------------------------------------------------------


def train_epoch(step: Step, jobs: Sequence[Job], stack: Any, *, small: bool = False) -> list[Epoch]:
    """Train networks for an epoch by steps, which are NumPy's if the networks are small."""
    like = stack.slopes
    penalties = [job.penalty for job in jobs if job.penalty is not None]
    settings, recorded = settings_of(penalties, like.numpy() if small else like), []
    with torch.no_grad():
        for batch in _cut_batches(jobs, like, small=small):
            rests = settings is not None and not settings.limit.begin_step(settings.every)
            recorded.append(step(batch, None if rests else settings))
            stack.step()
    if settings is not None and len(penalties) > 1:
        settings.limit.unstack([penalty.limit for penalty in penalties])
    stack.hand_over()
    return _read_epochs(jobs, recorded)


def _cut_batches(jobs: Sequence[Job], like: Tensor, *, small: bool) -> Iterator[StepBatch]:
    """Cut the batches of an epoch, those of several steps at once, of the type of a tensor."""
    first, size = jobs[0], jobs[0].batch_size
    counts = np.array([len(job.order) for job in jobs])
    n = int(counts.max())
    # samples of share 0 stand where a net has fewer than others
    orders = [pad(job.order, (0, n - len(job.order))) for job in jobs]
    numbers = max(1, first.inputs[:1].numel()) * len(jobs)
    at_once = size * max(1, _NUMBERS // (size * numbers))
    data = [job.inputs for job in jobs]
    if len(first.inputs) <= at_once * len(jobs) and _is_shared(data):
        # to the device at once, where each net would bring its own copy of each row
        data = [first.inputs.to(like.device)] * len(jobs)
    for start in range(0, n, at_once):
        samples = [order[start : start + at_once] for order in orders]
        rows = [job.rows[chosen] for job, chosen in zip(jobs, samples, strict=True)]
        values = _taken([job.values for job in jobs], rows).to(like.device)
        arrays = (
            cast_inputs(_taken(data, rows), first.module, like.device),
            first.loss.targets(values, first.n_outputs, like),
            _shares(jobs, samples, counts - start, like),
        )
        several = [array.numpy() for array in arrays] if small else arrays
        for place in range(0, len(rows[0]), size):
            yield StepBatch(*(array[:, place : place + size] for array in several))


def _is_shared(data: Sequence[Tensor]) -> bool:
    """Tell whether all tensors, of one type, are the same memory."""
    places = ((one.data_ptr(), one.shape, one.stride()) for one in data)
    return len(set(places)) == 1


def _taken(data: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Take some rows of each tensor: (k, n, ...)."""
    if _is_shared(data):
        index = torch.stack(list(rows)).to(data[0].device)
        return data[0].index_select(0, index.flatten()).view(*index.shape, *data[0].shape[1:])
    return torch.stack([
        one.index_select(0, own.to(one.device)) for one, own in zip(data, rows, strict=True)
    ])


def _shares(
    jobs: Sequence[Job],
    samples: Sequence[Tensor],
    counts: Any,  # (k,), of the samples from the first of these on
    like: Tensor,
) -> Tensor:  # (k, n)
    """Return the shares of samples in the weights of their batches."""
    # by NumPy, whose operations take a third of the time on so few numbers
    n, size = len(samples[0]), jobs[0].batch_size
    weights = (np.arange(n) < counts[:, None]).astype(float)
    if jobs[0].weights is not None or jobs[0].class_weights is not None:
        rows = [job.weights_of(chosen) for job, chosen in zip(jobs, samples, strict=True)]
        weights *= torch.stack(rows).double().numpy()
    sums = np.add.reduceat(weights, range(0, n, size), axis=1)
    sums[sums <= 0] = 1  # where the weights are 0
    return torch.from_numpy(weights / sums.repeat(size, axis=1)[:, :n]).to(like)


def make_generators(jobs: Sequence[Job], device: torch.device) -> list[torch.Generator]:
    """Make the streams from which dropout draws in an epoch."""
    return [torch.Generator(device).manual_seed(job.seed) for job in jobs]


@cache  # in the first epoch, because it searches the process for its libraries
def _blas_libraries() -> list[Any]:
    return list(ThreadpoolController().select(user_api="blas").lib_controllers)


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Let NumPy multiply on one thread, which small matrices do not share among several."""
    # `ThreadpoolController.limit` and torch's iterators over modules took a tenth of an epoch
    before = [(library, library.num_threads) for library in _blas_libraries()]
    try:
        for library, _ in before:
            library.set_num_threads(1)
        with np.errstate(all="ignore"):
            yield
    finally:
        for library, n_threads in before:
            library.set_num_threads(n_threads)


def _read_epochs(jobs: Sequence[Job], recorded: Sequence[tuple[Any, ...]]) -> list[Epoch]:
    """Return the batches of each network, from the losses, penalties and shares of each step."""
    numbers = [quantity for step in recorded for quantity in step]
    joined = namespace(numbers[0]).concatenate(numbers)
    if isinstance(joined, Tensor):
        joined = joined.cpu().numpy()
    steps = joined.reshape(len(recorded), -1, len(jobs)).transpose(2, 1, 0).tolist()
    return [Epoch(job.sizes, *of_job) for job, of_job in zip(jobs, steps, strict=True)]
