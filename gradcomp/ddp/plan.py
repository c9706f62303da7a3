"""How a bucket's parameters travel, and how many bytes that takes: known to every rank before anything is sent.

A parameter travels one of three ways, decided by the parameter, its history, the model and the world size, never by its bucket (but
for exact riders of a bucket that gathers nothing else: see :func:`without_needless_gather`):

* ``sparse``: selected elements, in the bucket's payload;
* ``ride``: all elements, in the bucket's payload (small ``Dense`` parameters, and scheduled ones while their density is 1);
* ``ring``: all elements, in the bucket's one ring all-reduce, in the gradient's own dtype.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from gradcomp.core import codec
from gradcomp.core.rules import AnyRule, TopK, is_dense, is_scheduled
from gradcomp.core.values import FORMATS, Format
from gradcomp.ddp.traffic import gather_bytes, ring_bytes

Travel: TypeAlias = Literal["sparse", "ride", "ring"]

ALLOWANCE = 16 * 1024
"""Bytes a rank may send for one riding parameter, and for all small parameters beyond what their ring all-reduces would take."""

FIXED_HEADER_BYTES = 8
BITMAPS = 3
COUNT_BYTES = 8
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """One parameter in a bucket."""

    name: str
    rule: AnyRule
    start: int
    """First element in the bucket."""
    numel: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    travel: Travel = "ring"
    capacity: int = 0
    """Elements of the payload kept for it."""
    tracked: bool = False
    """Whether it holds a residual, and so has a place in the header."""

    @property
    def stop(self) -> int:
        """One past the last element in the bucket."""
        return self.start + self.numel

    @property
    def sized_by_history(self) -> bool:
        """Whether its capacity follows what the ranks wanted to send: every rule but ``TopK`` and the dense ones."""
        return not is_dense(self.rule) and type(self.rule) is not TopK

    def part(self, buffer: torch.Tensor) -> torch.Tensor:
        """The piece's elements of a bucket's buffer, flat: a view."""
        return buffer[self.start : self.stop]

    def shaped(self, buffer: torch.Tensor) -> torch.Tensor:
        """The piece's elements of a bucket's buffer, in the parameter's shape: a view."""
        return self.part(buffer).as_strided(self.shape, self.stride)


