"""The passes that touch every element, or every element sent, compiled by numba where it is installed (extra ``fast``).

Each function is plain Python that says what it does; :func:`kernels` compiles them once a process (and once a machine: numba keeps the
machine code beside this file or in the user's cache). Results are those of the numpy passes in :mod:`gradcomp.core.scan`,
:mod:`gradcomp.core.codec` and :mod:`gradcomp.core.feedback`, bit for bit: no fast-math, the same order. They hold no GIL.

The environment variable ``GRADCOMP_COMPILED=0`` switches them off.
"""

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gradcomp.errors import warn

BLOCK = 256
"""Elements that are looked at together: few enough that what is read ahead from memory does not have to wait for what is found."""
BINS = 4096
"""Of magnitudes, in the search for the k-th."""
TILE = 1024
"""Elements that are completed together, for all ranks."""

WIDEST = 48
"""Low bits that fit into a word, beside what is left of a byte."""
NOT_ASCENDING = -1
"""What :func:`read_bits` returns of indices that cannot be right."""
NOT_WORKING = "numba is installed but does not work, so the slower numpy passes are used"


def above(data: Any, residual: Any, threshold: Any, start: int, indices: Any, found: Any) -> tuple[int, int]:
    """Write indices and values of the elements of ``residual + data`` with ``not |x| <= threshold``, beginning at ``start``.

    ``residual`` may be empty, for zeros. Stops where ``indices`` and ``found`` have no room for another block.

    Returns:
        How many there are, and where to go on: ``start`` and all that are returned but the last are multiples of ``BLOCK``.
    """
    count = 0
    sums = np.empty(BLOCK, np.float32)
    hits = np.zeros(BLOCK, np.uint8)
    words = hits.view(np.uint64)
    hit_words = np.empty(words.size, np.int64)
    summed = residual.size > 0
    for at in range(start, data.size, BLOCK):
        if count + BLOCK > indices.size:
            return count, at
        d = data[at : at + BLOCK]
        r = residual[at : at + BLOCK]
        if d.size < BLOCK:
            hits[:] = 0
        if summed:
            for i in range(d.size):
                sums[i] = r[i] + d[i]
        else:
            sums[: d.size] = d
        for i in range(d.size):
            hits[i] = not abs(sums[i]) <= threshold
        # What cannot be foreseen is not asked: a miss is written over by the next hit.
        num_words = 0
        for word in range(words.size):
            hit_words[num_words] = word * 8
            num_words += words[word] != 0
        for word in range(num_words):
            for i in range(hit_words[word], hit_words[word] + 8):
                indices[count] = at + i
                found[count] = sums[i]
                count += hits[i]
    return count, data.size


def largest(indices: Any, values: Any, k: int, kept_indices: Any, kept_values: Any) -> None:
    """Write the k entries of largest magnitude, 0 < k <= K, in their order; ties to the first; NaN counts as infinite.

    Magnitudes are compared by their bits, which are in the same order: counted in bins of equal width from the smallest to the largest,
    then sorted within the bin that has the k-th.
    """
    bits = values.view(np.int32)
    smallest, largest = np.int32(0x7F800000), np.int32(0)
    for i in range(bits.size):
        smallest = min(smallest, bits[i] & np.int32(0x7FFFFFFF))
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    width = 0
    while (min(largest, 0x7F800000) - smallest) >> width >= BINS:
        width += 1
    counts = np.zeros(BINS, np.int64)
    for i in range(bits.size):
        counts[(min(bits[i] & 0x7FFFFFFF, 0x7F800000) - smallest) >> width] += 1
    place = BINS - 1
    wanted = k
    while counts[place] < wanted:
        wanted -= counts[place]
        place -= 1
    within = np.empty(counts[place], np.int64)
    found = 0
    for i in range(bits.size):
        magnitude = min(bits[i] & 0x7FFFFFFF, 0x7F800000)
        if (magnitude - smallest) >> width == place:
            within[found] = magnitude
            found += 1
    within.sort()
    kth = within[found - wanted]
    ties = wanted
    for i in range(found - wanted, found):
        ties -= within[i] > kth
    kept = 0
    for i in range(bits.size):
        magnitude = min(bits[i] & 0x7FFFFFFF, 0x7F800000)
        if magnitude > kth or (magnitude == kth and ties > 0):
            ties -= magnitude == kth
            kept_indices[kept] = indices[i]
            kept_values[kept] = values[i]
            kept += 1


