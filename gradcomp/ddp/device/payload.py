"""Payloads of one bucket, to bytes and back, on the device; their layout is that of :mod:`gradcomp.ddp.payload`, bit for bit."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.core import codec, device
from gradcomp.core.device import Picked
from gradcomp.ddp.payload import Reader, fixed_header
from gradcomp.ddp.plan import COUNT_BYTES, FIXED_HEADER_BYTES, SCALE_BYTES, Piece, Plan
from gradcomp.errors import PayloadError


class Chosen(NamedTuple):
    """What one rank selected of one piece, before encoding; see :class:`gradcomp.ddp.payload.Chosen`."""

    picked: Picked | None
    """Of a sparse piece, its values in the gradient's units; of one that is only counted, without places."""
    ridden: Tensor | None
    """fp32 [N] of a riding piece, in the gradient's units."""
    zero: Tensor
    finite: Tensor
    rest: Tensor


class Received(NamedTuple):
    """What all ranks' payloads say of a bucket of N elements and P pieces.

    Attributes:
        zero: bool [W, P].
        not_finite: bool [W, P].
        places: W times int64 [K]: where in the bucket the values of the sparse pieces belong; N for padding.
        values: W times fp32 [K]; 0 in padding.
        rides: by riding piece, W times fp32 [n].
        intact: bool scalar; whether all of it can be right. (What is wrong is found out by the host, later, from the headers.)
    """

    zero: Tensor
    not_finite: Tensor
    places: list[Tensor]
    values: list[Tensor]
    rides: list[list[Tensor]]
    intact: Tensor


def sent_as(data: bytes, like: Tensor) -> Tensor:
    """Bytes on the device of ``like``: uint8 [B]. The host does not wait."""
    return _copied(torch.frombuffer(bytearray(data), dtype=torch.uint8), like)


def _copied(numbers: Tensor, like: Tensor) -> Tensor:
    return (numbers.pin_memory() if like.is_cuda else numbers).to(like.device, non_blocking=True)


def constants(plan: Plan, name: str, values: list[int], like: Tensor) -> Tensor:
    """Numbers of the plan on the device of ``like``, copied there once: int64."""
    key = (like.device, name)
    if key not in plan.constants:
        plan.constants[key] = _copied(torch.tensor(values, dtype=torch.int64, device="cpu"), like)
    return plan.constants[key]


def pack(plan: Plan, step: int, flags: int, chosen: list[Chosen], like: Tensor) -> Tensor:
    """A payload of ``plan.payload_bytes`` on the device of ``like``; ``chosen`` is in the order of ``plan.pieces``."""
    by_name = dict(zip((piece.name for piece in plan.pieces), chosen))
    counted = [_picked(by_name[piece.name]) for piece in plan.counted]
    counts = [count for part in counted for count in (_sent(part), part.wanted)]
    sections = [
        sent_as(fixed_header(plan, step, flags), like),
        device.pack_bits(torch.stack([part.zero for part in chosen])),
        device.pack_bits(~torch.stack([part.finite for part in chosen])),
        device.pack_bits(torch.stack([part.rest for part in chosen])),
    ]
    if counts:
        sections.append(torch.stack(counts).to(torch.int32).view(torch.uint8))
    if plan.sparse:
        sections += _pack_sparse(plan, [_picked(by_name[piece.name]) for piece in plan.sparse])
    for piece in plan.rides:
        ridden = by_name[piece.name].ridden
        if ridden is not None:
            sections.append(device.encode_values(ridden, plan.riding))
    payload = torch.cat(sections)
    if payload.numel() != plan.payload_bytes:
        raise PayloadError(f"a payload of {payload.numel()} bytes was packed where the plan says {plan.payload_bytes}")
    return payload


def _picked(part: Chosen) -> Picked:
    if part.picked is None:
        raise PayloadError("a piece whose elements are counted was not selected from")
    return part.picked


def _sent(part: Picked) -> Tensor:
    return part.wanted.clamp(max=part.indices.numel())


