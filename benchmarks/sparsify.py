"""Time of a data sparsifier's step over one pass of ``abs().gt()`` on the same table.

    python benchmarks/sparsify.py --elements 100000000

A step fills the mask with ones and computes it anew. The last line is a JSON record; times are the smallest of several, in seconds.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from gradcomp.data import BaseDataSparsifier, DataNormSparsifier, ThresholdSparsifier


def smallest(function: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Print a table and a JSON record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = torch.randn(args.elements // 128, 128)
    floor = smallest(lambda: table.abs().gt(1.0), args.repeats)
    print(f"{'abs().gt()':<24} {floor:8.3f} s     1.0x")
    record = {"elements": table.numel(), "floor_s": floor}
    sparsifiers: dict[str, BaseDataSparsifier] = {
        "threshold": ThresholdSparsifier([("x", table)], threshold=1.0),
        "norm (1, 4)": DataNormSparsifier([("x", table)]),
        "2:4": DataNormSparsifier([("x", table)], sparsity_level=1.0, zeros_per_block=2),
    }
    for name, sparsifier in sparsifiers.items():
        elapsed_s = smallest(sparsifier.step, args.repeats)
        record[f"{name}_over_floor"] = elapsed_s / floor
        print(f"{name:<24} {elapsed_s:8.3f} s {elapsed_s / floor:7.1f}x")
        del sparsifier
    print(json.dumps(record))


if __name__ == "__main__":
    main()
