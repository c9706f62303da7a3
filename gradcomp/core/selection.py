"""Mask -> indices -> values -> dense again: what was selected of a tensor, and the way back.

:func:`select` is the one road from a rule to indices, for gradients in the hook as for any tensor given to :func:`compress`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from gradcomp.core import scan
from gradcomp.core.rules import AnyRule, Dense, Threshold, TopK, check_rule, fill_mask


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """K elements of a dense tensor of N.

    Attributes:
        indices: int64 [K], flat (row-major), strictly ascending.
        values: [K], the tensor's dtype.
        shape: of the dense tensor.
        dtype: of the dense tensor.
    """

    indices: torch.Tensor
    values: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype

    @property
    def density(self) -> float:
        """K / N; 0.0 for an empty tensor."""
        return self.indices.numel() / max(1, self.shape.numel())

    def coordinates(self) -> torch.Tensor:
        """int64 [K, ndim]: one row an element, as ``torch.nonzero(mask)``. Shape [K, 0] for a 0-d tensor."""
        columns = self.coordinates_tuple()
        return torch.stack(columns, 1) if columns else self.indices.new_empty(self.indices.numel(), 0)

    def coordinates_tuple(self) -> tuple[torch.Tensor, ...]:
        """ndim int64 tensors of [K], as ``torch.nonzero(mask, as_tuple=True)``; ``()`` for a 0-d tensor, which is what indexes it."""
        if not self.shape:
            return ()
        return tuple(torch.unravel_index(self.indices, self.shape))

    def add_to_(self, dense: torch.Tensor) -> torch.Tensor:
        """Add the values to ``dense`` (any dtype and layout, the selection's shape) at their places.

        Mutates: ``dense``, which is also returned. Selections of several ranks accumulate where they share an index.

        Raises:
            ValueError: another shape.
        """
        if dense.shape != self.shape:
            raise ValueError(f"dense must have the selection's shape {tuple(self.shape)}, got {tuple(dense.shape)}")
        if self.shape:
            dense.index_put_(self.coordinates_tuple(), self.values.to(dense.dtype), accumulate=True)
        elif self.indices.numel():
            dense.add_(self.values[0].to(dense.dtype))
        return dense

    def to_dense(self) -> torch.Tensor:
        """A new dense tensor: the values at their places, 0 elsewhere."""
        return self.add_to_(torch.zeros(self.shape, dtype=self.dtype, device=self.values.device))


class Found(NamedTuple):
    """What a rule chose of one accumulation: indices (int64, ascending), values, and whether any element seen is not finite."""

    indices: scan.Indices
    values: scan.Floats
    finite: bool


def select(rule: AnyRule, name: str, acc: scan.Accumulation, like: torch.Tensor) -> Found:
    """The elements of ``acc`` that ``rule`` says matter.

    :class:`Threshold` and :class:`TopK` never form the whole sum, and non-finite elements are always among what they find; any
    other rule is shown the whole sum in the shape and strides of ``like`` and the sum is checked in full.
    """
    if type(rule) is Threshold:
        indices, values = scan.above(acc, rule.tau)
        return Found(indices, values, bool(np.isfinite(values).all()))
    if type(rule) is TopK:
        indices, values = scan.top_k(acc, rule.count(len(acc)))
        return Found(indices, values, bool(np.isfinite(values).all()))
    whole = acc.whole()
    finite = bool(np.isfinite(whole).all())
    if type(rule) is Dense:
        return Found(np.arange(whole.size), whole, finite)
    mask = torch.zeros(whole.size, dtype=torch.bool)
    fill_mask(rule, name, _shaped(torch.from_numpy(whole), like), _shaped(mask, like))
    indices = nonzero(mask).numpy()
    return Found(indices, acc.take(indices), finite)  # taken anew: a rule may have written to what it was shown


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of ``flat``, which is in the memory order of ``like``, with the shape of ``like``."""
    return flat.as_strided(like.shape, like.stride())


def nonzero(mask: torch.Tensor, *, chunk: int = scan.CHUNK) -> torch.Tensor:
    """Flat int64 indices of the True elements of a mask of any shape, found ``chunk`` elements at a time.

    Chunks keep the pass in the cache and under the 2^31 elements that some back ends refuse in one piece; the result does not
    depend on them.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 element, got {chunk}")
    flat = mask.reshape(-1)
    parts = [torch.nonzero(piece).view(-1) + start for start, piece in zip(range(0, flat.numel(), chunk), torch.split(flat, chunk))]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=mask.device)


def compress(tensor: torch.Tensor, rule: AnyRule) -> Selection:
    """Select the elements of ``tensor`` that matter.

    Args:
        tensor: any shape (0-d and empty too), any real dtype, any strides, dense. Integers are compared as fp64.
        rule: what matters.

    Returns:
        A :class:`Selection` that aliases nothing. ``compress(t, rule).to_dense()`` is ``t`` with the rest set to 0.

    Raises:
        ValueError: ``rule`` is not a rule, or ``tensor`` is complex or sparse.
    """
    rule = check_rule("rule", rule)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"tensor must be a torch.Tensor, got a {type(tensor).__name__}")
    tensor = tensor.detach().resolve_neg()
    if tensor.is_complex() or tensor.layout != torch.strided:
        raise ValueError(f"tensor must be real and dense, got {tensor.dtype}, {tensor.layout}; use view_as_real or to_dense first")
    flat = tensor.reshape(-1)
    if tensor.device.type == "cpu":
        shaped = flat.view(tensor.shape)
        indices = torch.from_numpy(select(rule, "tensor", scan.Accumulation(flat), shaped).indices)
    else:
        mask = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
        fill_mask(rule, "tensor", tensor, mask)
        indices = nonzero(mask)
    return Selection(indices, flat[indices], tensor.shape, tensor.dtype)


def decompress(selections: Selection | Iterable[Selection]) -> torch.Tensor:
    """The dense sum of one or several selections of the same shape: values at a shared index accumulate.

    Raises:
        ValueError: no selection, or different shapes.
    """
    parts = [selections] if isinstance(selections, Selection) else list(selections)
    if not parts or not all(isinstance(part, Selection) for part in parts):
        kinds = sorted({type(part).__name__ for part in parts}) or "none"
        raise ValueError(f"selections must be a Selection or several, got {kinds}; codec.decode makes one of a payload")
    dense = parts[0].to_dense()
    for part in parts[1:]:
        part.add_to_(dense)
    return dense


def compress_gradients(grad: torch.Tensor, threshold: float) -> dict[str, Any]:
    """``{"indices", "values", "shape", "dtype"}`` of the elements with ``|grad| > threshold``; see :func:`compress`."""
    chosen = compress(grad, Threshold(threshold))
    return {"indices": chosen.indices, "values": chosen.values, "shape": chosen.shape, "dtype": chosen.dtype}


def decompress_gradients(parts: dict[str, Any] | Iterable[dict[str, Any]]) -> torch.Tensor:
    """The dense gradient of one part of :func:`compress_gradients`, or the sum of several ranks' parts.

    Raises:
        ValueError: no part, a part without one of the four keys, or different shapes.
    """
    listed = [parts] if isinstance(parts, dict) else list(parts)
    for part in listed:
        missing = {"indices", "values", "shape", "dtype"} - part.keys()
        if missing:
            raise ValueError(f"a part of compress_gradients has no {sorted(missing)}")
    return decompress(Selection(p["indices"], p["values"], torch.Size(p["shape"]), p["dtype"]) for p in listed)
