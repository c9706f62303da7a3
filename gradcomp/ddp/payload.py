"""One rank's payload of one bucket, to bytes and back; its layout is the :class:`~gradcomp.ddp.plan.Plan`'s."""

import struct
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gradcomp.core import codec
from gradcomp.core.scan import Floats, Indices
from gradcomp.core.values import Scales, decode_values, encode_values, scale_of
from gradcomp.ddp.plan import BITMAPS, COUNT_BYTES, FIXED_HEADER_BYTES, SCALE_BYTES, Piece, Plan
from gradcomp.errors import DesyncError, PayloadError

VERSION = 1
FLUSH = 1
"""Header flag: this rank asks for a flush."""
REMOVE = 2
"""Header flag: this rank asks for the hook to turn dense."""

Bits = npt.NDArray[np.bool_]
T = TypeVar("T")


class Chosen(NamedTuple):
    """What one rank selected of one piece, before encoding."""

    indices: Indices
    """Flat in the piece, ascending; empty where the piece does not travel sparse."""
    values: Floats
    """fp32: at the indices of a sparse piece, all of a riding one."""
    wanted: int
    """Elements the rule selected, sent or not."""
    zero: bool
    """Whether the local gradient (not the residual) is zero everywhere."""
    finite: bool
    """Whether everything seen of residual + gradient is finite."""
    rest: bool = False
    """In a flush: whether something of it may stay in the residual."""


NOTHING = Chosen(np.empty(0, np.int64), np.empty(0, np.float32), 0, False, True)
"""No element of a piece."""


class Released(NamedTuple):
    """What one rank's payload gives every receiver of one piece: values at flat indices of the piece (None: at all of them)."""

    piece: Piece
    indices: Indices | None
    values: Floats


@dataclass(frozen=True, slots=True)
class Arrival:
    """One rank's decoded payload."""

    rank: int
    flags: int
    zero: Bits
    """A bit a piece: the sender's gradient was zero everywhere."""
    not_finite: Bits
    """A bit a piece: the sender's residual + gradient was not finite."""
    rest: Bits
    """A bit a piece: in a flush, something of the sender's may stay in its residual."""
    wanted: dict[str, int]
    """By name, for each counted piece."""
    released: list[Released]


def fixed_header(plan: Plan, step: int, flags: int) -> bytes:
    """The first ``FIXED_HEADER_BYTES`` of a payload."""
    return struct.pack("<BBHI", VERSION, flags, len(plan.pieces) & 0xFFFF, step & 0xFFFFFFFF)


def pack(plan: Plan, step: int, flags: int, chosen: list[Chosen]) -> codec.Bytes:
    """Write a payload of exactly ``plan.payload_bytes``; ``chosen`` is in the order of ``plan.pieces``."""
    by_name = dict(zip((piece.name for piece in plan.pieces), chosen))
    sparse = [by_name[piece.name] for piece in plan.sparse]
    sections = [
        np.frombuffer(fixed_header(plan, step, flags), np.uint8),
        np.packbits([part.zero for part in chosen], bitorder="little"),
        np.packbits([not part.finite for part in chosen], bitorder="little"),
        np.packbits([part.rest for part in chosen], bitorder="little"),
    ]
    counts = [(by_name[piece.name].indices.size, by_name[piece.name].wanted) for piece in plan.counted]
    sections.append(np.asarray(counts, "<u4").reshape(-1).view(np.uint8))
    scales = np.array([scale_of(part.values, plan.form) for part in sparse], "<f4")
    if plan.form.scaled:
        sections.append(scales.view(np.uint8))
    if plan.sparse:
        indices = np.concatenate([part.indices + base for part, base in zip(sparse, plan.bases)])
        sections.append(codec.encode_indices(indices, plan.universe, plan.capacity))
        sizes = [part.indices.size for part in sparse]
        values = encode_values(np.concatenate([part.values for part in sparse]), plan.form, _by_value(plan, scales, sizes))
        sections += [values, np.zeros(plan.form.size(plan.capacity) - values.size, np.uint8)]
    sections += [encode_values(by_name[piece.name].values, plan.riding) for piece in plan.rides]
    payload = np.concatenate(sections)
    if payload.size != plan.payload_bytes:
        raise PayloadError(f"a payload of {payload.size} bytes was packed where the plan says {plan.payload_bytes}")
    return payload


