"""One rank's payload to bytes and back, on one CPU thread: time over the memory floor and bits an index, beside other ways to write it.

    python benchmarks/bench_codec.py                        # 6,553,600 elements (25 MiB of fp32), densities 10%, 1% and 0.1%
    python benchmarks/bench_codec.py --elements 64000000 --density 0.01
    python benchmarks/bench_codec.py --tiny                 # a moment, to see that it runs

A payload is the largest elements of a random gradient: int64 indices and fp32 values before and after. The floor is one in-place
``residual.add_(gradient)`` over all elements, measured in turns with every way; times are the smallest of several. The bound is
``log2 C(N, K) / K`` bits an index: no code that treats all choices of K of N alike does better on average. Every way must give back the
indices, and the values as their format rounds them. The last line is a JSON record, of density 1% (or else the first one):
``codec_over_floor`` (gradcomp's, bf16, encode and decode), ``index_bits``, ``bits_over_bound``.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from bench_select import beside, seconds_of
from memory import MIB

from gradcomp.core.codec import Bytes, decode_indices, encode_indices, index_bytes
from gradcomp.core.compiled import kernels
from gradcomp.core.scan import Accumulation, Floats, Indices, top_k
from gradcomp.core.values import FORMATS, decode_values, encode_values, scale_of

RANKS = (1, 2, 4, 8)


class Way(NamedTuple):
    """A way to write a payload."""

    encode: Callable[[Indices, Floats], tuple[Bytes, int]]
    """The payload, and how many bytes of it are the indices."""
    decode: Callable[[Bytes, int], tuple[Indices, Floats]]
    rounded: Callable[[Floats], Floats]
    """What the values should come back as."""


class Cost(NamedTuple):
    """What a way costs."""

    encode: float
    decode: float
    bytes_kept: float
    index_bits: float


def gradcomp_way(numel: int, count: int, values: str) -> Way:
    """The hook's: Elias-Fano, then values in a format of its own; a scale goes in the payload's header, here its first four bytes."""
    form = FORMATS[values]
    size = index_bytes(numel, count)

    def encode(indices: Indices, found: Floats) -> tuple[Bytes, int]:
        scale = scale_of(found, form)
        parts = [encode_indices(indices, numel, count), encode_values(found, form, scale)]
        return np.concatenate([np.array([scale], np.float32).view(np.uint8)[: 4 * form.scaled], *parts]), size

    def decode(payload: Bytes, _: int) -> tuple[Indices, Floats]:
        start = 4 * form.scaled
        scale = float(payload[:start].copy().view(np.float32)[0]) if form.scaled else 0.0
        indices = decode_indices(payload[start : start + size], numel, count, count)
        return indices, decode_values(payload[start + size :], form, count, scale)

    def rounded(found: Floats) -> Floats:
        scale = np.float32(scale_of(found, form))
        if values == "int8":
            return np.rint(found / scale) * scale
        return np.copysign(scale, found) if values == "sign" else torch.from_numpy(found).to(form.dtype).float().numpy()

    return Way(encode, decode, rounded)


def raw_way(write: Callable[[Indices], Bytes], read: Callable[[Bytes], Indices]) -> Way:
    """Indices by these two functions, then the values as they are in memory."""

    def encode(indices: Indices, found: Floats) -> tuple[Bytes, int]:
        written = write(indices)
        return np.concatenate([written, found.view(np.uint8)]), written.size

    def decode(payload: Bytes, size: int) -> tuple[Indices, Floats]:
        return read(payload[:size]), payload[size:].copy().view(np.float32)  # aligned by the copy

    return Way(encode, decode, lambda found: found)


def as_int32(indices: Indices) -> Bytes:
    """Four bytes an index."""
    return torch.from_numpy(indices).to(torch.int32).view(torch.uint8).numpy()


def from_int32(data: Bytes) -> Indices:
    """The inverse of :func:`as_int32`: int64, which indexing needs."""
    return torch.from_numpy(data).view(torch.int32).to(torch.int64).numpy()


def as_varint(indices: Indices) -> Bytes:
    """The gaps, seven bits a byte, lowest first; the top bit says that more follow."""
    gaps = np.diff(indices, prepend=-1) - 1
    sizes = np.ones(gaps.size, np.int64)
    for extra in range(1, -(-int(gaps.max(initial=0)).bit_length() // 7)):
        sizes += gaps >= 1 << 7 * extra
    ends = np.cumsum(sizes)
    out = np.empty(int(ends[-1]), np.uint8)
    starts = ends - sizes
    for place in range(int(sizes.max())):
        longer = np.flatnonzero(sizes > place)
        more = sizes[longer] > place + 1
        out[starts[longer] + place] = gaps[longer] >> 7 * place & 127 | more.astype(np.int64) << 7
    return out


def from_varint(data: Bytes) -> Indices:
    """The inverse of :func:`as_varint`."""
    ends = np.flatnonzero(data < 128)
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts + 1
    gaps = np.zeros(ends.size, np.int64)
    for place in range(int(sizes.max())):
        longer = np.flatnonzero(sizes > place)
        gaps[longer] |= (data[starts[longer] + place] & 127).astype(np.int64) << 7 * place
    indices: Indices = np.cumsum(gaps + 1) - 1
    return indices


def bitmap_way(numel: int) -> Way:
    """One bit an element, kept or not."""

    def write(indices: Indices) -> Bytes:
        kept = np.zeros(numel, np.bool_)
        kept[indices] = True
        return np.packbits(kept, bitorder="little")

    return raw_way(write, lambda data: np.flatnonzero(np.unpackbits(data, count=numel, bitorder="little")))


def ways_for(numel: int, count: int) -> dict[str, Way]:
    """All ways, by name."""
    ours = {f"gradcomp, {values}": gradcomp_way(numel, count, values) for values in ("bf16", "sign", "int8", "fp32")}
    return ours | {
        "int64 + fp32": raw_way(lambda indices: indices.view(np.uint8), lambda data: data.view(np.int64)),
        "int32 + fp32": raw_way(as_int32, from_int32),
        "bitmap + fp32": bitmap_way(numel),
        "delta bytes + fp32": raw_way(as_varint, from_varint),
    }


def bound(numel: int, count: int) -> float:
    """``log2 C(numel, count) / count``."""
    nats = math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    return nats / math.log(2) / count


def cost(way: Way, indices: Indices, values: Floats, floor: Callable[[], object], repeats: int) -> Cost:
    """Check the round trip, then measure it."""
    payload, size = way.encode(indices, values)
    read, found = way.decode(payload, size)
    if not np.array_equal(read, indices):
        raise SystemExit("the indices that were decoded are not those that were encoded")
    if not np.array_equal(found, way.rounded(values)):
        raise SystemExit("the values that were decoded are not those that were encoded, rounded to their format")
    times = []
    for function in (lambda: way.encode(indices, values), lambda: way.decode(payload, size)):
        seconds, floor_s = beside(function, floor, repeats)
        times.append(seconds / floor_s)
    return Cost(*times, bytes_kept=payload.size / indices.size, index_bits=8 * size / indices.size)


def decode_by_ranks(numel: int, payloads: list[tuple[Indices, Floats]], repeats: int) -> dict[str, float]:
    """By W: seconds to decode the payloads of W ranks over W times those of one, gradcomp's with bf16."""
    way = gradcomp_way(numel, payloads[0][0].size, "bf16")
    written = [way.encode(*payload) for payload in payloads]

    def decode(ranks: int) -> None:
        for payload in written[:ranks]:
            way.decode(*payload)

    times = dict.fromkeys(RANKS, float("inf"))
    for _ in range(repeats):
        for ranks in RANKS:
            times[ranks] = min(times[ranks], seconds_of(partial(decode, ranks)))
    return {str(ranks): times[ranks] / times[1] / ranks for ranks in RANKS}


