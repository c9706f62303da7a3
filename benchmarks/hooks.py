"""What a logical worker's hook is given, and the hooks: gradcomp's own, and its peers."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from crew import Future, Hub, LocalExchange, completed
from torch import nn

import gradcomp
from gradcomp.ddp.connection import Connection
from gradcomp.ddp.traffic import Counters


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

    def connect(self) -> Connection:
        """As :meth:`gradcomp.SparseState.connect`, without a process group."""
        if self._connected is None:
            self._connected = self._connect(LocalExchange(self._hub, self._rank, self._counters))  # type: ignore[arg-type]
        return self._connected

    @property
    def exchange(self) -> LocalExchange:
        """The worker's collectives, counted."""
        return self.connect().exchange  # type: ignore[return-value]

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
        return completed(buffer if reduced is buffer else buffer.copy_(reduced))


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
        return completed(bucket.buffer())

    def _means(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The means over the workers, by one all-reduce."""
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).mul_(1 / self.exchange.world_size)
        parts = torch.split(self.exchange.ring(flat).wait(), [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
