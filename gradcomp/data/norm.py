"""Ready-made data sparsifiers: by the norm of blocks, and by the magnitude of elements."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from gradcomp.core.rules import number
from gradcomp.core.scan import CHUNK
from gradcomp.data.base import BaseDataSparsifier
from gradcomp.errors import DataError

NORMS = ("L1", "L2")


class ThresholdSparsifier(BaseDataSparsifier):
    """Leaves out elements with ``|x| < threshold``; an element equal to it stays, and so does one that is not a number.

    Args:
        data_list: (name, data) pairs to add.
        threshold: magnitude, at least 0, in the data's own units; can be overridden by name.

    Raises:
        ValueError: ``threshold`` is not a number of at least 0.
    """

    def __init__(self, data_list: Iterable[tuple[str, Any]] | None = None, threshold: float = 0.01) -> None:
        super().__init__(data_list=data_list, threshold=_at_least_zero(threshold))

    def update_mask(self, name: str, data: torch.Tensor, **config: Any) -> None:
        """Set the mask to 0 where ``|data| < threshold``."""
        threshold = _at_least_zero(config["threshold"])
        mask, values = self.state[name]["mask"], data.detach()
        if not (mask.is_contiguous() and values.is_contiguous()):
            mask.copy_(~(magnitude_of(values) < threshold))
            return
        for out, part in zip(torch.split(mask.view(-1), CHUNK), torch.split(values.view(-1), CHUNK)):
            torch.logical_not(magnitude_of(part) < threshold, out=out)


def magnitude_of(data: torch.Tensor) -> torch.Tensor:
    """``|x|`` in fp32, fp64 for what is wider: integers have no magnitude of their smallest number, half precision compares as fp32."""
    if data.is_complex() or data.dtype in (torch.float32, torch.float64):
        return data.abs()
    return data.to(torch.float64 if data.dtype in (torch.int64, torch.int32) else torch.float32).abs_()


class _WholeBlock(int):
    """A number of zeros that was not given: all of the block, whatever block a name has."""


def _at_least_zero(threshold: object) -> float:
    value = number("threshold", threshold)
    if not value >= 0:
        raise ValueError(f"threshold must be at least 0, got {threshold!r}")
    return value


class DataNormSparsifier(BaseDataSparsifier):
    """Leaves out the blocks with the smallest norm, or the smallest elements of those blocks.

    Blocks tile the last two dimensions from index 0, at the edges with what is there; one-dimensional data is one row. Of all blocks,
    ``round(sparsity_level * num_blocks)`` are chosen by the smallest mean norm of their elements, and in each the ``zeros_per_block``
    smallest elements are left out. ``sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2`` is 2:4 sparsity.

    Args:
        data_list: (name, data) pairs to add.
        sparsity_level: share of the blocks; at 0 and below nothing is left out.
        sparse_block_shape: (rows, columns), each at least 1.
        zeros_per_block: 0 to rows * columns; all of the block if None.
        norm: ``L1`` or ``L2``.

    All of them can be overridden by name in ``add_data``.

    Raises:
        DataError: (an AssertionError too) another norm.
        ValueError: from ``step``, blocks or zeros out of their range.
    """

    def __init__(
        self,
        data_list: Iterable[tuple[str, Any]] | None = None,
        sparsity_level: float = 0.5,
        sparse_block_shape: tuple[int, int] = (1, 4),
        zeros_per_block: int | None = None,
        norm: str = "L1",
    ) -> None:
        self.norm = _known_norm(norm)
        zeros = _WholeBlock(math.prod(sparse_block_shape)) if zeros_per_block is None else zeros_per_block
        defaults = {"sparsity_level": sparsity_level, "sparse_block_shape": sparse_block_shape, "zeros_per_block": zeros}
        super().__init__(data_list=data_list, **defaults)

    def add_data(self, name: str, data: Any, reuse_mask: bool = True, **config: Any) -> torch.Tensor:
        """As :meth:`BaseDataSparsifier.add_data`; blocks of another shape are left out whole unless ``zeros_per_block`` was given."""
        if "norm" in config:
            _known_norm(config["norm"])
        if isinstance(self.defaults["zeros_per_block"], _WholeBlock) and "sparse_block_shape" in config:
            config.setdefault("zeros_per_block", _WholeBlock(math.prod(config["sparse_block_shape"])))
        return super().add_data(name, data, reuse_mask, **config)

    def update_mask(self, name: str, data: torch.Tensor, **config: Any) -> None:
        """Set the mask to 0 as the class says."""
        level, (rows, columns), zeros = config["sparsity_level"], config["sparse_block_shape"], config["zeros_per_block"]
        size = rows * columns
        if min(rows, columns) < 1:
            raise ValueError(f"sparse_block_shape of {name!r} must be two integers >= 1, got {(rows, columns)}")
        if zeros is None or isinstance(zeros, _WholeBlock):
            zeros = size
        if not 0 <= zeros <= size:
            raise ValueError(f"zeros_per_block of {name!r} must be between 0 and the block's {size} elements, got {zeros}")
        norm = _known_norm(config.get("norm", self.norm))
        mask = self.state[name]["mask"]
        if level <= 0 or zeros == 0 or not data.numel():
            return
        if level >= 1 and zeros == size:
            mask.fill_(0)
            return
        blocks = _Blocks(data, rows, columns)
        importance = blocks.magnitude if norm == "L1" else blocks.magnitude.double().square()  # fp32 would overflow
        count = min(blocks.count, round(level * blocks.count))
        chosen = _smallest(blocks.mean_of(importance), count)
        mask.copy_(blocks.without(chosen, zeros).view(mask.shape))


def _known_norm(norm: object) -> str:
    if norm not in NORMS:
        raise DataError(f"norm must be one of {list(NORMS)}, got {norm!r}")
    return str(norm)


class _Blocks:
    """Magnitudes of a tensor cut into blocks: [matrices, block rows, block columns, rows * columns], 0 outside of the tensor."""

    def __init__(self, data: torch.Tensor, rows: int, columns: int) -> None:
        self._rows, self._columns = rows, columns
        magnitude = magnitude_of(data.detach())
        flat = magnitude.reshape(1, 1, -1) if data.dim() < 2 else magnitude.reshape(-1, *data.shape[-2:])
        self._height, self._width = flat.shape[-2:]
        down, right = -self._height % rows, -self._width % columns
        self._grid = (flat.shape[0], (self._height + down) // rows, (self._width + right) // columns)
        self.outside: torch.Tensor | None = None
        if down or right:
            real = torch.ones((1, self._height, self._width), dtype=torch.bool, device=flat.device)
            self.outside = ~self._cut(torch.nn.functional.pad(real, (0, right, 0, down)))
            flat = torch.nn.functional.pad(flat, (0, right, 0, down))
        self.magnitude = self._cut(flat)

    def _cut(self, flat: torch.Tensor) -> torch.Tensor:
        _, down, across = self._grid
        return flat.reshape(flat.shape[0], down, self._rows, across, self._columns).transpose(2, 3).flatten(3)

    @property
    def count(self) -> int:
        """Number of blocks."""
        return math.prod(self._grid)

    def mean_of(self, importance: torch.Tensor) -> torch.Tensor:
        """Mean over a block's real elements, by block: float [count]."""
        if self.outside is None:
            return importance.mean(-1).reshape(-1)
        return (importance.sum(-1) / (~self.outside).sum(-1)).reshape(-1)

    def without(self, chosen: torch.Tensor, zeros: int) -> torch.Tensor:
        """Bool, True where an element stays: all but the ``zeros`` smallest of each chosen block."""
        size = self._rows * self._columns
        kept = torch.ones(self.count, size, dtype=torch.bool, device=chosen.device)
        if zeros == size:
            kept[chosen] = False
        else:
            inside = self.magnitude.nan_to_num(nan=torch.inf)
            if self.outside is not None:
                inside = inside.masked_fill(self.outside, torch.inf)  # what is outside of the tensor comes last
            inside = inside.reshape(-1, size)[chosen]
            kept[chosen] = torch.ones_like(inside, dtype=torch.bool).scatter_(1, inside.topk(zeros, largest=False).indices, False)
        matrices, down, across = self._grid
        whole = kept.view(matrices, down, across, self._rows, self._columns).transpose(2, 3)
        return whole.reshape(matrices, down * self._rows, across * self._columns)[:, : self._height, : self._width].contiguous()


def _smallest(norms: torch.Tensor, count: int) -> torch.Tensor:
    """Bool [N]: the ``count`` smallest, without a sort; NaN is largest, ties go to the lowest index."""
    chosen = torch.zeros(norms.numel(), dtype=torch.bool, device=norms.device)
    if not count:
        return chosen
    norms = norms.nan_to_num(nan=torch.inf, posinf=torch.inf)
    kth = norms.kthvalue(count).values
    chosen = norms < kth
    ties = (norms == kth).nonzero().view(-1)
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen
