"""Selection with error feedback on one CPU thread: time over the memory floor, against the ways in which torch can do it.

    python benchmarks/bench_select.py                       # 25 MiB of fp32, densities 1% and 0.1%
    python benchmarks/bench_select.py --elements 64000000 --density 0.01
    python benchmarks/bench_select.py --tiny                # a moment, to see that it runs

A step is: residual + gradient, the selected elements, what is kept. The floor is one in-place ``residual.add_(gradient)`` over the
same data, measured in turns with every way, and each way is quoted against its own. Times are the smallest of several; memory is the
process's high-water mark over what was resident before a way's first call (Linux), the compiled kernels being loaded already. The last
line is a JSON record, of the first density: ``select_over_floor``, ``numpy_over_floor``, ``topk_over_select``.
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
from memory import MIB, forget, high_water

from gradcomp.core.compiled import kernels
from gradcomp.core.feedback import Feedback
from gradcomp.core.scan import top_k

COMPILED, NUMPY = "gradcomp", "gradcomp, numpy"


def ours(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> None:
    """The hook's own way: exact top-k in cached chunks, nothing stored before the step completes."""
    feedback = Feedback()
    feedback.replace({"x": residual})
    indices, values = top_k(feedback.accumulate("x", gradient), k)
    feedback.keep("x", gradient, indices, values)


def with_topk(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> None:
    """``torch.topk`` of the magnitudes."""
    residual.add_(gradient)
    indices = torch.topk(residual.abs(), k, sorted=False).indices
    residual[indices] = 0


def with_kthvalue(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> None:
    """``torch.kthvalue`` of the magnitudes, then a mask."""
    residual.add_(gradient)
    magnitude = residual.abs()
    threshold = magnitude.kthvalue(magnitude.numel() - k + 1).values
    residual[(magnitude >= threshold).nonzero().view(-1)] = 0


def with_quantile(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> None:
    """``torch.quantile`` of the magnitudes, then a mask. Refuses more than 2^24 elements."""
    residual.add_(gradient)
    magnitude = residual.abs()
    threshold = torch.quantile(magnitude, 1 - k / magnitude.numel())
    residual[(magnitude >= threshold).nonzero().view(-1)] = 0


def with_sample(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> None:
    """A threshold from a random 1% of the elements, as in Lin et al., "Deep gradient compression", ICLR 2018: not exact."""
    residual.add_(gradient)
    magnitude = residual.abs()
    sample = magnitude[torch.randint(magnitude.numel(), (max(1, magnitude.numel() // 100),))]
    threshold = torch.topk(sample, max(1, k // 100)).values[-1]
    residual[(magnitude >= threshold).nonzero().view(-1)] = 0


@contextmanager
def without_kernels() -> Iterator[None]:
    """Have gradcomp use its numpy passes, as where numba is not installed."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("gradcomp.")]
    with ExitStack() as stack:
        for module in modules:
            if getattr(module, "kernels", None) is kernels:
                stack.enter_context(patch.object(module, "kernels", lambda: None))
        yield


def extra_mib(way: Callable[[], object]) -> float:
    """Peak memory of a call over what was resident before."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # what earlier ways freed is given back: it would hide what this one takes
    if trim is not None:
        trim(0)
    forget()
    start = high_water()
    way()
    return (high_water() - start) / MIB


def seconds_of(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def beside(way: Callable[[], object], floor: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(seconds of the fastest call of ``way``, of ``floor``), in turns: the machine may be slower a moment later."""
    best, lowest = float("inf"), float("inf")
    for _ in range(repeats):
        lowest = min(lowest, *(seconds_of(floor) for _ in range(3)))
        best = min(best, seconds_of(way))
    return best, lowest


def run(elements: int, density: float, repeats: int) -> dict[str, float]:
    """One table; the record."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(elements, generator=generator) * torch.rand(elements, generator=generator)
    residual = torch.randn(elements, generator=generator)
    added = residual.clone()
    k = max(1, round(density * elements))
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor, int], None]] = {
        COMPILED: ours,
        NUMPY: ours,
        "torch.topk": with_topk,
        "torch.kthvalue": with_kthvalue,
        "torch.quantile": with_quantile,
        "sampled threshold": with_sample,
    }
    print(f"{elements:,} elements, {k:,} kept ({100 * density:g}%)")
    seconds, floors, extra = {}, {}, {}
    for name, way in ways.items():
        step = partial(way, residual.clone(), gradient, k)
        with without_kernels() if name == NUMPY else nullcontext():
            try:
                extra[name] = extra_mib(step)
                seconds[name], floors[name] = beside(step, lambda: added.add_(gradient), repeats)
            except RuntimeError as error:
                if way is not with_quantile:
                    raise
                print(f"  {name:<18} fails: {str(error).splitlines()[0]}")
                continue
        print(f"  {name:<18} {seconds[name] / floors[name]:7.1f}x floor   {extra[name]:7.1f} MiB extra")
    floor_s = statistics.median(floors.values())
    print(f"  {'floor':<18} {1e3 * floor_s:7.2f} ms, from {1e3 * min(floors.values()):.2f} to {1e3 * max(floors.values()):.2f}")
    return {
        "elements": elements,
        "density": density,
        "compiled": kernels() is not None,
        "floor_s": floor_s,
        "select_over_floor": seconds[COMPILED] / floors[COMPILED],
        "numpy_over_floor": seconds[NUMPY] / floors[NUMPY],
        "topk_over_select": seconds["torch.topk"] / floors["torch.topk"] / (seconds[COMPILED] / floors[COMPILED]),
        "extra_mib": extra[COMPILED],
        "topk_extra_mib": extra["torch.topk"],
    }


def main(argv: list[str] | None = None) -> None:
    """Print tables and a JSON record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--elements", type=int, default=25 * MIB // 4)
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="100,000 elements, once: to see that it runs")
    args = parser.parse_args(argv)
    if args.tiny:
        args.elements, args.repeats = 100_000, 1
    torch.set_num_threads(1)
    if kernels() is None:
        print("without compiled kernels: numba is not installed, or GRADCOMP_COMPILED=0")
    ours(torch.zeros(10_000), torch.randn(10_000), 100)  # everything is loaded and compiled from here on
    records = [run(args.elements, density, args.repeats) for density in args.density]
    print(json.dumps(records[0]))


if __name__ == "__main__":
    main()
