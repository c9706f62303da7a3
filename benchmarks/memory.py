"""Peak memory of a hooked backward pass over plain DDP's, beside its bound.

    torchrun --standalone --nproc_per_node 2 benchmarks/memory.py --bucket-mib 64 --density 0.01

The bound: one residual, W + 1 payloads (W received, one sent), this rank's release (12 bytes an element kept), and one temporary: 24 MiB
of cached chunks, and for each element kept 80 bytes while it is found and encoded, and 24 for each rank's while it is decoded. That is
for ``TopK`` and ``Threshold``; a dense parameter that travels beside a payload needs a copy of itself, and a rule of your own a copy of
residual + gradient and a mask. Memory is the process's high-water mark, which the kernel keeps; Linux only.
"""

import argparse
import gc
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

MIB = 2**20
CHUNKS = 24 * MIB
"""Scratch of chunk size on the backward thread and on the callback threads, and what the allocator keeps."""


class Wide(nn.Module):
    """One large parameter, and a small one in the same bucket."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel // 1024, 1024))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, grad: torch.Tensor) -> torch.Tensor:
        """A loss whose gradient is ``grad``."""
        return (self.weight * grad).sum() + self.bias.sum()


def high_water() -> int:
    """The process's peak resident memory in bytes since :func:`forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget() -> None:
    """Begin a new high-water mark at what is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def peak_of(numel: int, rule: object, values: str, steps: int = 4) -> tuple[int, int, int]:
    """Peak bytes of backward passes over what is resident before the first; the most elements kept and payload bytes of a step."""
    model = DistributedDataParallel(Wide(numel), bucket_cap_mb=2 * numel * 4 / MIB)
    handle = None if rule is None else gradcomp.register(model, rule, values=values)
    generator = torch.Generator().manual_seed(dist.get_rank())
    grad = torch.randn(numel // 1024, 1024, generator=generator)
    model(grad).backward()  # gradients, buckets and a first residual exist from here on; what follows is a step's own
    forget()
    start, kept, payload, seen = high_water(), 0, 0, handle.traffic.payload_bytes if handle else 0
    for _ in range(steps):
        model.zero_grad(set_to_none=False)
        model(grad).backward()
        if handle is not None:
            kept = max(kept, int(handle.densities["weight"] * numel) + 8)
            payload, seen = max(payload, handle.traffic.payload_bytes - seen), handle.traffic.payload_bytes
    return high_water() - start, kept, payload


def bound_of(kept: int, payload: int, world_size: int) -> dict[str, int]:
    """The parts of the bound in bytes, residual aside: it is there before the step."""
    return {
        "payloads": (world_size + 1) * payload,
        "release": kept * (8 + 4),
        "temporary": CHUNKS + kept * (80 + 24 * world_size),
    }


def measure(bucket_mib: int, rule: object, values: str) -> dict[str, object]:
    """Peak of plain DDP and of the hook on this rank, residual and bound, in MiB."""
    numel, world_size = bucket_mib * MIB // 4, dist.get_world_size()
    plain, _, _ = peak_of(numel, None, values)
    hooked, kept, payload = peak_of(numel, rule, values)
    parts = bound_of(kept, payload, world_size)
    return {
        "bucket_mib": bucket_mib,
        "residual_mib": bucket_mib,
        "plain_step_mib": plain / MIB,
        "hooked_step_mib": hooked / MIB,
        "extra_mib": (hooked - plain) / MIB,
        "bound_mib": sum(parts.values()) / MIB,
        **{f"bound_{name}_mib": size / MIB for name, size in parts.items()},
        "density": kept / numel,
    }


def main() -> None:
    """Run under torchrun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--values", default="bf16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    record = measure(args.bucket_mib, gradcomp.TopK(args.density), args.values)
    if dist.get_rank() == 0:
        print(json.dumps(record, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
