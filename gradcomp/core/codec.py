"""Selection <-> bytes.

**Indices** are written with Elias-Fano coding. K strictly ascending indices below N become the non-decreasing ``x[i] - i``; of each
the lowest L bits are stored as they are, and the rest as a bitmap in which bit ``(x[i] - i >> L) + i`` is set. The size,
``K*L + K + (N-K >> L)`` bits at the best L, depends on N and K alone, so every rank knows it beforehand; L = 0 is the plain bitmap
of N bits, chosen by itself where that is smaller. Measured cost over the bound ``log2 C(N, K)``: at most 0.59 bit an index.

**Values** are written as :mod:`gradcomp.core.values` says.

Layout of a payload of :func:`encode`, little-endian: ``b"GC"``, version, value format, dtype, ndim (one byte each), ndim uint64
sizes, K as uint64, the scale as fp32 (0 for formats without one), the index bits (low bits, then bitmap, one bit string), the values.

Reference:
    Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 1974; Vigna, "Quasi-succinct
    indices", WSDM 2013 (the bound and the choice of L; here the strict order is used too, which saves ``K >> L`` bits).
"""

import math
import struct
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from gradcomp.core.compiled import NOT_ASCENDING, WIDEST, Kernels, kernels
from gradcomp.core.scan import Indices
from gradcomp.core.selection import Selection
from gradcomp.core.values import FORMATS, check_values, decode_values, encode_values, scale_of
from gradcomp.errors import PayloadError

Bytes = npt.NDArray[np.uint8]

_VERSION = 1
_MAGIC = b"GC"
_TENSOR_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@lru_cache(maxsize=4096)
def low_bits(numel: int, count: int) -> int:
    """L, the number of low bits an index that makes the index bits fewest."""
    if not 0 <= count <= numel:
        raise ValueError(f"count must be in 0..{numel}, got {count}")
    return min(range(max(1, numel.bit_length())), key=lambda low: count * low + count + (numel - count >> low))


def index_bits(numel: int, count: int) -> int:
    """Bits that ``count`` indices below ``numel`` take."""
    low = low_bits(numel, count)
    return count * low + count + (numel - count >> low) if count else 0


