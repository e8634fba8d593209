"""Train candidates on the workers of a cluster: of dask or ray, as joblib's context says.

joblib sends all arguments with every task, or leaves it to chance which of them are sent once. It
gives results of ray to the caller only when all are there, and ends all workers of a pool if one
dies. So tasks are given to dask and ray themselves. Both send the data once to each worker.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from itertools import islice
from typing import Any

from joblib.parallel import get_active_backend


class WorkersDiedError(RuntimeError):
    """Worker processes of a cluster died."""


class Cluster(ABC):
    """The workers of a cluster."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    @abstractmethod
    def n_workers(self) -> int:
        """Return the number of workers that the cluster has now, at least 1."""

    @abstractmethod
    def send(self, function: Callable[[Any, int], list[Any]], data: Any) -> None:
        """Send to the workers what all tasks share, before the first task."""

    @abstractmethod
    def submit(self, n: int) -> None:
        """Begin a task as soon as a worker is free."""

    @abstractmethod
    def wait(self) -> list[Any]:
        """Wait until a task has ended, and return its result."""

    @abstractmethod
    def release_idle(self) -> None:
        """Release workers that have nothing to do, since all tasks have begun."""

    @abstractmethod
    def close(self) -> None:
        """Cancel tasks that have not begun, and release the shared data."""


class DaskCluster(Cluster):
    """The workers of dask's scheduler."""

    def n_workers(self) -> int:
        return int(self.backend.effective_n_jobs(-1))

    def send(self, function: Callable[[Any, int], list[Any]], data: Any) -> None:
        from distributed import as_completed  # noqa: PLC0415

        self._function, self._data = function, data
        self._completed = as_completed()
        self._running: dict[Any, Any] = {}  # from a task to the copy of the data that it reads
        self._scatter()
        self._waiting = self.backend.retrieval_context()  # frees the worker that waits for others
        self._waiting.__enter__()

    def _scatter(self) -> None:
        # the workers copy them from each other
        (self._shared,) = self.backend.client.scatter([self._data], hash=False)

    def submit(self, n: int) -> None:
        options = {"pure": False} | self.backend.submit_kwargs
        future = self.backend.client.submit(self._function, self._shared, n, **options)
        self._running[future] = self._shared
        self._completed.add(future)

    def wait(self) -> list[Any]:
        """Wait until a task has ended, and return its result."""
        from distributed import KilledWorker  # noqa: PLC0415

        future = next(self._completed)
        read = self._running.pop(future)
        try:
            found: list[Any] = future.result()
            return found
        except KilledWorker as error:  # dask gives a task to several workers before
            raise WorkersDiedError(str(error)) from error
        except CancelledError as error:
            if read is self._shared:  # other tasks may have lost the same copy
                self._scatter()
            raise WorkersDiedError("a worker of dask died, and the data with it") from error

    def release_idle(self) -> None:
        """Do nothing: tasks of others begin by themselves."""

    def close(self) -> None:
        self.backend.client.cancel(list(self._running))
        self._running.clear()
        self._waiting.__exit__(None, None, None)


class RayCluster(Cluster):
    """Actors of ray, each of which holds the shared data until the search ends."""

    def n_workers(self) -> int:
        import ray  # noqa: PLC0415

        if not ray.is_initialized():
            ray.init()
        options = self._options
        needed = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus")}
        needed |= options.get("resources") or {}
        there = ray.cluster_resources()
        counts = [int(there.get(name, 0) / n) for name, n in needed.items() if n]
        return max(1, min(counts, default=1))

    @property
    def _options(self) -> dict[str, Any]:
        return {"num_cpus": 1} | (self.backend.ray_remote_args or {})

    def send(self, function: Callable[[Any, int], list[Any]], data: Any) -> None:
        import ray  # noqa: PLC0415

        self._actor = ray.remote(_Actor).options(**self._options)
        self._arguments = function, ray.put(data)
        self._running: dict[Any, Any] = {}
        self._idle: list[Any] = []

    def submit(self, n: int) -> None:
        actor = self._idle.pop() if self._idle else self._actor.remote(*self._arguments)
        self._running[actor.run.remote(n)] = actor

    def wait(self) -> list[Any]:
        """Wait until a task has ended, and return its result."""
        import ray  # noqa: PLC0415

        (ready,), _ = ray.wait(list(self._running))
        actor = self._running.pop(ready)
        try:
            found: list[Any] = ray.get(ready)
        except ray.exceptions.RayTaskError as error:
            self._idle.append(actor)
            raise error.cause from error
        except ray.exceptions.RayError as error:
            ray.kill(actor)  # it may be out of reach only
            raise WorkersDiedError(str(error)) from error
        self._idle.append(actor)
        return found

    def release_idle(self) -> None:
        import ray  # noqa: PLC0415

        while self._idle:
            ray.kill(self._idle.pop())  # actors that have not started wait for its CPU

    def close(self) -> None:
        self._idle += self._running.values()
        self._running.clear()
        self.release_idle()


class _Actor:
    """A worker process of ray."""

    def __init__(self, function: Callable[[Any, int], list[Any]], data: Any) -> None:
        self.function, self.data = function, data

    def run(self, n: int) -> list[Any]:
        """Do a task."""
        return self.function(self.data, n)


# by the class of joblib's backend, so that neither dask nor ray is imported before
_CLUSTERS = {"DaskDistributedBackend": DaskCluster, "RayBackend": RayCluster}


def find_cluster() -> Cluster | None:
    """Return the cluster of joblib's context."""
    backend, _ = get_active_backend()
    cluster = _CLUSTERS.get(type(backend).__name__)
    return None if cluster is None else cluster(backend)


def results_of(cluster: Cluster, n_tasks: int, n: int, n_jobs: int) -> Iterator[list[Any]]:
    """Do tasks on a cluster that has the data, and yield each result once it is there."""
    left = iter(range(n_tasks))

    def begin(at_most: int) -> int:
        begun = list(islice(left, at_most))
        for _ in begun:
            cluster.submit(n)
        return len(begun)

    death, n_died = None, 0
    try:
        n_running = begin(n_jobs)
        while n_running and n_died <= n_jobs:
            try:
                found, n_died = cluster.wait(), 0
            except WorkersDiedError as error:
                found, death, n_died = [], error, n_died + 1
            begun = begin(1)  # before the caller spends time on the result
            if not begun:
                cluster.release_idle()
            n_running += begun - 1
            yield found
        if death is not None:
            raise death
    finally:
        cluster.close()
