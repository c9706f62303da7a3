"""Masks of tensors at rest: how one is applied, and how several are written to a file."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradcomp.core import codec

FORMAT = 1


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements are one in memory, so that they cannot be written one by one."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape))


class FakeSparsity(nn.Module):
    """A parametrization that applies a mask: ``data * mask``, and 0 where the mask is 0, whatever the data is there.

    Args:
        mask: the shape of the data; held, not copied.
    """

    mask: torch.Tensor

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """The masked data, a new tensor; gradients flow where the mask is not 0."""
        if self.mask.shape != data.shape:
            raise ValueError(f"mask must have the data's shape {tuple(data.shape)}, got {tuple(self.mask.shape)}")
        mask = self.mask.to(data.dtype, copy=True)  # the graph keeps it, and the next step writes to the live one
        return (data * mask).masked_fill(mask == 0, 0)


def to_sparse(states: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The states with their masks as sparse COO tensors. Mutates and returns its argument."""
    for state in states.values():
        if "mask" in state:
            state["mask"] = state["mask"].to_sparse_coo()
    return states


def to_dense(states: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The states with their masks dense. Mutates and returns its argument."""
    for state in states.values():
        if "mask" in state:
            state["mask"] = state["mask"].to_dense()
    return states


def write_masks(path: str | Path, masks: dict[str, torch.Tensor]) -> None:
    """Write bool masks: Elias-Fano indices of the ones or of the zeros, whichever are fewer; 1 bit an element at most."""
    packed = {}
    for name, mask in masks.items():
        flat = mask.detach().cpu().reshape(-1).numpy()
        ones = int(np.count_nonzero(flat))
        inverted = 2 * ones > flat.size
        indices = np.flatnonzero(~flat if inverted else flat)
        encoded = torch.from_numpy(codec.encode_indices(indices, flat.size, indices.size).copy())
        packed[name] = {"shape": list(mask.shape), "count": indices.size, "inverted": inverted, "indices": encoded}
    torch.save({"gradcomp_masks": FORMAT, "masks": packed}, path)


def read_masks(path: str | Path) -> dict[str, torch.Tensor]:
    """Read what :func:`write_masks` wrote: bool masks by name.

    Raises:
        ValueError: another kind of file.
        PayloadError: damaged indices.
    """
    saved = torch.load(path, weights_only=True)
    if not isinstance(saved, dict) or saved.get("gradcomp_masks") != FORMAT:
        raise ValueError(f"{path} must hold masks of save_masks, format {FORMAT}")
    masks = {}
    for name, packed in saved["masks"].items():
        numel = torch.Size(packed["shape"]).numel()
        indices = codec.decode_indices(packed["indices"].numpy(), numel, packed["count"], packed["count"])
        flat = np.full(numel, packed["inverted"])
        flat[indices] = not packed["inverted"]
        masks[name] = torch.from_numpy(flat).view(packed["shape"])
    return masks
