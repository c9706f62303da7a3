"""Whether a saved state fits: checked in full before any of it is loaded."""

from collections.abc import Mapping
from typing import Any

import torch

from gradcomp.ddp.exchange import Exchange

FORMAT = 1
"""Version of the state's layout."""

_KEYS = {"format", "rank", "world_size", "step", "residual", "capacity", "announce", "flush_at", "remove_at", "removed"}


def check(state: Mapping[str, Any], shapes: Mapping[str, torch.Tensor], exchange: Exchange | None) -> None:
    """Raise a ``ValueError`` that names what does not fit.

    Args:
        state: from ``state_dict()``.
        shapes: parameter name -> a tensor of its shape.
        exchange: of this rank; None where there is no process group yet, and rank and world size cannot be checked.
    """
    missing = _KEYS - state.keys()
    if "format" in state and state["format"] != FORMAT:
        raise ValueError(f"state['format'] must be {FORMAT}, got {state['format']!r}: it was saved by another version of gradcomp")
    if missing:
        raise ValueError(f"state must have the keys {sorted(_KEYS)}, {sorted(missing)} are missing")
    if exchange is not None:
        for key, own in (("world_size", exchange.world_size), ("rank", exchange.rank)):
            if state[key] is not None and state[key] != own:
                raise ValueError(f"state[{key!r}] must be this process's {own}, got {state[key]}: residuals belong to their rank")
    for part in ("residual", "capacity"):
        unknown = sorted(set(state[part]) - set(shapes))
        if unknown:
            raise ValueError(f"state[{part!r}] has parameters that the model has not: {unknown}")
    for name, residual in state["residual"].items():
        if residual.shape != shapes[name].shape:
            raise ValueError(
                f"state['residual'][{name!r}] must have the parameter's shape {tuple(shapes[name].shape)}, got {tuple(residual.shape)}"
            )
        if not bool(residual.isfinite().all()):
            raise ValueError(f"state['residual'][{name!r}] must be finite")
