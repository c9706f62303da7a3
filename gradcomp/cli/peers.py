"""What a benchmark compares: torch's own communication hooks, a plain sparse hook as one would write it first, and gradcomp's."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it without saying so
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradcomp.core.rules import TopK, whole
from gradcomp.core.values import check_values
from gradcomp.ddp.handle import Handle
from gradcomp.ddp.register import register

Join = Callable[[DistributedDataParallel], Handle | None]
"""Gives a model its hook; returns a handle where gradcomp counts."""


def _bf16_hook(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    # DDP refuses torch's own by its name without CUDA and NCCL, though gloo can do it.
    return default_hooks.bf16_compress_hook(group, bucket)


class TwoGathers:
    """A sparse hook without any of gradcomp's ideas, to see what each of them is worth.

    Top-k of each bucket with error feedback: ``torch.topk``; the number of elements gathered first, then indices (int64) and values
    (fp32), padded to the largest number, each gather waited for.
    """

    def __init__(self, rule: TopK) -> None:
        self._rule = rule
        self._residuals: dict[int, torch.Tensor] = {}

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Send the largest elements of a bucket."""
        buffer, world_size = bucket.buffer(), dist.get_world_size()
        residual = self._residuals.get(bucket.index())
        if residual is None or residual.numel() != buffer.numel():  # DDP rebuilds its buckets once
            residual = self._residuals[bucket.index()] = torch.zeros_like(buffer)
        residual += buffer
        indices = torch.topk(residual.abs(), self._rule.count(buffer.numel())).indices
        values = residual[indices]
        residual[indices] = 0
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(sizes, torch.tensor([indices.numel()]))
        most = max(int(size) for size in sizes)
        all_indices = [torch.zeros(most, dtype=torch.int64) for _ in range(world_size)]
        all_values = [torch.zeros(most) for _ in range(world_size)]
        dist.all_gather(all_indices, torch.nn.functional.pad(indices, (0, most - indices.numel())))
        dist.all_gather(all_values, torch.nn.functional.pad(values, (0, most - values.numel())))
        buffer.zero_()
        for part, found in zip(all_indices, all_values):
            buffer.index_add_(0, part, found / world_size)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done


def _torch_hook(hook: Callable[..., Any]) -> Join:
    def join(model: DistributedDataParallel) -> None:
        model.register_comm_hook(None, hook)

    return join


def _power_sgd(rank: int) -> Join:
    def join(model: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return join


def _two_gathers(rule: TopK) -> Join:
    def join(model: DistributedDataParallel) -> None:
        model.register_comm_hook(None, TwoGathers(rule).hook)

    return join


def _sparse(rule: TopK, values: str) -> Join:
    return lambda model: register(model, rule, values=values)


def peer(name: str) -> Join:
    """The hook called ``name``.

    Args:
        name: ``noop`` (nothing is exchanged: the floor), ``plain``, ``fp16``, ``bf16``, ``powersgd-RANK``, ``twogathers-DENSITY``, or
            ``gradcomp-DENSITY-VALUES``.

    Raises:
        ValueError: another name.
    """
    kind, *settings = name.split("-", 1)
    fixed: dict[str, Join] = {
        "noop": _torch_hook(debugging_hooks.noop_hook),
        "plain": lambda model: None,
        "fp16": _torch_hook(default_hooks.fp16_compress_hook),
        "bf16": _torch_hook(_bf16_hook),
    }
    try:
        if not settings:
            return fixed[kind]
        if kind == "powersgd":
            return _power_sgd(whole("RANK", int(settings[0]) - 1) + 1)
        if kind == "twogathers":
            return _two_gathers(TopK(float(settings[0])))
        density, values = settings[0].rsplit("-", 1)
        return {"gradcomp": _sparse}[kind](TopK(float(density)), check_values(values))
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"hook must be noop, plain, fp16, bf16, powersgd-RANK, twogathers-DENSITY or gradcomp-DENSITY-VALUES, got {name!r} ({error})"
        ) from None


def in_one_bucket(name: str) -> bool:
    """Whether the hook needs all parameters in one bucket: torch's PowerSGD crosses its collectives on gloo when there are several."""
    return name.startswith("powersgd")
