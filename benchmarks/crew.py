"""Threads in the place of processes, and collectives among them: what ``benchmarks/simulator.py`` runs its workers on."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.traffic import Counters, gather_bytes, ring_bytes

T = TypeVar("T")
Future = torch.futures.Future[torch.Tensor]


class _Round:
    """One collective: what each worker brought, and what came of it."""

    def __init__(self, world_size: int) -> None:
        self.values: list[Any] = [None] * world_size
        self.arrived = 0
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None


class Hub:
    """Where the workers' threads meet. One of them runs at a time: they would only take Python's lock from each other.

    Args:
        world_size: W, the number of workers.
        timeout_s: how long a worker waits for the others.
    """

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._round = _Round(world_size)
        self._failed: int | None = None
        self._turn = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A block that a worker's thread runs, alone but while it waits in :meth:`meet`."""
        with self._turn:
            yield

    def meet(self, rank: int, value: T, combine: "Callable[[list[T]], Any]") -> Any:
        """Bring a value, and wait for all others: ``combine`` of the values in rank order, computed once and shared by all.

        Raises:
            RuntimeError: another worker has failed and will not come, or did not come in time; or this is not a worker's thread.
        """
        if not self._turn.locked():
            raise RuntimeError("what is collective must be called in every worker's thread: workers.each(lambda rank: ...)")
        self._turn.release()
        try:
            return self._meet(rank, value, combine)
        finally:
            self._turn.acquire()

    def _meet(self, rank: int, value: T, combine: "Callable[[list[T]], Any]") -> Any:
        with self._condition:
            now = self._round
            now.values[rank] = value
            now.arrived += 1
            if now.arrived == self.world_size:
                try:
                    now.result = combine(now.values)
                except Exception as error:
                    now.error = error
                now.values.clear()
                now.done, self._round = True, _Round(self.world_size)
                self._condition.notify_all()
            elif not self._condition.wait_for(lambda: now.done or self._failed is not None, self._timeout_s):
                raise RuntimeError(f"worker {rank} waited {self._timeout_s} s for {self.world_size - now.arrived} others")
        if now.error is not None:
            raise now.error
        if not now.done:
            raise RuntimeError(f"worker {self._failed} failed, and worker {rank} waits for it in vain")
        return now.result

    def fail(self, rank: int) -> None:
        """This worker will not come any more: nobody is to wait for it. What all have come to already goes on."""
        with self._condition:
            if self._failed is None:
                self._failed = rank
            self._condition.notify_all()

    def begin(self) -> None:
        """Begin anew, after all workers have ended what they did."""
        self._round, self._failed = _Round(self.world_size), None


def _serve(rank: int, tasks: "queue.SimpleQueue[Any]") -> None:
    """A worker's thread: one task after the other, until there is None."""
    while (task := tasks.get()) is not None:
        task(rank)
        del task  # a thread that waits holds nothing


def _dismiss(tasks: "list[queue.SimpleQueue[Any]]") -> None:
    for waiting in tasks:
        waiting.put(None)


class Crew:
    """W threads that live as long as this object."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._tasks: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(hub.world_size)]
        for rank, tasks in enumerate(self._tasks):
            threading.Thread(target=_serve, args=(rank, tasks), daemon=True, name=f"worker {rank}").start()
        weakref.finalize(self, _dismiss, self._tasks)

    def each(self, function: Callable[[int], T]) -> list[T]:
        """``function(rank)`` of every worker, each in its own thread; raises what the first to fail raised."""
        hub = self._hub
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def task(rank: int) -> None:
            with hub.turn():
                try:
                    results[rank] = function(rank)
                except BaseException as error:
                    errors.append(error)
                    hub.fail(rank)
            done.put(rank)

        for tasks in self._tasks:
            tasks.put(task)
        for _ in self._tasks:
            done.get()
        if errors:
            hub.begin()
            raise errors[0]
        return [results[rank] for rank in range(hub.world_size)]


class LocalExchange(Exchange):
    """The collectives of one worker, among threads; counted as those of a process. Results are there when a call returns.

    Args:
        hub: of all workers.
        rank: this worker's.
        counters: where bytes and seconds are added.

    Attributes:
        payload_bytes: what this worker handed to gathers, once.
        dense_bytes: what it handed to all-reduces, in the dtype handed over.
        agreement_bytes: what it handed to :meth:`gather_now`: digests and first capacities, a few bytes once.
    """

    def __init__(self, hub: Hub, rank: int, counters: Counters) -> None:
        self.group = None  # type: ignore[assignment]  # there is no process group
        self._hub = hub
        self._counters = counters
        self.rank = rank
        self.world_size = counters.world_size = hub.world_size
        self.payload_bytes = self.dense_bytes = self.agreement_bytes = 0

    def gather(self, payload: torch.Tensor) -> Future:
        """As :meth:`Exchange.gather`; the result is shared by all workers: not to be written to."""
        self.payload_bytes += payload.numel()
        return self._gather(payload)

    def gather_now(self, data: bytes) -> list[bytes]:
        """As :meth:`Exchange.gather_now`."""
        self.agreement_bytes += len(data)
        return [row.numpy().tobytes() for row in self._gather(torch.frombuffer(bytearray(data), dtype=torch.uint8)).wait()]

    def ring(self, tensor: torch.Tensor) -> Future:
        """As :meth:`Exchange.ring`; the sum is taken in rank order, in the tensor's dtype."""
        size = tensor.numel() * tensor.element_size()
        self.dense_bytes += size
        return self._meet(tensor, ring_bytes(self.world_size, size), _sum, into=tensor)

    def ring_coo(self, tensor: torch.Tensor) -> Future:
        """As :meth:`Exchange.ring_coo`; the sum is taken in rank order."""
        indices, values = tensor._indices(), tensor._values()
        self.dense_bytes += 8 * indices.numel() + values.element_size() * values.numel()
        return self._meet(tensor, self.coo_bytes(tensor), _sum, into=tensor)

    def _gather(self, payload: torch.Tensor) -> Future:
        return self._meet(payload, gather_bytes(self.world_size, payload.numel()), torch.stack)

    def _meet(self, value: torch.Tensor, size: int, combine: Any, *, into: torch.Tensor | None = None) -> Future:
        start = time.perf_counter()
        result = self._hub.meet(self.rank, value, combine)
        self._counters.add(sent_bytes=size, received_bytes=size, exchange_s=time.perf_counter() - start)
        return completed(result if into is None else into.copy_(result))


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total.coalesce() if total.is_sparse else total


def completed(tensor: torch.Tensor) -> Future:
    """A future of the tensor, which is there already."""
    future: Future = torch.futures.Future()
    future.set_result(tensor)
    return future
