"""The weights, buffers and optimizer states of nets that train together, in common arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relflat_sk._engine.job import Job, NeedsOwnLoop, Parts
from relflat_sk._engine.step import bare_step, split_rows


class Stack:
    """The stacked networks of some jobs for an epoch.

    All weights of a network are a row of one array, on which an optimizer of torch takes the steps.
    The networks' own tensors get the values at the end of the epoch, so that callbacks find trained
    networks.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = list(jobs)
        self._own = [job.parts.parameters for job in jobs]
        with torch.no_grad():
            rows = [torch.cat([p.reshape(-1) for _, p in own]) for own in self._own]
            self._rows = torch.stack(rows)
            self.slopes = torch.zeros_like(self._rows)
            self.weights, self.gradients = (
                split_rows(array, self._own[0]) for array in (self._rows, self.slopes)
            )
            named = [dict(job.parts.buffers) for job in jobs]
            self.buffers = {n: torch.stack([one[n] for one in named]) for n in named[0]}
        self._make_optimizers()

    def _make_optimizers(self) -> None:
        """Make an optimizer for each run of jobs whose own ones have the same settings.

        The steps of all optimizers here are proportional to their learning rate. Where jobs
        differ in theirs, the optimizers' is 1, and each job takes its share of the step.
        """
        settings = [
            {name: x for name, x in job.optimizer.param_groups[0].items() if name != "params"}
            for job in self._jobs
        ]
        rates = [one["lr"] for one in settings]
        self._rates: Tensor | None = None
        if len(set(rates)) > 1:
            self._rates = torch.tensor(rates, dtype=torch.float64).to(self._rows)[:, None]
            settings = [{**one, "lr": 1.0} for one in settings]
        states = [self._state(k) for k in range(len(self._jobs))]
        kinds = []
        for job, of_job, state in zip(self._jobs, settings, states, strict=True):
            # a net that begins has no tensors yet, such as those of momentum
            known = {name: Tensor if isinstance(x, Tensor) else x for name, x in state.items()}
            kinds.append((type(job.optimizer), of_job, known))
        self._runs: list[_Run] = []
        for _, places in groupby(range(len(kinds)), key=lambda k: kinds[k]):
            first, *others = places
            rows = slice(first, first + 1 + len(others))
            parameter = nn.Parameter(self._rows[rows])
            parameter.grad = self.slopes[rows]
            kind: Any
            kind, group, state = kinds[first]
            optimizer = kind([{"params": [parameter], **group}], lr=group["lr"])
            of_device = group.get("fused") or group.get("capturable")
            device = self._rows.device if of_device else "cpu"
            stacked = optimizer.state[parameter]
            for name, value in state.items():
                if value is Tensor:
                    stacked[name] = torch.stack([
                        state_of_job[name] for state_of_job in states[rows]
                    ])
                else:
                    stacked[name] = None if value is None else torch.tensor(value).to(device)
            self._runs.append(_Run(rows, stacked, bare_step(optimizer)))

    def _state(self, k: int) -> dict[str, Any]:
        """Return the state of a job's optimizer: rows, and numbers of all parameters."""
        state = self._jobs[k].optimizer.state
        states = [state.get(p, {}) for _, p in self._own[k]]
        found: dict[str, Any] = {}
        is_even = all(one.keys() == states[0].keys() for one in states)
        for name in states[0]:
            values = [one.get(name) for one in states]
            if name != "step" and all(isinstance(value, Tensor) for value in values):
                found[name] = torch.cat([value.reshape(-1) for value in values])
                continue
            numbers = {None if value is None else float(value) for value in values}
            is_even &= len(numbers) == 1
            found[name] = numbers.pop()
        if not is_even:
            raise NeedsOwnLoop("some of its parameters have made fewer steps than others")
        return found

    def step(self) -> None:
        """Take a step with the gradients."""
        before = self._rows if self._rates is None else self._rows.clone()
        for run in self._runs:
            run.step()
        if self._rates is not None:
            torch.lerp(before, self._rows, self._rates, out=self._rows)

    @torch.no_grad()
    def hand_over(self) -> None:
        """Give the values of the stack to the jobs' own networks and optimizers."""
        for k, (job, own) in enumerate(zip(self._jobs, self._own, strict=True)):
            rows, slopes = (split_rows(one[k], own) for one in (self._rows, self.slopes))
            for name, parameter in own:
                parameter.copy_(rows[name])
                parameter.grad = slopes[name].clone()  # that of the last step
            for name, buffer in job.parts.buffers:
                buffer.copy_(self.buffers[name][k])
            optimizer: Any = job.optimizer
            optimizer._opt_called = True  # else torch's schedulers warn of a missing step
        for run in self._runs:
            jobs, owns = self._jobs[run.rows], self._own[run.rows]
            for name, value in run.state.items():
                is_row = name != "step" and isinstance(value, Tensor)
                for i, (job, own) in enumerate(zip(jobs, owns, strict=True)):
                    pieces = split_rows(value[i], own) if is_row else {}
                    for key, parameter in own:
                        piece = pieces.get(key, value)
                        job.optimizer.state[parameter][name] = (
                            piece.clone() if isinstance(piece, Tensor) else piece
                        )