def run(numel: int, density: float, repeats: int) -> dict[str, object]:
    """One table; the record."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, round(density * numel))
    payloads = []
    for _ in range(max(RANKS)):
        gradient = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator)
        payloads.append(top_k(Accumulation(gradient), count))
    residual = torch.zeros(numel)

    def floor() -> torch.Tensor:
        return residual.add_(gradient)

    least = bound(numel, count)
    print(f"{numel:,} elements, {count:,} kept ({100 * density:g}%); the bound is {least:.2f} bits an index")
    columns = ("encode", "decode", "sum", "bytes kept", "index bits", "over bound")
    print(f"  {'x floor':<20}" + "".join(f"{column:>12}" for column in columns))
    costs = {}
    for name, way in ways_for(numel, count).items():
        costs[name] = found = cost(way, *payloads[0], floor, repeats)
        cells = (f"{found.encode:.3f}", f"{found.decode:.3f}", f"{found.encode + found.decode:.3f}", f"{found.bytes_kept:.2f}")
        cells += (f"{found.index_bits:.2f}", f"{found.index_bits - least:.2f}")
        print(f"  {name:<20}" + "".join(f"{cell:>12}" for cell in cells))
    by_ranks = decode_by_ranks(numel, payloads, repeats)
    shown = ", ".join(f"{ranks}: {ratio:.2f}" for ranks, ratio in by_ranks.items())
    print(f"  decode of W payloads over W times that of one: {shown}")
    own = costs["gradcomp, bf16"]
    return {
        "elements": numel,
        "density": density,
        "kept": count,
        "compiled": kernels() is not None,
        "codec_over_floor": own.encode + own.decode,
        "encode_over_floor": own.encode,
        "decode_over_floor": own.decode,
        "index_bits": own.index_bits,
        "bits_over_bound": own.index_bits - least,
        "decode_by_ranks": by_ranks,
        "ways": {name: found._asdict() for name, found in costs.items()},
    }


def main(argv: list[str] | None = None) -> None:
    """Print tables and a JSON record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--elements", type=int, default=25 * MIB // 4)
    parser.add_argument("--density", type=float, nargs="+", default=[0.1, 0.01, 0.001])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="100,000 elements, once: to see that it runs")
    args = parser.parse_args(argv)
    if args.tiny:
        args.elements, args.repeats = 100_000, 1
    torch.set_num_threads(1)
    if kernels() is None:
        print("without compiled kernels: numba is not installed, or GRADCOMP_COMPILED=0")
    records = {density: run(args.elements, density, args.repeats) for density in args.density}
    print(json.dumps(records.get(0.01, records[args.density[0]])))


if __name__ == "__main__":
    main()
