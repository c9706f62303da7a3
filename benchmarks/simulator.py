"""Data-parallel training by W logical workers in one process: accuracy studies of many workers on one machine.

    workers = Workers(net, 8, Sparse(gradcomp.TopK(0.05), values="sign"))
    for step in range(steps):
        workers.step([batch_of(rank, step) for rank in range(8)], lambda net, batch: net(batch))
        optimizer.step()                                    # one network, one optimizer: the replicas are equal by construction
    print(workers.bits, workers.handles[0].traffic)

Every worker has a hook of its own, with its own residuals, and a thread in which the hook runs; ``Sparse`` is ``gradcomp.sparse_hook``
itself, down to the bytes, with threads in the place of processes and a :class:`LocalExchange` in the place of gloo. Gradients are those of
one network, worker after worker. So the results are those of processes, but for the order in which a ring all-reduce adds up more than two
numbers, which here is that of the ranks. What the network holds beside parameters (batch statistics, say) sees all workers' batches in
turn, and so does the random generator. Every worker decodes what all have sent: a step takes W forward and backward passes, and W times a
hook that takes longer the larger W is.
"""

import copy
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

import gradcomp
from gradcomp.core.compiled import kernels
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.layouts import Layouts
from gradcomp.ddp.traffic import Counters, gather_bytes, ring_bytes

T = TypeVar("T")
Future = torch.futures.Future[torch.Tensor]


# Threads instead of processes


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
        return _completed(result if into is None else into.copy_(result))


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total.coalesce() if total.is_sparse else total


def _completed(tensor: torch.Tensor) -> Future:
    future: Future = torch.futures.Future()
    future.set_result(tensor)
    return future


# Buckets


class Bucket:
    """What a hook is given of one worker: a flat fp32 buffer, and the parameters whose gradients lie in it, as in DDP's."""

    def __init__(self, index: int, parameters: Sequence[nn.Parameter], *, is_last: bool) -> None:
        self._index = index
        self._parameters = list(parameters)
        self._is_last = is_last
        self._strides = [torch.empty_like(parameter, device="meta").stride() for parameter in parameters]
        self.set_buffer(torch.zeros(sum(parameter.numel() for parameter in parameters)))

    def index(self) -> int:
        """Its place in the backward pass."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients, flat, each in its parameter's memory order."""
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        """The parameters in it."""
        return list(self._parameters)

    def gradients(self) -> list[torch.Tensor]:
        """The gradients: views of the buffer."""
        return self._views

    def is_last(self) -> bool:
        """Whether it is the last of its backward pass."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another buffer in the place of its own."""
        self._buffer, self._views, start = buffer, [], 0
        for parameter, stride in zip(self._parameters, self._strides):
            self._views.append(buffer.as_strided(parameter.shape, stride, buffer.storage_offset() + start))
            start += parameter.numel()

    def load(self) -> None:
        """Copy the parameters' gradients into the buffer, zeros where there is none."""
        for view, parameter in zip(self._views, self._parameters):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.is_sparse:
                raise ValueError("gradients must be dense: embeddings with sparse=True are not simulated")
            else:
                view.copy_(parameter.grad)


def in_buckets(parameters: Iterable[nn.Parameter], bucket_numel: int | None) -> list[list[nn.Parameter]]:
    """Parameters in reverse order, in buckets that are closed once they have ``bucket_numel`` elements, as DDP closes them by bytes.

    Without ``bucket_numel`` one bucket, in their own order: DDP's first.
    """
    if bucket_numel is None:
        return [list(parameters)]
    buckets: list[list[nn.Parameter]] = [[]]
    held = 0
    for parameter in reversed(list(parameters)):
        if held >= bucket_numel:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.numel()
    return buckets


# Hooks


class Hook(Protocol):
    """One worker's side of whatever makes mean gradients of local ones."""

    @property
    def exchange(self) -> LocalExchange:
        """The worker's collectives, through which all of it goes."""

    def __call__(self, bucket: Bucket) -> Future:
        """A future of the bucket's buffer holding the mean gradient; called bucket by bucket, in the worker's thread."""


MakeHook = Callable[[nn.Module, Hub, int], Hook]
"""(network, hub, rank) -> that worker's hook."""


class LogicalState(gradcomp.SparseState):
    """A :class:`gradcomp.SparseState` among threads, and so the handle of its worker. Calling it is calling ``gradcomp.sparse_hook``.

    Methods of handles that are collective (``load_state_dict`` after the first step) go through :meth:`Workers.each`.

    Args:
        hub: of all workers.
        rank: this worker's.
        module, rule, options: as for :class:`gradcomp.SparseState`.
    """

    def __init__(self, hub: Hub, rank: int, module: nn.Module, rule: Any = None, **options: Any) -> None:
        self._hub, self._rank = hub, rank
        super().__init__(module, rule, **options)
        self.connect()

    def connect(self) -> tuple[LocalExchange, Layouts]:
        """As :meth:`gradcomp.SparseState.connect`, without a process group."""
        if self._connected is None:
            kernels()
            exchange = LocalExchange(self._hub, self._rank, self._counters)
            layouts = Layouts(exchange, self._network, self._rules, self._settings, self._feedback, self._agenda)
            self._connected = exchange, layouts
            layouts.warn_if_inactive()
        return self._connected  # type: ignore[return-value]

    @property
    def exchange(self) -> LocalExchange:
        """The worker's collectives, counted."""
        return self.connect()[0]

    def __call__(self, bucket: Bucket) -> Future:
        """Run the hook."""
        return gradcomp.sparse_hook(self, bucket)  # type: ignore[arg-type]


