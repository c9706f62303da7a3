"""One pass over a flat CPU tensor, in chunks that stay in the cache.

The tensor scanned is ``residual + unscale * data``: it is formed a chunk at a time, in fp32 (fp64 for fp64 and integer data scanned on its
own), and never stored. numpy does the work because its kernels on cached chunks are several times faster than torch's on one
thread; torch converts what numpy has no type for (bf16).
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradcomp.core.compiled import Kernels, kernels

CHUNK = 1 << 18
"""Elements a chunk: 1 MiB of fp32."""

Floats = npt.NDArray[np.floating]
Indices = npt.NDArray[np.int64]

_NOTHING = np.empty(0, np.float32)
_scratch = threading.local()


def _buffer(key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A chunk of scratch memory of this thread, kept between calls: fresh memory costs page faults."""
    held: dict[tuple[str, np.dtype], npt.NDArray[Any]] = _scratch.__dict__.setdefault("held", {})
    slot = (key, np.dtype(dtype))
    if slot not in held:
        held[slot] = np.zeros(CHUNK, dtype)
    return held[slot]


class Accumulation:
    """``acc = residual + unscale * data`` of one flat tensor, formed when asked for.

    Args:
        data: 1-D CPU tensor [N], any real dtype.
        residual: 1-D fp32 CPU tensor [N] or None for zeros. With a residual the sum is rounded to fp32; without one, fp64 and
            integer data are scanned as fp64 unless ``fp32`` is set.
        fp32: scan in fp32 whatever the data's dtype.
        unscale: what brings the data to the residual's units: 1 / loss scale. Exact for powers of two, else rounded once more.
    """

    def __init__(self, data: torch.Tensor, residual: torch.Tensor | None = None, *, fp32: bool = False, unscale: float = 1.0) -> None:
        self._data = data.detach()
        self._unscale = unscale
        self._zero: bool | None = None
        self._residual = None if residual is None else residual.numpy()
        narrow = fp32 or residual is not None or data.dtype in (torch.float32, torch.float16, torch.bfloat16)
        self.dtype = np.dtype(np.float32 if narrow else np.float64)
        direct = unscale == 1.0 and data.dtype == (torch.float32 if narrow else torch.float64)
        self._array: Floats | None = self._data.numpy() if direct else None  # without a detour through torch

    def __len__(self) -> int:
        return self._data.numel()

    def part(self, start: int, stop: int, step: int = 1) -> Floats:
        """Elements start:stop:step. Valid until the next call on this thread; may alias the data: do not write to it."""
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found by whoever looks for what is not finite
            return self._part(start, stop, step)

    def _part(self, start: int, stop: int, step: int = 1) -> Floats:
        residual = None if self._residual is None else self._residual[start:stop:step]
        if self._array is not None:
            values = self._array[start:stop:step]
            return values if residual is None else np.add(residual, values, out=self._room(values.size))
        data = self._data[start:stop:step]
        if self._unscale != 1.0:
            data = data.to(torch.float64 if data.dtype == torch.float64 else torch.float32) * self._unscale
        out = self._room(data.numel())
        if residual is not None and data.dtype == torch.float64:
            np.add(residual, data.numpy(), out=out, casting="same_kind", dtype=np.float64)  # rounds once
            return out
        torch.from_numpy(out).copy_(data)
        return out if residual is None else np.add(out, residual, out=out)

    def operands(self) -> Iterator[tuple[int, Floats, Floats]]:
        """(start, data, residual) whose sums are the tensor's elements in order; an empty residual is zero. As :meth:`part`."""
        if self._array is None or self._residual is None or not self._array.flags.c_contiguous:
            for start, values in self.chunks():
                yield start, np.ascontiguousarray(values), _NOTHING
        elif len(self):
            yield 0, self._array, self._residual

    def _room(self, size: int) -> Floats:
        return _buffer("part", self.dtype)[:size] if size <= CHUNK else np.empty(size, self.dtype)

    def take(self, indices: Indices) -> Floats:
        """The elements at ``indices``, in a new array."""
        at = torch.from_numpy(indices)
        residual = None if self._residual is None else torch.from_numpy(self._residual)[at]
        return Accumulation(self._data[at], residual, fp32=self.dtype == np.float32, unscale=self._unscale).whole()

    def chunks(self) -> Iterator[tuple[int, Floats]]:
        """(start, elements) over the whole tensor, in order."""
        for start in range(0, len(self), CHUNK):
            yield start, self.part(start, min(start + CHUNK, len(self)))

    def whole(self) -> Floats:
        """All elements in one new array."""
        out = np.empty(len(self), self.dtype)
        for start, values in self.chunks():
            out[start : start + values.size] = values
        return out

    def store(self) -> None:
        """Make the residual the sum. Mutates the residual."""
        if self._residual is None:
            raise ValueError("an accumulation without a residual has nowhere to be stored")
        residual = self._residual
        if self._array is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(residual, self._array, out=residual)
            return
        for start, values in self.chunks():
            residual[start : start + values.size] = values

    def leaves_nothing(self) -> bool:
        """Whether the residual is zero everywhere."""
        return self._residual is None or not self._residual.any()

    def is_zero(self) -> bool:
        """Whether the data (not the residual) is zero everywhere, as of the first call."""
        if self._zero is None:
            self._zero = self._is_zero()
        return self._zero

    def _is_zero(self) -> bool:
        stop = 1024  # then larger and larger parts: most end with the first
        start = 0
        while start < len(self):
            part = self._data[start:stop] if self._array is None else self._array[start:stop]
            if bool(part.any()):
                return False
            start, stop = stop, min(8 * stop, stop + CHUNK)
        return True


