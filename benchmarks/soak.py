"""A long run under everything that goes wrong, after which nothing may be missing: promise 1 over a run, exactly, and equal replicas.

    torchrun --standalone --nproc_per_node 4 benchmarks/soak.py --steps 2000

Gradients are dyadic (multiples of 1/64), so that sums are exact. Steps are drawn at random, alike on all ranks from the seed: a NaN or
an infinity on one rank in one parameter; a rank that has nothing to add; parameters unused by all ranks, by one, alternating; changes of
the loss scale; flushes; saving, and going on in a new model and a new hook that load what was saved. The last line is a JSON record: the
largest difference between what was given and what was delivered or is pending, which must be 0, and whether replicas are bit-identical.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import gradcomp

SHAPES = {"embed": (60, 40), "hidden": (40, 80), "norm": (40,), "rows": (30, 50), "scale": (), "wide": (9000,), "head": (50, 30)}
RULES: dict[str, Any] = {
    "embed": gradcomp.TopK(0.01),
    "hidden": gradcomp.TopK(0.05),
    "rows": gradcomp.Threshold(20.0),
    "head": gradcomp.TopK(gradcomp.schedule.Cubic(start=0.5, end=0.02, steps=500)),
    "*": gradcomp.Dense(),
}


class Given(nn.Module):
    """Parameters whose gradients are whatever each step gives."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, grads: dict[str, torch.Tensor]) -> torch.Tensor:
        """A loss with these gradients."""
        return sum((getattr(self, name) * grad).sum() for name, grad in grads.items())  # type: ignore[return-value]


class Run:
    """One rank's model, hook and books."""

    def __init__(self, values: str, check: bool, scale: float) -> None:
        self.values = values
        self.check = check
        self.applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.build(scale)

    def build(self, scale: float) -> None:
        """A new model with a new hook, as after a restart."""
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**9)
        self.model = DistributedDataParallel(Given(), find_unused_parameters=True, bucket_cap_mb=0.02)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.handle = gradcomp.register(
            self.model, overrides=RULES, values=self.values, fallback="never", grad_scaler=self.scaler, check=self.check
        )

    def restart(self, folder: Path) -> None:
        """Save, forget everything, load."""
        gradcomp.save(self.handle, folder)
        weights = {name: p.detach().clone() for name, p in self.model.module.named_parameters()}
        self.build(self.scaler.get_scale())
        self.model.module.load_state_dict(weights)
        gradcomp.load(self.handle, folder)

    def step(self, grads: dict[str, torch.Tensor], bad: bool) -> None:
        """One training step; ``bad``: some rank's gradients are not finite, so that all ranks must skip it."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(grads)).backward()
        self.scaler.unscale_(self.optimizer)
        if not bad:
            for name, p in self.model.module.named_parameters():
                if p.grad is not None:
                    self.applied[name] += p.grad.double()
            for name, grad in grads.items():
                self.given[name] += grad.double()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def difference(self) -> float:
        """The largest difference between what all ranks gave and what was delivered or is pending. Collective."""
        largest = 0.0
        for name in SHAPES:
            both = torch.stack([self.given[name], self.handle.residual(name).double()])
            dist.all_reduce(both)
            given, pending = both / dist.get_world_size()
            largest = max(largest, float((self.applied[name] + pending - given).abs().max()))
        return largest

    def equal_replicas(self) -> bool:
        """Whether every rank has the same parameters, bit for bit. Collective."""
        mine = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        first = mine.clone()
        dist.broadcast(first, 0)
        same = torch.tensor(int(torch.equal(mine, first)))
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        return bool(same)


def local_gradients(step: int, rank: int, unused: set[str]) -> dict[str, torch.Tensor]:
    """This rank's gradients in a step: multiples of 1/64, other ones on every rank."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return {name: torch.randint(-512, 513, shape, generator=generator) / 64 for name, shape in SHAPES.items() if name not in unused}


def soak(steps: int, seed: int, values: str, check: bool, quiet: bool = False) -> dict[str, Any]:
    """Run, and return the record."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chance = random.Random(seed)
    run = Run(values, check, 2.0**10)
    seen = dict.fromkeys(("bad", "skipped_inputs", "unused", "rescaled", "flushes", "restarts"), 0)
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    started = time.perf_counter()
    for step in tqdm(range(steps), disable=quiet or rank != 0, file=sys.stderr, mininterval=10):
        everywhere = {name for name in SHAPES if chance.random() < 0.1} - {"wide"}
        here = [{name for name in SHAPES if chance.random() < 0.1} - {"wide"} for _ in range(world_size)]
        idle = chance.randrange(world_size) if chance.random() < 0.05 else None
        bad_rank = chance.randrange(world_size) if chance.random() < 0.05 else None
        bad_name, bad_value = chance.choice(sorted(SHAPES)), chance.choice([float("nan"), float("inf"), -float("inf")])
        grads = local_gradients(step, rank, everywhere | here[rank])
        seen["unused"] += bool(everywhere) or any(here)
        if idle is not None:
            seen["skipped_inputs"] += 1
            if rank == idle:
                grads = {name: torch.zeros_like(grad) for name, grad in grads.items()}
        if bad_rank is not None:
            seen["bad"] += 1
            if rank == bad_rank:
                grads.setdefault(bad_name, torch.zeros(SHAPES[bad_name])).view(-1)[0] = bad_value
        if chance.random() < 0.01:
            seen["flushes"] += 1
            if rank == chance.randrange(world_size):
                run.handle.flush()
        else:
            chance.randrange(world_size)
        run.step(grads, bad_rank is not None)
        if chance.random() < 0.02:
            seen["rescaled"] += 1
            run.scaler.update(2.0 ** chance.randrange(0, 16))
        if chance.random() < 0.01:
            seen["restarts"] += 1
            run.restart(Path(str(folders[0])))
    pending = sum(int(run.handle.residual(name).count_nonzero()) for name in SHAPES)
    return {
        "steps": steps,
        "world_size": world_size,
        "values": values,
        "check": check,
        **seen,
        "pending_elements": pending,
        "difference": run.difference(),
        "replicas_equal": run.equal_replicas(),
        "ms_a_step": 1e3 * (time.perf_counter() - started) / steps,
    }


def main() -> None:
    """Run under torchrun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--values", default="bf16", choices=["fp32", "bf16", "fp16"], help="exact on dyadic numbers")
    parser.add_argument("--check", action="store_true", help="with every step verified")
    args = parser.parse_args()
    torch.set_num_threads(1)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    record = soak(args.steps, args.seed, args.values, args.check)
    if dist.get_rank() == 0:
        print(json.dumps(record))
    dist.destroy_process_group()
    if record["difference"] or not record["replicas_equal"]:
        sys.exit("something was lost, or replicas differ")


if __name__ == "__main__":
    main()