def index_bytes(numel: int, count: int) -> int:
    """Bytes that ``count`` indices below ``numel`` take."""
    return -(-index_bits(numel, count) // 8)


def encode_indices(indices: Indices, numel: int, count: int) -> Bytes:
    """Write strictly ascending ``indices`` (at most ``count``, each below ``numel``) into ``index_bytes(numel, count)`` bytes."""
    low = low_bits(numel, count)
    fast = kernels() if low <= WIDEST else None
    if fast is not None:
        out = np.zeros(index_bytes(numel, count), np.uint8)
        fast.write_bits(np.ascontiguousarray(indices, np.int64), low, count, out)
        return out
    bits = np.zeros(index_bits(numel, count), np.uint8)
    rest = indices - np.arange(indices.size)
    if low:
        planes = (rest & ((1 << low) - 1)).astype("<u8").view(np.uint8).reshape(-1, 8)[:, : -(-low // 8)]
        bits[: indices.size * low] = np.unpackbits(planes, axis=1, count=low, bitorder="little").ravel()
    bits[count * low + (rest >> low) + np.arange(indices.size)] = 1
    return np.packbits(bits, bitorder="little")


def decode_indices(data: Bytes, numel: int, count: int, sent: int) -> Indices:
    """Read ``sent`` of ``count`` indices back; the inverse of :func:`encode_indices`.

    Raises:
        PayloadError: the bytes do not hold ``sent`` strictly ascending indices below ``numel``.
    """
    low = low_bits(numel, count)
    size = index_bits(numel, count)
    if data.size != -(-size // 8):
        raise PayloadError(f"{count} indices below {numel} take {-(-size // 8)} bytes, got {data.size}")
    if sent > count:
        raise PayloadError(f"{sent} indices were announced where there is room for {count}")
    fast = kernels() if count and low <= WIDEST else None
    if fast is not None:
        return _decode_compiled(fast, data, numel, count, sent)
    bits = np.unpackbits(data, count=size, bitorder="little")
    places = np.flatnonzero(bits[count * low :])
    if places.size != sent:
        raise PayloadError(f"the index bitmap holds {places.size} indices where {sent} were announced")
    order = np.arange(sent)
    rest = places - order << low
    if low:
        width = -(-low // 8)
        planes = np.zeros((sent, 8), np.uint8)
        planes[:, :width] = np.packbits(bits[: sent * low].reshape(sent, low), axis=1, bitorder="little")
        rest |= planes.view("<u8").ravel().astype(np.int64)
    indices: Indices = rest + order
    if sent and (int(indices[0]) < 0 or int(indices[-1]) >= numel or bool((indices[1:] <= indices[:-1]).any())):
        raise PayloadError(f"the indices are not strictly ascending below {numel}")
    return indices


def _decode_compiled(fast: Kernels, data: Bytes, numel: int, count: int, sent: int) -> Indices:
    indices = np.empty(sent + 16, np.int64)  # room for a byte of the bitmap more than there should be
    found = fast.read_bits(data, low_bits(numel, count), count, numel, indices)
    if found == NOT_ASCENDING:
        raise PayloadError(f"the indices are not strictly ascending below {numel}")
    if found != sent:
        raise PayloadError(f"the index bitmap holds {'more' if found > sent else found} indices where {sent} were announced")
    return indices[:sent]


def encode(selection: Selection, values: str = "bf16") -> torch.Tensor:
    """Write a selection as bytes.

    Args:
        selection: K of N elements; on any device (it is copied to the CPU).
        values: value format, one of ``fp32``, ``bf16``, ``fp16``, ``int8``, ``sign``.

    Returns:
        A new uint8 CPU tensor of ``18 + 8*ndim + index_bytes(N, K) + ceil(K * value bits / 8)`` bytes.

    Raises:
        ValueError: an unknown format, a dtype that has no code, a value that is not finite, or a selection whose indices are not
            strictly ascending, not within its shape, or not as many as its values.
    """
    form = FORMATS[check_values(values)]
    if not isinstance(selection, Selection):
        raise ValueError(f"selection must be a Selection, as compress() returns it, got a {type(selection).__name__}")
    if selection.dtype not in _TENSOR_DTYPES:
        raise ValueError(f"selection.dtype must be one of {_TENSOR_DTYPES}, got {selection.dtype}")
    exact = selection.values.detach().cpu().to(torch.float64 if selection.values.dtype.itemsize > 4 else torch.float32).numpy()
    if not np.isfinite(exact).all():
        raise ValueError(f"selection.values must be finite, got {int((~np.isfinite(exact)).sum())} that are not")
    numel, count = selection.shape.numel(), selection.indices.numel()
    indices = selection.indices.detach().cpu().numpy()
    if count != selection.values.numel():
        raise ValueError(f"selection must have as many indices as values, got {count} and {selection.values.numel()}")
    if count and (indices[0] < 0 or indices[-1] >= numel or bool((np.diff(indices) <= 0).any())):
        raise ValueError(f"selection.indices must be strictly ascending in 0..{numel - 1}")
    scale = scale_of(exact, form)
    codes = (_VERSION, list(FORMATS).index(values), _TENSOR_DTYPES.index(selection.dtype), len(selection.shape))
    header = struct.pack(f"<2s4B{len(selection.shape)}QQf", _MAGIC, *codes, *selection.shape, count, scale)
    body = encode_indices(indices, numel, count)
    return torch.from_numpy(np.concatenate([np.frombuffer(header, np.uint8), body, encode_values(exact, form, scale)]))


def decode(payload: torch.Tensor) -> Selection:
    """Read a selection back; the inverse of :func:`encode` but for the rounding of its values to the format.

    Args:
        payload: uint8 [B], as :func:`encode` wrote it.

    Returns:
        A :class:`Selection` on the CPU that aliases nothing, its values in the original dtype (saturating where the format
        rounds a value out of that dtype's range).

    Raises:
        PayloadError: truncated, too long, damaged, or not written by this codec.
    """
    if not isinstance(payload, torch.Tensor) or payload.dtype != torch.uint8 or payload.dim() != 1:
        what = f"{payload.dtype} of shape {tuple(payload.shape)}" if isinstance(payload, torch.Tensor) else f"a {type(payload).__name__}"
        raise PayloadError(f"payload must be a 1-D uint8 tensor, got {what}")
    data = payload.detach().cpu().contiguous().numpy()
    if data.size < 6 or data[:2].tobytes() != _MAGIC:
        raise PayloadError(f"not a gradcomp payload: {data.size} bytes that do not begin with {_MAGIC!r}")
    version, form_code, dtype_code, ndim = (int(code) for code in data[2:6])
    if version != _VERSION:
        raise PayloadError(f"payload version {version}; this gradcomp reads version {_VERSION}")
    if form_code >= len(FORMATS) or dtype_code >= len(_TENSOR_DTYPES):
        raise PayloadError(f"payload has unknown value format {form_code} or dtype {dtype_code}")
    start = 6 + 8 * ndim + 8 + 4
    if data.size < start:
        raise PayloadError(f"payload is truncated: {data.size} bytes, the header alone takes {start}")
    *shape, count, scale = struct.unpack(f"<{ndim}QQf", data[6:start].tobytes())
    numel = math.prod(shape)
    if numel >= 1 << 63 or max(shape, default=0) >= 1 << 63 or count > numel:
        raise PayloadError(f"payload announces {count} elements of a tensor of shape {tuple(shape)}")
    if not (math.isfinite(scale) and scale >= 0):
        raise PayloadError(f"payload has the scale {scale}")
    form, dtype = list(FORMATS.values())[form_code], _TENSOR_DTYPES[dtype_code]
    split = start + index_bytes(numel, count)
    size = split + form.size(count)
    if data.size != size:
        raise PayloadError(f"payload must be {size} bytes for {count} elements of {numel}, got {data.size}")
    indices = torch.from_numpy(decode_indices(data[start:split], numel, count, count))
    values = torch.from_numpy(decode_values(data[split:], form, count, scale))
    if not bool(values.isfinite().all()):
        raise PayloadError("payload has values that are not finite")
    return Selection(indices, _into(values, dtype), torch.Size(shape), dtype)


def _into(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast, saturating: bf16 can round a finite fp16 or integer value out of its own range."""
    if dtype == torch.bool:
        return values != 0
    if dtype.is_floating_point:
        limit = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
        return values.clamp(-limit, limit).to(dtype)
    info = torch.iinfo(dtype)
    return values.to(torch.float64).clamp(info.min, info.max).round().to(dtype)