def read_header(plan: Plan, step: int, rank: int, data: codec.Bytes) -> tuple[Arrival, dict[str, int], Scales]:
    """What a rank's header says, without anything released; by name, the elements sent; the scale of each sparse piece.

    Args:
        data: at least the header's bytes.

    Raises:
        PayloadError: another version.
        DesyncError: the sender is at another step or has another number of parameters in the bucket.
    """
    version, flags, num_pieces, sent_step = struct.unpack("<BBHI", data[:FIXED_HEADER_BYTES].tobytes())
    if version != VERSION:
        raise PayloadError(f"rank {rank} sent a payload of version {version}; this gradcomp reads version {VERSION}")
    if (num_pieces, sent_step) != (len(plan.pieces) & 0xFFFF, step & 0xFFFFFFFF):
        raise DesyncError(
            f"rank {rank} sent step {sent_step} of a bucket of {num_pieces} parameters where step {step} of {len(plan.pieces)} was due"
        )
    take = Reader(data, FIXED_HEADER_BYTES)
    bitmaps = np.unpackbits(take(BITMAPS * plan.bitmap_bytes).reshape(BITMAPS, -1), axis=1, bitorder="little").astype(bool)
    zero, not_finite, rest = bitmaps[:, : len(plan.pieces)]
    counts = take(COUNT_BYTES * len(plan.counted)).view("<u4").reshape(-1, 2).tolist()
    scales = take(SCALE_BYTES * len(plan.sparse)).view("<f4") if plan.form.scaled else np.zeros(len(plan.sparse), np.float32)
    wanted = {piece.name: count[1] for piece, count in zip(plan.counted, counts)}
    sent = {piece.name: count[0] for piece, count in zip(plan.counted, counts)}
    return Arrival(rank, flags, zero, not_finite, rest, wanted, []), sent, scales


def unpack(plan: Plan, step: int, rank: int, data: codec.Bytes) -> Arrival:
    """Parse and check one rank's payload; only true counts are read, never padding.

    Raises:
        PayloadError: another version, or indices that are not what the header announces.
        DesyncError: as :func:`read_header`.
    """
    arrival, sent, scales = read_header(plan, step, rank, data)
    take, released = Reader(data, plan.header_bytes), arrival.released
    if plan.sparse:
        sizes = [sent[piece.name] for piece in plan.sparse]
        indices = codec.decode_indices(take(codec.index_bytes(plan.universe, plan.capacity)), plan.universe, plan.capacity, sum(sizes))
        room = take(plan.form.size(plan.capacity))
        values = decode_values(room[: plan.form.size(sum(sizes))], plan.form, sum(sizes), _by_value(plan, scales, sizes))
        edges = np.searchsorted(indices, plan.bases)
        for piece, base, low, high in zip(plan.sparse, plan.bases, edges, edges[1:]):
            if high - low != sent[piece.name]:
                raise PayloadError(f"rank {rank} announced {sent[piece.name]} elements of {piece.name} and sent {high - low}")
            own = indices[low:high]
            own -= base
            released.append(Released(piece, own, _saturated(values[low:high], piece)))
    for piece in plan.rides:
        values = decode_values(take(plan.riding.size(piece.numel)), plan.riding, piece.numel)
        released.append(Released(piece, None, _saturated(values, piece)))
    return arrival


def _by_value(plan: Plan, scales: Scales, sizes: list[int]) -> Scales | float:
    """The scale of each value, where the format has scales."""
    return np.repeat(scales, sizes) if plan.form.scaled else 0.0


def _saturated(values: Floats, piece: Piece) -> Floats:
    """Values within the gradient's own dtype, on every rank alike, so that no mean of them overflows it; the sender keeps the rest."""
    limit = torch.finfo(piece.dtype).max
    return values.clip(-limit, limit) if piece.dtype.itemsize < 4 else values


def fault_in(plan: Plan, arrivals: list[Arrival], *, ring_finite: bool) -> str | None:
    """Why a bucket makes its step a bad one, the same on every rank; None where it is fine."""
    for arrival in arrivals:
        for piece, not_finite in zip(plan.pieces, arrival.not_finite):
            if not_finite:
                return f"rank {arrival.rank}: the gradient of {piece.name} (with its residual) is not finite"
    names = ", ".join(piece.name for piece in plan.rings)
    return None if ring_finite else f"the reduced gradient of a dense parameter is not finite (one of: {names})"


class Reader(Generic[T]):
    """Takes section after section of a payload, or of rows of payloads, arrays or tensors: views, which are not aligned."""

    def __init__(self, data: T, start: int) -> None:
        self._data: Any = data
        self._at = start

    def __call__(self, size: int) -> T:
        """The next ``size`` bytes, of each row."""
        start, self._at = self._at, self._at + size
        taken: T = self._data[..., start : self._at]
        return taken