class Sparse:
    """gradcomp's hook: arguments as for :func:`gradcomp.register`. Every worker has a copy of the rules, as processes have."""

    def __init__(self, rule: Any = None, **options: Any) -> None:
        self._rule = rule
        self._overrides = options.pop("overrides", None)
        self._options = options

    def __call__(self, net: nn.Module, hub: Hub, rank: int) -> LogicalState:
        """One worker's."""
        rule, overrides = copy.deepcopy((self._rule, self._overrides))
        return LogicalState(hub, rank, net, rule, overrides=overrides, **self._options)


class _Mean:
    def __init__(self, hub: Hub, rank: int, dtype: torch.dtype) -> None:
        self.exchange = LocalExchange(hub, rank, Counters())
        self._dtype = dtype

    def __call__(self, bucket: Bucket) -> Future:
        buffer, world_size = bucket.buffer(), self.exchange.world_size
        sent = buffer.mul_(1 / world_size) if self._dtype == buffer.dtype else buffer.to(self._dtype).div_(world_size)
        reduced = self.exchange.ring(sent).wait()
        return _completed(buffer if reduced is buffer else buffer.copy_(reduced))


class DenseMean:
    """Plain DDP: the fp32 sum of ``gradient * (1 / W)``, in rank order."""

    def __call__(self, net: nn.Module, hub: Hub, rank: int) -> Hook:
        """One worker's."""
        return _Mean(hub, rank, torch.float32)


class Fp16Mean:
    """torch's ``fp16_compress_hook``: cast to fp16, then divided by W, summed in fp16 in rank order."""

    def __call__(self, net: nn.Module, hub: Hub, rank: int) -> Hook:
        """One worker's."""
        return _Mean(hub, rank, torch.float16)


@dataclass(frozen=True)
class PowerSGD:
    """Low-rank gradients: torch's ``powerSGD_hook`` from the first step on, with error feedback and warm start.

    A parameter of two dimensions or more is a matrix [shape[0], -1]. It is compressed where
    ``(rows + columns) * rank * min_compression_rate < rows * columns``; torch's default of ``min_compression_rate`` is 2. What is not
    compressed is averaged in fp32, and so leaves no error. Unlike torch's, errors and factors belong to parameters, not to buckets.

    Args:
        rank: of the approximation; at most rows and columns.
        min_compression_rate: see above; 0 compresses every matrix.
        seed: of the first factors, equal on all workers.

    Reference:
        Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS 2019.
    """

    rank: int = 1
    min_compression_rate: float = 1.0
    seed: int = 0

    def __call__(self, net: nn.Module, hub: Hub, rank: int) -> "_PowerSGD":
        """One worker's."""
        return _PowerSGD(self, net, hub, rank)


