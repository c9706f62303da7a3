"""From a DDP model to a registered hook: the only module that knows DDP models."""

from collections.abc import Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from gradcomp.core.rules import AnyRule
from gradcomp.ddp.handle import Handle
from gradcomp.ddp.hook import sparse_hook
from gradcomp.ddp.state import SparseState
from gradcomp.errors import GradcompError


def register(
    ddp_model: DistributedDataParallel,
    rule: AnyRule | None = None,
    *,
    overrides: Mapping[str, AnyRule] | None = None,
    values: str = "bf16",
    warmup_steps: int = 0,
    warmup_density: float = 0.25,
    momentum: float = 0.0,
    grad_scaler: torch.amp.GradScaler | None = None,
    on_nonfinite: str = "propagate",
    fallback: str = "dense",
    check: bool = False,
) -> Handle:
    """Register the sparsifying hook on a DDP model; train as before.

    Args:
        ddp_model: a ``DistributedDataParallel`` without a hook, its parameters on the CPU or on one CUDA device.
        rule: what matters in parameters with two dimensions and at least 1,024 elements; ``TopK(0.01)`` if None. Under Adam that trains
            worse than dense gradients: take :class:`gradcomp.optim.DelayAwareAdamW`, and ``TopK(0.1)`` with ``values="sign"``.
        overrides, values, warmup_steps, warmup_density, momentum, grad_scaler, on_nonfinite, fallback, check: as for
            :class:`gradcomp.SparseState`.

    Returns:
        The handle: traffic, residuals, ``state_dict``, ``flush`` and ``remove``.

    Raises:
        ValueError: not a DDP model, or a setting out of its range.
        GradcompError: the model has a hook already; DDP takes one in a model's life.

    Communication:
        None here; see :class:`gradcomp.SparseState` for a step's.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        text = f"ddp_model must be a torch.nn.parallel.DistributedDataParallel, got {type(ddp_model).__name__}"
        sharded = ": a sharded model has no gradient that all ranks share; wrap the network in DistributedDataParallel instead"
        raise ValueError(text + (sharded if "FullySharded" in text or "FSDP" in text else ""))
    if getattr(ddp_model, "mixed_precision", None) is not None:
        raise ValueError("ddp_model must not use mixed_precision=, which takes DDP's only hook; use torch.autocast instead")
    state = SparseState(
        ddp_model.module,
        rule,
        overrides=overrides,
        values=values,
        warmup_steps=warmup_steps,
        warmup_density=warmup_density,
        momentum=momentum,
        grad_scaler=grad_scaler,
        on_nonfinite=on_nonfinite,
        fallback=fallback,
        check=check,
        group=ddp_model.process_group,
    )
    state.connect()
    try:
        ddp_model.register_comm_hook(state, sparse_hook)
    except RuntimeError as error:
        if "only be called once" not in str(error):
            raise
        raise GradcompError("ddp_model has a communication hook already, and DDP takes one in a model's life") from error
    if ddp_model.gradient_as_bucket_view and state.exchange.world_size & (state.exchange.world_size - 1):
        # Only then, and where W is no power of two, is it seen in the bits how plain DDP divides by W.
        ddp_model.register_forward_pre_hook(state.watch_gradients)
    return state