def complete(residual: Any, gradient: Any, unscale: Any, indices: Any, values: Any, edges: Any, own: int, weight: Any) -> None:
    """Complete a step for one parameter: what stays goes into ``residual``, what all ranks released into ``gradient``.

    Args:
        residual: fp32 [N], mutated: plus ``unscale * gradient``, less ``unscale * values`` of rank ``own``.
        gradient: fp32 [N], mutated: the sum over ranks, in rank order, of ``weight * values``.
        indices, values: of all ranks, one after the other: those of rank r from ``edges[r]`` to ``edges[r + 1]``, ascending.
    """
    at = edges[:-1].copy()
    mine = edges[own]
    for start in range(0, residual.size, TILE):
        r = residual[start : start + TILE]
        g = gradient[start : start + TILE]
        stop = start + r.size
        for i in range(r.size):
            r[i] += g[i] * unscale
            g[i] = 0
        while mine < edges[own + 1] and indices[mine] < stop:
            r[indices[mine] - start] -= values[mine] * unscale
            mine += 1
        for rank in range(at.size):
            place = at[rank]
            while place < edges[rank + 1] and indices[place] < stop:
                g[indices[place] - start] += values[place] * weight
                place += 1
            at[rank] = place


def write_bits(indices: Any, low: int, count: int, out: Any) -> None:
    """Elias-Fano: OR the low bits, then the bitmap, of ``indices`` into the zeroed bytes ``out``; see :mod:`gradcomp.core.codec`."""
    mask = (1 << low) - 1
    waiting = 0
    held = 0
    place = 0
    for i in range(indices.size):
        rest = indices[i] - i
        waiting |= (rest & mask) << held
        held += low
        while held >= 8:
            out[place] = waiting & 255
            place += 1
            waiting >>= 8
            held -= 8
        bit = count * low + (rest >> low) + i
        out[bit >> 3] |= 1 << (bit & 7)
    if held:
        out[place] |= waiting


def read_bits(data: Any, low: int, count: int, numel: int, indices: Any) -> int:
    """Read the indices that :func:`write_bits` wrote; how many there are; its whole size if eight more would not fit.

    ``NOT_ASCENDING`` where they are not strictly ascending below ``numel``.
    """
    first = count * low
    last = first + count + ((numel - count) >> low)
    found = 0
    for byte in range(first >> 3, (last + 7) >> 3):
        bits = np.int64(data[byte])
        if byte == first >> 3:
            bits &= -1 << (first & 7)
        if byte == last >> 3:
            bits &= (1 << (last & 7)) - 1
        if bits and found + 8 > len(indices):
            return len(indices)
        for j in range(8 if bits else 0):  # whether a bit is set is never asked: it could not be foreseen
            indices[found] = (byte * 8 + j - first - found) << low
            found += bits >> j & 1
    if found > count:  # there are no low bits for them
        return found
    mask = (1 << low) - 1
    waiting = 0
    held = 0
    place = 0
    previous = -1
    for i in range(found):
        while held < low:
            waiting |= np.int64(data[place]) << held
            place += 1
            held += 8
        value = indices[i] + (waiting & mask) + i
        waiting >>= low
        held -= low
        if value <= previous or value >= numel:
            return NOT_ASCENDING
        indices[i] = value
        previous = value
    return found


