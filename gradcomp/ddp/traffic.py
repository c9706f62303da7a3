"""What really went over the wire: counters that the exchange and the hook add to, and the frozen snapshot that users read."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


def ring_bytes(world_size: int, num_bytes: int) -> int:
    """Bytes one rank puts on the wire for a ring all-reduce of ``num_bytes``: ``2(W-1)/W * B``."""
    return 2 * (world_size - 1) * num_bytes // world_size


def gather_bytes(world_size: int, num_bytes: int) -> int:
    """Bytes one rank puts on the wire for an all-gather of ``num_bytes`` a rank: ``(W-1) * B``."""
    return (world_size - 1) * num_bytes


class Counted(Protocol):
    """A bucket of a completed step."""

    plan: Any
    """Its :class:`~gradcomp.ddp.plan.Plan`."""

    @property
    def dense_bytes(self) -> int:
        """What plain DDP would have sent."""

    @property
    def elements(self) -> int:
        """Gradient elements reduced."""

    @property
    def sent(self) -> dict[str, int]:
        """By parameter, the elements that this rank sent."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One rank's traffic since registration, counted from the bytes handed to collectives. Counters sum over steps.

    Attributes:
        steps: synchronised backward passes completed.
        dense_bytes: what plain DDP would have sent in the gradients' own dtypes: ``2(W-1)/W * B`` a bucket.
        payload_bytes: this rank's encoded buffers, headers and padding included, once.
        sent_bytes: put on the wire by this rank: ``(W-1) * payload`` for an all-gather, ``2(W-1)/W * B`` for a ring all-reduce;
            headers, padding, dense parameters, digests and dense steps included.
        received_bytes: the same, received.
        ratio: ``dense_bytes / sent_bytes``, higher is better; 1.0 where nothing was sent (one rank).
        density: elements sent over all elements; 0.0 before the first step.
        select_s: seconds spent accumulating and selecting.
        encode_s: seconds spent encoding.
        exchange_s: seconds from issue to completion of collectives, summed over buckets; overlaps with everything else.
            0 on CUDA, where the other seconds are the host's.
        decode_s: seconds spent decoding, updating residuals and filling the buckets.
        world_size: W; 0 before the process group is known.
        elements: gradient elements reduced, summed over steps.
        sparse_parameters: parameters that travelled sparse in the last step.
        parameters: parameters reduced in the last step.
        bad_steps: steps that were refused because of a non-finite gradient; part of ``steps``.
    """

    steps: int
    dense_bytes: int
    payload_bytes: int
    sent_bytes: int
    received_bytes: int
    ratio: float
    density: float
    select_s: float
    encode_s: float
    exchange_s: float
    decode_s: float
    world_size: int
    elements: int
    sparse_parameters: int
    parameters: int
    bad_steps: int

    def ratio_against(self, bytes_per_element: int) -> float:
        """Wire bytes of a ring all-reduce with so many bytes an element (4 for fp32, 2 for bf16) over the bytes sent."""
        if not self.sent_bytes:
            return 1.0
        return ring_bytes(self.world_size, bytes_per_element * self.elements) / self.sent_bytes

    def __str__(self) -> str:
        if not self.steps:
            return "gradcomp: the hook has not run yet: no synchronised backward pass has gone through it"
        step_ms = {name: 1e3 * getattr(self, f"{name}_s") / self.steps for name in ("select", "encode", "decode", "exchange")}
        spent = ", ".join(f"{name} {value:.2f}" for name, value in step_ms.items() if name != "exchange")
        busy_ms = sum(step_ms.values()) - step_ms["exchange"]
        received, payload = _size(self.received_bytes), _size(self.payload_bytes)
        sparse = f"{self.sparse_parameters} of {self.parameters} parameters sparse"
        lines = [
            f"gradcomp traffic of one rank of {self.world_size}, {self.steps:,} steps",
            f"  sent       {_size(self.sent_bytes):>11}   received {received}, encoded payload {payload}",
            f"  plain DDP  {_size(self.dense_bytes):>11}   in the gradients' own dtypes",
            f"  ratio      {self.ratio_against(4):>10.1f}x   against fp32",
            f"             {self.ratio_against(2):>10.1f}x   against bf16",
            f"  density    {100 * self.density:>10.3g}%   of the elements sent; {sparse}",
            f"  time       {busy_ms:>8.2f} ms   a step: {spent}; exchange {step_ms['exchange']:.2f}, overlapping",
        ]
        if self.world_size == 1:
            lines.append("  one rank: nothing has to be sent")
        elif not self.sparse_parameters:
            lines.append("  no parameter travelled sparse in the last step: dense by their rules, by cost, by a flush or a removal")
        if self.bad_steps:
            lines.append(f"  {self.bad_steps} step{'s' if self.bad_steps > 1 else ''} refused: a gradient was not finite")
        return "\n".join(lines)


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"


class Counters:
    """The running sums behind :class:`Traffic`. Callbacks of several threads add to them under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        counts = ("steps", "bad_steps", "dense_bytes", "payload_bytes", "sent_bytes", "received_bytes", "elements", "sent_elements")
        seconds = ("select_s", "encode_s", "exchange_s", "decode_s")
        self._sums: dict[str, float] = dict.fromkeys(counts, 0) | dict.fromkeys(seconds, 0.0)
        self.world_size = 0
        self._last = (0, 0)

    def add(self, **amounts: float) -> None:
        """Add to the named sums."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to the named sum."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(**{name: time.perf_counter() - start})

    def finish_step(self, flights: Iterable[Counted], *, bad: bool) -> dict[str, float]:
        """Count a completed step of these buckets; by parameter, the fraction of it that was sent."""
        sparse = 0
        densities: dict[str, float] = {}
        for flight in flights:
            sent, pieces = flight.sent, flight.plan.pieces
            self.add(
                dense_bytes=flight.dense_bytes,
                payload_bytes=flight.plan.payload_bytes,
                elements=flight.elements,
                sent_elements=sum(sent.values()),
            )
            sparse += len(flight.plan.sparse)
            densities |= {piece.name: sent[piece.name] / max(1, piece.numel) for piece in pieces}
        self.add(steps=1, bad_steps=int(bad))
        self._last = (sparse, len(densities))
        return densities

    def snapshot(self) -> Traffic:
        """The sums as they are now."""
        with self._lock:
            sums = dict(self._sums)
        dense, sent, elements = int(sums["dense_bytes"]), int(sums["sent_bytes"]), int(sums["elements"])
        return Traffic(
            steps=int(sums["steps"]),
            dense_bytes=dense,
            payload_bytes=int(sums["payload_bytes"]),
            sent_bytes=sent,
            received_bytes=int(sums["received_bytes"]),
            ratio=dense / sent if sent else 1.0,
            density=sums["sent_elements"] / max(1, elements),
            select_s=sums["select_s"],
            encode_s=sums["encode_s"],
            exchange_s=sums["exchange_s"],
            decode_s=sums["decode_s"],
            world_size=self.world_size,
            elements=elements,
            sparse_parameters=self._last[0],
            parameters=self._last[1],
            bad_steps=int(sums["bad_steps"]),
        )
