"""Whether a saved state fits: checked in full before any of it is loaded."""

from collections.abc import Mapping
from typing import Any

import torch

from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.payload import FLUSH, REMOVE

FORMAT = 1
"""Version of the state's layout."""

_KEYS = (
    "format",
    "rank",
    "world_size",
    "parameters",
    "step",
    "residual",
    "capacity",
    "announce",
    "flush_at",
    "remove_at",
    "removed",
)


def check(state: Mapping[str, Any], shapes: Mapping[str, torch.Tensor], exchange: Exchange | None, *, momentum: float) -> None:
    """Raise a ``ValueError`` that names what does not fit.

    Args:
        state: from ``state_dict()``.
        shapes: parameter name -> a tensor of its shape.
        exchange: of this rank; None where there is no process group yet, and rank and world size cannot be checked.
        momentum: the hook's.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state must be a mapping, as state_dict() returns it, got a {type(state).__name__}")
    if "format" in state and state["format"] != FORMAT:
        raise ValueError(f"state['format'] must be {FORMAT}, got {state['format']!r}: it was saved by another version of gradcomp")
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise ValueError(f"state must be one that state_dict() returned: it has no {missing}")
    _check_numbers(state)
    if exchange is not None:
        for key, own in (("world_size", exchange.world_size), ("rank", exchange.rank)):
            if state[key] is not None and state[key] != own:
                raise ValueError(f"state[{key!r}] must be this process's {own}, got {state[key]}: residuals belong to their rank")
    own_shapes = {name: list(like.shape) for name, like in shapes.items()}
    if state["parameters"] != own_shapes:
        raise ValueError(f"state['parameters'] must be those of the model, {_difference(state['parameters'], own_shapes)}")
    velocities = state.get("velocity", {})  # states of hooks without momentum had none
    for part, held in (("residual", state["residual"]), ("velocity", velocities), ("capacity", state["capacity"])):
        if not isinstance(held, Mapping):
            raise ValueError(f"state[{part!r}] must map parameter names, got a {type(held).__name__}")
        unknown = sorted(set(held) - set(shapes))
        if unknown:
            raise ValueError(f"state[{part!r}] has parameters that the model has not: {unknown}")
    for part, held in (("residual", state["residual"]), ("velocity", velocities)):
        for name, tensor in held.items():
            _check_tensor(f"state[{part!r}][{name!r}]", tensor, shapes[name].shape)
    if velocities and not momentum:
        raise ValueError("state['velocity'] must be empty for a hook with momentum 0: register with the momentum that it was saved with")
    for name, sizes in state["capacity"].items():
        numel = shapes[name].numel()
        if not (isinstance(sizes, (list, tuple)) and len(sizes) == 2 and all(_is_count(size) and size <= numel for size in sizes)):
            raise ValueError(f"state['capacity'][{name!r}] must be two integers in 0..{numel}, got {sizes!r}")


def _difference(saved: object, own: Mapping[str, list[int]]) -> str:
    """The first few names of which only one side knows, or knows another shape."""
    if not isinstance(saved, Mapping):
        return f"got a {type(saved).__name__}"
    pairs = [(name, saved.get(name, "nothing"), own.get(name, "nothing")) for name in sorted({*saved, *own})]
    listed = [f"{name}: {theirs} instead of {ours}" for name, theirs, ours in pairs if theirs != ours]
    return "got " + ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_numbers(state: Mapping[str, Any]) -> None:
    for key in ("step", "announce"):
        if not _is_count(state[key]):
            raise ValueError(f"state[{key!r}] must be an integer >= 0, got {state[key]!r}")
    if state["announce"] & ~(FLUSH | REMOVE):
        raise ValueError(f"state['announce'] must be made of the flags {FLUSH} and {REMOVE}, got {state['announce']!r}")
    for key in ("remove_at", "removed_from"):
        if not (state.get(key) is None or _is_count(state[key])):
            raise ValueError(f"state[{key!r}] must be a step or None, got {state[key]!r}")
    if not (isinstance(state["flush_at"], (list, tuple)) and all(map(_is_count, state["flush_at"]))):
        raise ValueError(f"state['flush_at'] must be a list of steps, got {state['flush_at']!r}")
    if not isinstance(state["removed"], bool):
        raise ValueError(f"state['removed'] must be True or False, got {state['removed']!r}")


def _check_tensor(field: str, residual: object, shape: torch.Size) -> None:
    if not isinstance(residual, torch.Tensor) or residual.dtype != torch.float32:
        raise ValueError(f"{field} must be an fp32 tensor, got {getattr(residual, 'dtype', type(residual).__name__)}")
    if residual.shape != shape:
        raise ValueError(f"{field} must have the parameter's shape {tuple(shape)}, got {tuple(residual.shape)}")
    if not bool(residual.isfinite().all()):
        raise ValueError(f"{field} must be finite")