def move(parameter: Any, gradient: Any, average: Any, square: Any, age: Any, delay: Any, settings: Any) -> None:
    """A step of :class:`gradcomp.optim.DelayAwareAdamW` on one fp32 parameter, flat; all but ``gradient`` are mutated.

    ``settings``: lr, beta1, beta2, eps, weight decay, largest delay, clip threshold (inf for none), and -1 to maximize or 1.
    """
    lr, beta1, beta2, eps, weight_decay, cap, threshold, sign = settings
    kept = np.float32(1 - lr * weight_decay)
    most = np.uint8(cap)
    late = np.arange(int(cap) + 1)
    missing1, missing2 = 1 - beta1**late, 1 - beta2**late
    young = np.arange(min(1024, parameter.size))
    known1, known2 = 1 - beta1**young, 1 - beta2**young
    old = np.log(1e-9) / np.log(max(beta1, beta2, 1e-9))  # the age from which on there is nothing to correct
    places, updates = np.empty(parameter.size, np.int64), np.empty(parameter.size, np.float32)  # of those that arrived
    arrived, total = 0, 0.0
    for i in range(parameter.size):
        t = min(delay[i] + np.uint8(1), most)
        delay[i] = t
        if gradient[i] != 0:
            mean = sign * gradient[i] / t
            average[i] += missing1[t] * (mean - average[i])
            square[i] += missing2[t] * (mean * mean - square[i])
            age[i] += t
            seen1 = seen2 = 1.0
            if age[i] < young.size:
                seen1, seen2 = known1[int(age[i])], known2[int(age[i])]
            elif age[i] < old:
                seen1, seen2 = 1 - beta1 ** age[i], 1 - beta2 ** age[i]
            update = t * average[i] / (seen1 * (np.sqrt(square[i] / seen2) + eps))
            places[arrived], updates[arrived] = i, update
            arrived += 1
            if np.isfinite(update):
                total += update * update
            delay[i] = 0
    if total > threshold * threshold * parameter.size:
        lr *= threshold / np.sqrt(total / parameter.size)
    for i in range(parameter.size):
        parameter[i] *= kept
    for j in range(arrived):
        parameter[places[j]] -= lr * updates[j]


class Kernels(NamedTuple):
    """The functions of this module, compiled: fp32 data, int64 indices, bytes."""

    above: Callable[..., tuple[int, int]]
    largest: Callable[..., None]
    complete: Callable[..., None]
    write_bits: Callable[..., None]
    read_bits: Callable[..., int]
    move: Callable[..., None]


_SIGNATURES: dict[Any, str] = {
    above: "UniTuple(i8, 2)(f4[::1], f4[::1], f4, i8, i8[::1], f4[::1])",
    largest: "void(i8[::1], f4[::1], i8, i8[::1], f4[::1])",
    complete: "void(f4[::1], f4[::1], f4, i8[::1], f4[::1], i8[::1], i8, f4)",
    write_bits: "void(i8[::1], i8, i8, u1[::1])",
    read_bits: "i8(u1[::1], i8, i8, i8, i8[::1])",
    move: "void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], u1[::1], f8[::1])",
}


@lru_cache(maxsize=1)
def kernels() -> Kernels | None:
    """The compiled functions; None without numba, or where they are switched off. The first call takes a second or more."""
    if os.environ.get("GRADCOMP_COMPILED") == "0":
        return None
    try:
        import numba
    except ImportError:
        return None
    except Exception as error:  # installed, and broken
        warn(f"{NOT_WORKING}: {error!r}")
        return None
    compiled: list[Any] = []
    for function, signature in _SIGNATURES.items():
        try:
            try:
                compiled.append(numba.njit(signature, nogil=True, cache=True, error_model="numpy")(function))
            except Exception:  # nowhere to keep machine code, or what was kept is damaged
                compiled.append(numba.njit(signature, nogil=True, error_model="numpy")(function))
        except Exception as error:
            warn(f"{NOT_WORKING}: {error!r}")
            return None
    return Kernels(*compiled)
