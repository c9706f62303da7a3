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

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from crew import Crew, Hub
from hooks import Bucket, MakeHook, in_buckets
from torch import nn

import gradcomp
from gradcomp.ddp.traffic import gather_bytes, ring_bytes

T = TypeVar("T")


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