_ALL_TRUE = np.frombuffer(b"\x01" * 8, np.uint64)[0]


def flat_false(mask: npt.NDArray[np.bool_]) -> Indices:
    """Indices of the False bytes of ``mask``, whose length is a multiple of 8: first by words, then by the bytes of the words hit."""
    words = mask.view(np.uint64)
    hit = np.flatnonzero(words != _ALL_TRUE)
    local = np.flatnonzero(np.logical_not(words[hit].view(np.bool_)))
    indices: Indices = hit[local >> 3] * 8 + (local & 7)
    return indices


def above(acc: Accumulation, threshold: float) -> tuple[Indices, Floats]:
    """Indices (ascending) and values of the elements with ``not |x| <= threshold``: NaN is among them."""
    threshold = min(threshold, float(np.finfo(acc.dtype).max))  # an infinite element exceeds every threshold
    fast = kernels() if acc.dtype == np.float32 else None
    parts = _above(acc, threshold) if fast is None else _above_compiled(fast, acc, threshold)
    indices, found = zip(*parts) if len(acc) else ((), ())
    if not indices:
        return np.empty(0, np.int64), np.empty(0, acc.dtype)
    return np.concatenate(indices), np.concatenate(found)


def _above(acc: Accumulation, threshold: float) -> Iterator[tuple[Indices, Floats]]:
    below, inside = _buffer("below", np.bool_), _buffer("inside", np.bool_)
    for start, values in acc.chunks():
        size = values.size
        padded = -(-size // 8) * 8
        # Two comparisons with the sign are faster than one with the magnitude, and false for NaN.
        np.less_equal(values, threshold, out=below[:size])
        np.greater_equal(values, -threshold, out=inside[:size])
        np.logical_and(below[:size], inside[:size], out=inside[:size])
        inside[size:padded] = True
        local = flat_false(inside[:padded])
        yield local + start, values[local]


def _above_compiled(fast: Kernels, acc: Accumulation, threshold: float) -> Iterator[tuple[Indices, Floats]]:
    room, seen = _buffer("room", np.int64), _buffer("seen", np.float32)
    for start, data, residual in acc.operands():
        at = 0
        while at < data.size:
            count, at = fast.above(data, residual, threshold, at, room, seen)
            yield room[:count] + start, seen[:count].copy()


def keep_largest(indices: Indices, values: Floats, k: int) -> tuple[Indices, Floats]:
    """The k entries of largest magnitude, in their order; ties to the lowest index; NaN counts as infinite."""
    if indices.size <= k:
        return indices, values
    if k == 0:
        return indices[:0], values[:0]
    fast = kernels() if values.dtype == np.float32 else None
    if fast is not None:
        kept_indices, kept_values = np.empty(k, np.int64), np.empty(k, np.float32)
        fast.largest(indices, values, k, kept_indices, kept_values)
        return kept_indices, kept_values
    magnitude = np.abs(values)
    if not np.isfinite(magnitude.max()):  # NaN is the maximum of anything
        magnitude[np.isnan(magnitude)] = np.inf
    kth = np.partition(magnitude, magnitude.size - k)[magnitude.size - k]
    kept = magnitude > kth
    ties = np.flatnonzero(magnitude == kth)
    kept[ties[: k - int(kept.sum())]] = True
    return indices[kept], values[kept]


def _floor_guess(acc: Accumulation, k: int) -> float:
    """A magnitude that a little more than k elements probably exceed, from a strided sample. No random numbers are drawn."""
    numel = len(acc)
    if numel <= 4096 or k * 4 >= numel:
        return 0.0
    stride = max(1, numel // min(CHUNK, max(4096, numel // 256))) | 1
    sample = np.abs(acc.part(0, numel, stride))
    expected = k * sample.size / numel
    rank = int(1.05 * expected + 3 * expected**0.5) + 4
    if rank >= sample.size:
        return 0.0
    guess = float(np.partition(sample, sample.size - rank)[sample.size - rank])
    return guess if np.isfinite(guess) else 0.0


def top_k(acc: Accumulation, k: int) -> tuple[Indices, Floats]:
    """Indices (ascending) and values of the k largest magnitudes: exact, no zeros, ties to the lowest index.

    A sampled floor only decides how many candidates there are to choose from; where it leaves fewer than k it is lowered, then
    dropped, and the pass repeated. No sort, no full top-k: extra memory is one chunk and the candidates.
    """
    floor = _floor_guess(acc, k)
    for attempt in (floor, floor / 4, 0.0):
        indices, values = above(acc, attempt)
        if indices.size >= k or attempt == 0.0:
            break
    return keep_largest(indices, values, k)


def magnitudes(flat: torch.Tensor) -> torch.Tensor:
    """``|x|``, infinite for NaN; fp32 of what is narrower."""
    magnitude = flat.abs() if flat.dtype in (torch.float64, torch.int64) else flat.float().abs()
    return magnitude.masked_fill_(magnitude.isnan(), float("inf")) if magnitude.is_floating_point() else magnitude


def largest_mask(among: torch.Tensor, magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """The mask of the k largest magnitudes ``among`` the elements of a mask: all of those if there are fewer, ties to the lowest index.

    With torch operations alone, for tensors that are not on the CPU. No host sync.
    """
    if k == 0:
        return torch.zeros_like(among)
    candidates = magnitude.masked_fill(~among, -1)
    kth = torch.topk(candidates, k).values[-1]
    larger, equal = candidates > kth, (candidates == kth) & among
    order = equal.cumsum(0, dtype=torch.int32 if equal.numel() < 1 << 31 else torch.int64)
    chosen: torch.Tensor = larger | (equal & (order <= k - larger.sum()))
    return chosen


def top_k_mask(flat: torch.Tensor, k: int) -> torch.Tensor:
    """The mask of :func:`top_k`, as :func:`largest_mask`."""
    magnitude = magnitudes(flat)
    return largest_mask(magnitude > 0, magnitude, k)