class _PowerSGD:
    """One worker's errors and right factors, by parameter name."""

    def __init__(self, settings: PowerSGD, net: nn.Module, hub: Hub, rank: int) -> None:
        self.exchange = LocalExchange(hub, rank, Counters())
        self.errors: dict[str, torch.Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}
        self._names = {parameter: name for name, parameter in net.named_parameters()}
        generator = torch.Generator().manual_seed(settings.seed)
        for name, parameter in net.named_parameters():
            if parameter.dim() < 2:
                continue
            rows, columns = parameter.flatten(1).shape
            width = min(rows, columns, settings.rank)
            if (rows + columns) * width * settings.min_compression_rate < rows * columns:
                self.errors[name] = torch.zeros(rows, columns)
                self._factors[name] = torch.randn(columns, width, generator=generator)

    @torch.no_grad()
    def __call__(self, bucket: Bucket) -> Future:
        names = [self._names[parameter] for parameter in bucket.parameters()]  # type: ignore[index]
        gradients = dict(zip(names, bucket.gradients()))
        whole = [gradient for name, gradient in gradients.items() if name not in self.errors]
        for gradient, mean in zip(whole, self._means(whole)):
            gradient.copy_(mean)
        sums = {name: self.errors[name] + gradients[name].flatten(1) for name in names if name in self.errors}
        lefts = self._means([matrix @ torch.linalg.qr(self._factors[name]).Q for name, matrix in sums.items()])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = self._means([matrix.t() @ left for matrix, left in zip(sums.values(), lefts)])
        for (name, matrix), left, right in zip(sums.items(), lefts, rights):
            given = left @ right.t()
            gradients[name].copy_(given.view(gradients[name].shape))
            self.errors[name] = matrix.sub_(given)
            self._factors[name] = right
        return _completed(bucket.buffer())

    def _means(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The means over the workers, by one all-reduce."""
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).mul_(1 / self.exchange.world_size)
        parts = torch.split(self.exchange.ring(flat).wait(), [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


# Training


class Workers:
    """W workers that train one network together.

    Args:
        net: the network, fp32, on the CPU, not wrapped.
        world_size: W.
        make_hook: what makes mean gradients: ``Sparse(...)``, ``DenseMean()``, ``Fp16Mean()``, ``PowerSGD(rank)``, or any function of
            (network, hub, rank) that makes one worker's :class:`Hook`.
        bucket_numel: elements at which a bucket is closed; all parameters in one bucket if None.
        timeout_s: how long a worker waits for the others.

    Attributes:
        hooks: by rank.
        buckets: by rank, in the order in which hooks are given them.
        steps: steps taken.
        local_s: seconds spent in forward and backward passes.
        mean_s: seconds spent in everything else: the hooks, the copies and the comparison.
    """

    def __init__(
        self, net: nn.Module, world_size: int, make_hook: MakeHook, *, bucket_numel: int | None = None, timeout_s: float = 60.0
    ) -> None:
        self.net = net
        self.world_size = world_size
        self.steps = 0
        self.local_s = self.mean_s = 0.0
        named = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
        for name, parameter in named.items():
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                raise ValueError(f"parameter {name} must be fp32 on the CPU, got {parameter.dtype} on {parameter.device}")
        self.numel = sum(parameter.numel() for parameter in named.values())
        layout = in_buckets(named.values(), bucket_numel)
        self.buckets = [
            [Bucket(index, parameters, is_last=index == len(layout) - 1) for index, parameters in enumerate(layout)]
            for _ in range(world_size)
        ]
        hub = Hub(world_size, timeout_s)
        self.hooks = [make_hook(net, hub, rank) for rank in range(world_size)]
        self._crew = Crew(hub)

    @property
    def handles(self) -> list[gradcomp.Handle]:
        """gradcomp's handles, by rank; none with other hooks."""
        return [hook for hook in self.hooks if isinstance(hook, gradcomp.Handle)]

    @property
    def bits(self) -> float:
        """Bits that a worker hands to collectives, an element and step: payloads with headers and padding, dense parts in their dtype.

        Counted by worker 0. What is agreed on once (16 bytes a bucket) is not in it.
        """
        exchange = self.hooks[0].exchange
        return 8 * (exchange.payload_bytes + exchange.dense_bytes) / max(1, self.numel * self.steps)

    @property
    def sent_bits(self) -> float:
        """Bits that a worker puts on the wire for those, an element and step: :attr:`bits` if there are two workers, else more."""
        exchange = self.hooks[0].exchange
        sent = gather_bytes(self.world_size, exchange.payload_bytes) + ring_bytes(self.world_size, exchange.dense_bytes)
        return 8 * sent / max(1, self.numel * self.steps)

    def each(self, function: Callable[[int], T]) -> list[T]:
        """``function(rank)`` in every worker's thread, for what is collective; the results by rank."""
        return self._crew.each(function)

    def step(self, losses: Sequence[Any], loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None) -> list[float]:
        """Leave the workers' mean gradient in ``grad`` of the network's parameters; None where no worker has a gradient.

        Args:
            losses: by rank, a function that returns the worker's loss; with ``loss_of`` the worker's batch.
            loss_of: the loss of a network and a batch.

        Returns:
            The losses, by rank.

        Raises:
            RuntimeError: the workers' results are not equal, bit for bit.
        """
        if len(losses) != self.world_size:
            raise ValueError(f"losses must be one for each of {self.world_size} workers, got {len(losses)}")
        start = time.perf_counter()
        values, loaded_s = [], 0.0
        used: set[nn.Parameter] = set()
        for own, buckets in zip(losses, self.buckets):
            self.net.zero_grad()
            loss = own() if loss_of is None else loss_of(self.net, own)
            loss.backward()
            values.append(loss.item())
            before = time.perf_counter()
            for bucket in buckets:
                bucket.load()
                used.update(parameter for parameter in bucket.parameters() if parameter.grad is not None)  # type: ignore[misc]
            loaded_s += time.perf_counter() - before
        middle = time.perf_counter()
        self.steps += 1
        results = self.each(self._reduce)
        for bucket, first, *others in zip(self.buckets[0], *results):
            for rank, other in enumerate(others, 1):
                if not torch.equal(first.view(torch.int32), other.view(torch.int32)):  # as bits: NaN is equal to itself, -0 not to 0
                    raise RuntimeError(f"workers 0 and {rank} have different mean gradients in bucket {bucket.index()}")
            if first is not bucket.buffer():
                bucket.set_buffer(first)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
                parameter.grad = gradient.clone() if parameter in used else None
        self.local_s += middle - start - loaded_s
        self.mean_s += time.perf_counter() - middle + loaded_s
        return values

    def _reduce(self, rank: int) -> list[torch.Tensor]:
        futures = [self.hooks[rank](bucket) for bucket in self.buckets[rank]]
        return [future.wait() for future in futures]