def _pack_sparse(plan: Plan, parts: list[Picked]) -> list[Tensor]:
    sent = torch.stack([_sent(part) for part in parts])
    indices = torch.cat([part.indices + base for part, base in zip(parts, plan.bases)])
    used = torch.cat([part.indices < piece.numel for piece, part in zip(plan.sparse, parts)])
    values = torch.cat([part.values for part in parts])
    if not plan.form.scaled:
        indices, values = device.gathered_first(used, indices, values)
        return [device.encode_indices(indices, sent.sum(), plan.universe), device.encode_values(values, plan.form)]
    scales = torch.stack([device.scale_of(part.values, count, plan.form) for part, count in zip(parts, sent)])
    by_value = torch.cat([scale.expand(part.values.numel()) for part, scale in zip(parts, scales)])
    indices, values, by_value = device.gathered_first(used, indices, values, by_value)
    encoded = device.encode_indices(indices, sent.sum(), plan.universe)
    return [scales.view(torch.uint8), encoded, device.encode_values(values, plan.form, by_value)]


def unpack(plan: Plan, step: int, gathered: Tensor, numel: int) -> Received:
    """Parse and check all ranks' payloads, uint8 [W, B], of a bucket of ``numel`` elements."""
    right = gathered[:, :FIXED_HEADER_BYTES] == sent_as(fixed_header(plan, step, 0), gathered)
    intact = right[:, :1].all() & right[:, 2:].all()  # all of it but the flags
    take = Reader(gathered, FIXED_HEADER_BYTES)
    zero, not_finite, _ = (device.unpack_bits(take(plan.bitmap_bytes), len(plan.pieces)).bool() for _ in range(3))
    counts = _read(take(COUNT_BYTES * len(plan.counted)), torch.int32).to(torch.int64) & 0xFFFFFFFF
    scales = _read(take(SCALE_BYTES * len(plan.sparse)), torch.float32) if plan.form.scaled else None
    sparse = [2 * at for at, piece in enumerate(plan.counted) if piece.travel == "sparse"]
    sent = counts.index_select(1, constants(plan, "sparse", sparse, gathered))  # a list would be copied, and waited for, every time
    encoded = take(codec.index_bytes(plan.universe, plan.capacity)) if plan.sparse else gathered[:, :0]
    written = take(plan.form.size(plan.capacity))
    places, values = [], []
    for rank in range(gathered.shape[0] if plan.sparse else 0):
        at, exact, fits = _unpack_sparse(plan, encoded[rank], written[rank], sent[rank], None if scales is None else scales[rank], numel)
        places.append(at)
        values.append(exact)
        intact = intact & fits
    rides = []
    for piece in plan.rides:
        rows = take(plan.riding.size(piece.numel))
        rides.append([_saturated(device.decode_values(row, plan.riding, piece.numel), piece) for row in rows])
    return Received(zero, not_finite, places, values, rides, intact)


def _read(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that lie anywhere in the rows: [W, bytes] -> [W, numbers]."""
    return rows.reshape(-1).clone().view(dtype).view(rows.shape[0], rows.shape[1] // dtype.itemsize)


def _unpack_sparse(
    plan: Plan, encoded: Tensor, written: Tensor, sent: Tensor, scales: Tensor | None, numel: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Places, values, and whether they can be right, of one rank."""
    indices, intact = device.decode_indices(encoded, sent.sum(), plan.universe, plan.capacity)
    bases = constants(plan, "bases", plan.bases, encoded)
    edges = torch.searchsorted(indices, bases)
    intact = intact & ((edges[1:] - edges[:-1]) == sent).all()
    of = torch.bucketize(indices, bases[1:], right=True)  # the piece; one more for padding
    shifts = [piece.start - base for piece, base in zip(plan.sparse, plan.bases)] + [numel - plan.universe]
    by_value = None if scales is None else torch.nn.functional.pad(scales, (0, 1))[of]
    values = device.decode_values(written, plan.form, plan.capacity, by_value)
    exact = _saturated(torch.where(indices < plan.universe, values, 0.0), plan.sparse[0])  # a bucket has one dtype
    return indices + constants(plan, f"shifts of {numel}", shifts, encoded)[of], exact, intact


def _saturated(values: Tensor, piece: Piece) -> Tensor:
    """As in :mod:`gradcomp.ddp.payload`."""
    limit = torch.finfo(piece.dtype).max
    return values.clamp(-limit, limit) if piece.dtype.itemsize < 4 else values
