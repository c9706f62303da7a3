"""The only caller of collectives. Every byte that gradcomp sends is counted here.

Collectives are issued by the hook, in bucket order, on the thread that runs the backward pass; never inside a callback of a future,
where gloo deadlocks or crosses its peers.
"""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradcomp.ddp.lastcalls import at_exit_wait_for
from gradcomp.ddp.traffic import Counters, gather_bytes, ring_bytes

# torch 2.13 renames the flat gather and deprecates the old name.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

CPU = torch.device("cpu")

COO_METADATA_BYTES = 72
"""What gloo's sparse all-reduce gathers first: nine 64-bit numbers."""


class _OnDevice(torch.futures.Future[torch.Tensor]):
    """A collective of CUDA tensors. Whoever waits for it waits on its own stream, which gloo's futures do not see to."""

    def __init__(self, work: Any, result: torch.Tensor) -> None:
        super().__init__()
        self._work = work
        self._result = result

    def wait(self) -> torch.Tensor:
        """The result."""
        self._work.wait()
        return self._result


class Exchange:
    """Collectives of one process group, counted.

    Args:
        group: the process group; it must exist already.
        counters: where bytes and seconds are added.
        device: where the gradients are, and so what is exchanged.
    """

    def __init__(self, group: dist.ProcessGroup, counters: Counters, device: torch.device = CPU) -> None:
        self.group = group
        self._counters = counters
        self._device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        counters.world_size = self.world_size

    def gather(self, payload: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start an all-gather of one payload a rank.

        Args:
            payload: uint8 [B], the same B on every rank, on the gradients' device.

        Returns:
            A future of uint8 [W, B]; its callbacks run on the back end's thread.

        Communication:
            One all-gather, ``(W-1) * B`` bytes sent and received a rank.
        """
        out = torch.empty(self.world_size * payload.numel(), dtype=torch.uint8, device=payload.device)
        size = gather_bytes(self.world_size, payload.numel())
        start = time.perf_counter()
        work = _all_gather_flat(out, payload, group=self.group, async_op=True)
        self._counters.add(sent_bytes=size, received_bytes=size)
        # The gloo future holds a list of its own: close over the output instead.
        return self._timed(work, start, out.view(self.world_size, -1))

    def ring(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start an all-reduce (sum) of ``tensor`` in place.

        Returns:
            A future of the same tensor.

        Mutates: ``tensor``.

        Communication:
            One ring all-reduce, ``2(W-1)/W * bytes`` sent and received a rank.
        """
        size = ring_bytes(self.world_size, tensor.numel() * tensor.element_size())
        start = time.perf_counter()
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        self._counters.add(sent_bytes=size, received_bytes=size)
        return self._timed(work, start, tensor)

    def coo_bytes(self, tensor: torch.Tensor) -> int:
        """Bytes one rank puts on the wire for :meth:`ring_coo`."""
        indices, values = tensor._indices(), tensor._values()
        return gather_bytes(self.world_size, COO_METADATA_BYTES + 8 * indices.numel() + values.element_size() * values.numel())

    def ring_coo(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start an all-reduce (sum) of a sparse COO tensor in place.

        Returns:
            A future of the same tensor, which is then coalesced.

        Mutates: ``tensor``.

        Communication:
            gloo gathers shapes, indices and values, each rank's as long as they are: on average over the ranks ``(W-1)`` times the
            bytes of ``tensor``, which is what is counted.
        """
        size = self.coo_bytes(tensor)
        start = time.perf_counter()
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        self._counters.add(sent_bytes=size, received_bytes=size)
        return self._timed(work, start, tensor)

    def gather_now(self, data: bytes) -> list[bytes]:
        """Gather the same number of bytes of every rank, waiting for them. Communication: as :meth:`gather`."""
        payload = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(self._device)
        return [row.numpy().tobytes() for row in self.gather(payload).wait().cpu()]

    def _timed(self, work: Any, start: float, result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        # The callback must not hold the group: a thread of the back end that lets go of a group's last reference has to wait for itself,
        # and aborts the process ("Resource deadlock avoided").
        counters = self._counters

        def finished(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()  # raises what the collective raised
            counters.add(exchange_s=time.perf_counter() - start)
            return result

        if result.is_cuda:
            return _OnDevice(work, result)
        chained: torch.futures.Future[torch.Tensor] = work.get_future().then(at_exit_wait_for(finished))
        return chained
