"""Selection with error feedback on one CPU thread: time over the memory floor, against the ways in which torch can do it.

    python benchmarks/bench_select.py                       # 25 MiB of fp32, densities 1% and 0.1%
    python benchmarks/bench_select.py --elements 64000000 --density 0.01

A step is: residual + gradient, the selected elements, what is kept. The floor is one in-place ``residual.add_(gradient)`` over the
same data. Times are the smallest of several; memory is the process's high-water mark over what was resident before (Linux). The last line
is a JSON record, of the first density: ``select_over_floor``, ``topk_over_select``.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from memory import MIB, forget, high_water

from gradcomp.core.feedback import Feedback
from gradcomp.core.scan import top_k


def ours(feedback: Feedback, gradient: torch.Tensor, k: int) -> None:
    """The hook's own way: exact top-k in cached chunks, nothing stored before the step completes."""
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


def with_sample(residual: torch.Tensor, gradient: torch.Tensor, k: int) -> None:
    """A threshold from a random 1% of the elements, as in Lin et al., "Deep gradient compression", ICLR 2018: not exact."""
    residual.add_(gradient)
    magnitude = residual.abs()
    sample = magnitude[torch.randint(magnitude.numel(), (max(1, magnitude.numel() // 100),))]
    threshold = torch.topk(sample, max(1, k // 100)).values[-1]
    residual[(magnitude >= threshold).nonzero().view(-1)] = 0


def measure(function: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(seconds of the fastest call, extra MiB of the first)."""
    forget()
    start = high_water()
    function()
    extra = (high_water() - start) / MIB
    best = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - begun)
    return best, extra


def run(elements: int, density: float, repeats: int) -> dict[str, float]:
    """One table; the record."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(elements, generator=generator) * torch.rand(elements, generator=generator)
    residual = torch.randn(elements, generator=generator)
    feedback = Feedback()
    feedback.replace({"x": residual.clone()})
    k = max(1, round(density * elements))
    floor_s, _ = measure(lambda: residual.add_(gradient), 3 * repeats)
    print(f"{elements:,} elements, {k:,} kept ({100 * density:g}%); floor {1e3 * floor_s:.2f} ms")
    ways: dict[str, Callable[[], object]] = {
        "gradcomp": lambda: ours(feedback, gradient, k),
        "torch.topk": lambda: with_topk(residual, gradient, k),
        "torch.kthvalue": lambda: with_kthvalue(residual, gradient, k),
        "sampled threshold": lambda: with_sample(residual, gradient, k),
    }
    seconds, extra = {}, {}
    for name, way in ways.items():
        seconds[name], extra[name] = measure(way, repeats)
        print(f"  {name:<18} {seconds[name] / floor_s:7.1f}x floor   {extra[name]:7.1f} MiB extra")
    return {
        "elements": elements,
        "density": density,
        "floor_s": floor_s,
        "select_over_floor": seconds["gradcomp"] / floor_s,
        "topk_over_select": seconds["torch.topk"] / seconds["gradcomp"],
        "extra_mib": extra["gradcomp"],
        "topk_extra_mib": extra["torch.topk"],
    }


def main(argv: list[str] | None = None) -> None:
    """Print tables and a JSON record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--elements", type=int, default=25 * MIB // 4)
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    records = [run(args.elements, density, args.repeats) for density in args.density]
    print(json.dumps(records[0]))


if __name__ == "__main__":
    main()