class _Run(NamedTuple):
    """Neighbouring rows that one optimizer moves."""

    rows: slice
    state: dict[str, Any]  # the optimizer's
    step: Callable[[], Any]


# -- what nets must have in common ----------------------------------------------------------

# what torch itself keeps in a module; all else is the module's own
_OF_TORCH = nn.Module().__dict__.keys()


def key_of(job: Job) -> tuple[Any, ...]:
    """Return what nets have in common that can be trained as one stacked model.

    The settings of their optimizers, and the weight and the limit of their penalties, may be each
    net's own.
    """
    inputs, targets, criterion, penalty = job.inputs, job.targets, job.criterion, job.penalty
    group, *other_groups = job.optimizer.param_groups
    if other_groups:
        raise NeedsOwnLoop("its optimizer has several groups of parameters")
    if any(isinstance(value, Tensor) for value in group.values()):
        raise NeedsOwnLoop("its optimizer has a setting that is a tensor")
    shapes = [(tuple(part.shape[1:]), part.dtype, part.device) for part in (inputs, targets)]
    ignored = getattr(criterion, "ignore_index", None)
    of_criterion = parts_key(Parts(criterion)) if isinstance(criterion, nn.Module) else ()
    of_penalty: tuple[Any, ...] = ()
    if penalty is not None:
        is_free = penalty.clip is None
        of_penalty = penalty.layers, penalty.normalize, penalty.probes, is_free, penalty.every
    return (
        (job.batch_size, *shapes),
        ignored is not None and bool((targets == ignored).any()),
        job.weights is not None,
        parts_key(job.parts),
        of_criterion,
        of_penalty,
    )


def parts_key(parts: Parts) -> tuple[Any, ...]:
    """Return what makes two modules the same function of parameters, buffers and inputs."""
    modules = [(name, type(part), part.extra_repr()) for name, part in parts.modules]
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype, tensor.device)
        for name, tensor in (*parts.parameters, *parts.buffers)
    ]
    return tuple(modules), frozenset(attributes_of(parts).items()), tuple(tensors)


def attributes_of(parts: Parts) -> dict[str, Any]:
    """Return what modules hold in Python, in a form that can be compared."""
    return {
        f"{name}.{key}" if name else key: _comparable(value)
        for name, part in parts.modules
        for key, value in vars(part).items()
        if key not in _OF_TORCH and value is not None
    }


def _comparable(value: Any) -> Any:
    """Return a value in a form that can be compared; two objects are different."""
    kind = type(value)
    if kind in (bool, int, float, str, type(None), torch.dtype, torch.device):
        return kind, value
    if kind in (list, tuple):
        return kind, tuple(map(_comparable, value))
    if kind is dict:
        return kind, tuple((_comparable(key), _comparable(one)) for key, one in value.items())
    return Same(value)


@dataclass(frozen=True, eq=False)
class Same:
    """Equal to others of the same object, which it holds, so that no other gets its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