def capacity_for(numel: int, wanted: int) -> int:
    """Elements kept for a parameter of which the rank that wanted most wanted ``wanted``: a quarter more, in steps of 64."""
    return min(numel, max(64, -(-wanted * 5 // (4 * 64)) * 64))


def payload_share(numel: int, capacity: int, form: Format) -> int:
    """Bytes of payload that a sparse parameter takes by itself, header aside."""
    return codec.index_bytes(numel, capacity) + form.size(capacity)


class Routing:
    """How each parameter of a model travels at one world size.

    A second collective for a few bytes does not pay: small parameters stay in the payload even where a ring all-reduce would take
    fewer bytes, as long as what that costs, at worst, sums to at most ``ALLOWANCE`` over the model (so over any bucket too).

    Args:
        parameters: (name, rule, elements, dtype) of every parameter of the model, in the model's order.
        values: value format of payloads.
        fallback: ``dense`` or ``never``.
        world_size: W.
    """

    def __init__(self, parameters: Iterable[tuple[str, AnyRule, int, torch.dtype]], *, values: str, fallback: str, world_size: int) -> None:
        self._form = FORMATS[values]
        self._riding = FORMATS[self._form.riding]
        self._fallback = fallback
        self._world_size = world_size
        self._small = self._choose_small(parameters)

    def _choose_small(self, parameters: Iterable[tuple[str, AnyRule, int, torch.dtype]]) -> frozenset[str]:
        """Names of the parameters that are in the payload whatever happens."""
        left = ALLOWANCE
        small = []
        for name, rule, numel, dtype in parameters:
            if is_dense(rule):
                gathered = gather_bytes(self._world_size, self._riding.size(numel))
                # fp64 never rides: no value format holds it, and a dense parameter should lose nothing it need not lose.
                fits = gathered <= ALLOWANCE and dtype.itemsize <= 4
            else:
                gathered = gather_bytes(self._world_size, payload_share(numel, self._most(rule, numel), self._form))
                fits = True
            excess = max(0, gathered - ring_bytes(self._world_size, numel * dtype.itemsize))
            if fits and excess <= left:
                small.append(name)
                left -= excess
        return frozenset(small)

    @staticmethod
    def _most(rule: AnyRule, numel: int) -> int:
        """The largest capacity that a rule can lead to."""
        return rule.count(numel) if isinstance(rule, TopK) and not is_scheduled(rule) else numel

    def route(self, name: str, rule: AnyRule, numel: int, dtype: torch.dtype, history: int | None) -> tuple[Travel, int]:
        """(travel, elements of payload) of a parameter; ``history`` is its capacity where that follows from history."""
        if is_dense(rule):
            return ("ride", numel) if name in self._small else ("ring", 0)
        capacity = self._most(rule, numel) if history is None else history
        gathered = gather_bytes(self._world_size, payload_share(numel, capacity, self._form))
        pays = gathered <= ring_bytes(self._world_size, numel * dtype.itemsize)
        return ("sparse", capacity) if pays or name in self._small or self._fallback == "never" else ("ring", 0)

    def keeps_rest(self, travel: Travel, dtype: torch.dtype) -> bool:
        """Whether travelling so leaves anything behind: unsent elements, or what the value format rounds away."""
        return travel == "sparse" or (travel == "ride" and not self._riding.holds(dtype))


def ring_limit(dtype: torch.dtype) -> float | None:
    """The largest magnitude of residual + gradient that a rank puts into a ring all-reduce in half precision; None for wider dtypes.

    A little below what the dtype holds: W roundings of 1/W of it must not add up to more than all of it.
    """
    return torch.finfo(dtype).max * 31 / 32 if dtype.itemsize < 4 else None


def without_needless_gather(pieces: list[Piece], values: str) -> list[Piece]:
    """The pieces, all by the ring where fp32 riders are all that would be gathered: plain DDP's one all-reduce, bit for bit."""
    if values != "fp32" or any(p.tracked or p.sized_by_history or p.travel == "sparse" for p in pieces):
        return pieces
    return [replace(piece, travel="ring", capacity=0) for piece in pieces]


class Plan:
    """One bucket's layout for one step. Ranks with equal plans send payloads of equal size.

    The payload is, in this order: a header (version, flags, number of parameters, step; a bit a parameter for "gradient all zero",
    one for "not finite", one for "some of it stays back from this flush"; what was sent and wanted of each counted parameter; the
    scale of each sparse one if the format has scales), the indices of all sparse parameters as one list, their values, the riding
    parameters' values.

    Attributes:
        pieces: every parameter of the bucket, in its order.
        form: value format of sparse pieces.
        riding: value format of riding pieces.
        header: whether a payload is gathered; without one the bucket is plain DDP's all-reduce.
        flush: every residual is sent whole in this step.
        report: every piece is checked for non-finite elements and its header says so.
        momentum: every piece has a velocity, and its header says whether it has a gradient.
        sparse, rides, rings: the pieces by the way they travel.
        counted: the pieces whose sent and wanted counts are in the header.
        bases: first element of each sparse piece in the payload's index space, and the space's size at the end.
        constants: numbers of the plan that have been copied to a device.
    """

    def __init__(self, pieces: Iterable[Piece], values: str, *, flush: bool, report: bool, momentum: bool = False) -> None:
        self.pieces = tuple(pieces)
        self.form = FORMATS[values]
        self.riding = FORMATS[self.form.riding]
        self.flush = flush
        self.report = report
        self.momentum = momentum
        self.header = report or momentum or any(p.tracked or p.sized_by_history or p.travel != "ring" for p in self.pieces)
        self.sparse = tuple(piece for piece in self.pieces if piece.travel == "sparse")
        self.rides = tuple(piece for piece in self.pieces if piece.travel == "ride")
        self.rings = tuple(piece for piece in self.pieces if piece.travel == "ring")
        self.counted = tuple(piece for piece in self.pieces if piece.travel == "sparse" or piece.sized_by_history)
        self.constants: dict[tuple[torch.device, str], torch.Tensor] = {}
        self.bases = [0]
        for piece in self.sparse:
            self.bases.append(self.bases[-1] + piece.numel)

    @property
    def universe(self) -> int:
        """N of the payload's index list."""
        return self.bases[-1]

    @property
    def capacity(self) -> int:
        """K of the payload's index list."""
        return sum(piece.capacity for piece in self.sparse)

    @property
    def bitmap_bytes(self) -> int:
        """Bytes of one bit a parameter."""
        return -(-len(self.pieces) // 8)

    @property
    def header_bytes(self) -> int:
        """Bytes before the indices."""
        scales = SCALE_BYTES * len(self.sparse) if self.form.scaled else 0
        return FIXED_HEADER_BYTES + BITMAPS * self.bitmap_bytes + COUNT_BYTES * len(self.counted) + scales

    @property
    def payload_bytes(self) -> int:
        """Bytes of one rank's payload; 0 where none is gathered."""
        if not self.header:
            return 0
        ridden = sum(piece.numel for piece in self.rides)
        indices = codec.index_bytes(self.universe, self.capacity)
        return self.header_bytes + indices + self.form.size(self.capacity) + self.riding.size(ridden)
