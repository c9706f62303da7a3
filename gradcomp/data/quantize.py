"""Sparse, then int8, embeddings: for models whose size is in their tables."""

import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from gradcomp.data.base import BaseDataSparsifier
from gradcomp.errors import DataError

Embedding: TypeAlias = nn.Embedding | nn.EmbeddingBag

BACKENDS = ("auto", "torch", "gradcomp")


def rows_to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 by row: zero stays exactly zero.

    Args:
        weight: [rows, columns], floating, finite.

    Returns:
        int8 [rows, columns] and fp32 scales [rows]; ``weight`` is about ``int8 * scale``, off by half a scale at most.

    Raises:
        ValueError: a weight that is not finite.
    """
    values = weight.detach().float()
    if not bool(values.isfinite().all()):
        raise ValueError("weight must be finite to be quantized, got NaN or infinity in it")
    scales = values.abs().amax(1) / 127 if values.numel() else values.new_ones(len(values))
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return int8_with(values, scales), scales


def int8_with(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int8 [rows, columns] of a weight, with scales [rows] that are known already."""
    return (weight.detach().float() / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)


class _Int8Table(nn.Module):
    """int8 rows with an fp32 scale each; a quarter of fp32's size, and inference only.

    Attributes:
        int8: [num_embeddings, embedding_dim].
        scales: fp32 [num_embeddings].
    """

    int8: torch.Tensor
    scales: torch.Tensor

    def __init__(self, int8: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("int8", int8)
        self.register_buffer("scales", scales)
        self.num_embeddings, self.embedding_dim = int8.shape

    def weight(self) -> torch.Tensor:
        """The whole table, dequantized: a new fp32 [num_embeddings, embedding_dim]."""
        return self._rows(torch.arange(self.num_embeddings, device=self.int8.device))

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.int8[ids].float() * self.scales[ids].unsqueeze(-1)

    def extra_repr(self) -> str:
        """The table's size."""
        return f"{self.num_embeddings}, {self.embedding_dim}, int8"


class QuantizedEmbedding(_Int8Table):
    """``nn.Embedding`` over an int8 table, for inference."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Int [*] -> fp32 [*, embedding_dim]: only the rows that are asked for are dequantized."""
        return self._rows(ids)


class QuantizedEmbeddingBag(_Int8Table):
    """``nn.EmbeddingBag`` over an int8 table, for inference; every ``mode`` and option of the original.

    Args:
        int8, scales: of the table.
        mode: ``sum``, ``mean`` or ``max``.
        include_last_offset, padding_idx: as for ``nn.EmbeddingBag``.
    """

    def __init__(
        self,
        int8: torch.Tensor,
        scales: torch.Tensor,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(int8, scales)
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.padding_idx = padding_idx

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``nn.EmbeddingBag``: fp32 [bags, embedding_dim]. Only the rows that are asked for are dequantized, each once."""
        used, places = torch.unique(ids, return_inverse=True)
        padding = None
        if self.padding_idx is not None:
            at = (used == self.padding_idx).nonzero()
            padding = int(at[0, 0]) if len(at) else None
        rows = self._rows(used) if len(used) else self.int8.new_zeros((1, self.embedding_dim), dtype=torch.float32)
        return F.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


def post_training_sparse_quantize(
    model: nn.Module,
    data_sparsifier_class: type[BaseDataSparsifier],
    sparsify_first: bool = True,
    select_embeddings: list[nn.Module] | None = None,
    backend: str = "auto",
    **sparse_config: Any,
) -> nn.Module:
    """Sparsify and quantize a model's Embedding and EmbeddingBag modules, in place; everything else stays as it is.

    Args:
        model: whose embeddings are replaced by int8 ones. Tables that were one before are one afterwards.
        data_sparsifier_class: made with ``sparse_config``.
        sparsify_first: sparsify, then quantize; or quantize, sparsify what that gives, and quantize again with the same scales.
        select_embeddings: these modules only; all if None.
        backend: ``torch``: torch's own quantized modules; ``gradcomp``: :class:`QuantizedEmbedding` and
            :class:`QuantizedEmbeddingBag`; ``auto``: torch's where this torch has them and they compute the same (its EmbeddingBag
            knows the mode ``sum`` alone; its Embedding takes contiguous ids of one or two dimensions), else ours.
        **sparse_config: for the sparsifier.

    Returns:
        The model; a new module where the model is an embedding itself.

    Raises:
        DataError: (an AssertionError too) ``select_embeddings`` is not a list of embeddings of the model.
        ValueError: another backend, or weights that are not finite.

    Subclasses with a ``forward`` of their own, and embeddings whose weight is computed (weight norm), are left alone.

    Mutates: the model, and with ``sparsify_first`` what shares a table with other modules (tied weights): it becomes sparse there too.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {list(BACKENDS)}, got {backend!r}")
    places = list(_places(model))
    chosen = _chosen(places, select_embeddings)
    tables: dict[int, tuple[str, torch.Tensor]] = {}  # by weight: shared tables are sparsified and quantized once
    for name, module in chosen:
        weight = module.weight.detach()
        tables.setdefault(id(module.weight), (name, _renormed(weight, module)))
    for _, module in chosen:  # before anything is changed
        _convert(module, *rows_to_int8(module.weight), backend)
    sparsifier = data_sparsifier_class(**sparse_config)
    quantized = {}
    if sparsify_first:
        for name, weight in tables.values():
            sparsifier.add_data(name=name, data=weight)
        sparsifier.step()
        sparsifier.squash_mask()
        quantized = {identity: rows_to_int8(weight) for identity, (_, weight) in tables.items()}
    else:
        first = {identity: rows_to_int8(weight) for identity, (_, weight) in tables.items()}
        dequantized = {identity: int8.float() * scales[:, None] for identity, (int8, scales) in first.items()}
        for identity, (name, _) in tables.items():
            sparsifier.add_data(name=name, data=dequantized[identity])
        sparsifier.step()
        sparsifier.squash_mask()
        quantized = {identity: (int8_with(dequantized[identity], scales), scales) for identity, (_, scales) in first.items()}
    made: dict[int, nn.Module] = {}
    wanted = {id(module) for _, module in chosen}
    for name, module in places:
        if id(module) in wanted:
            new = made.setdefault(id(module), _like(module, _convert(module, *quantized[id(module.weight)], backend)))
            if not name:
                return new
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new)
    return model


def _places(model: nn.Module) -> Iterator[tuple[str, Embedding]]:
    """Every place of an embedding in the model, shared modules at each of theirs; the name of a root embedding is empty."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and _is_plain(module):
            yield name, module


def _is_plain(module: Embedding) -> bool:
    """Whether the module does what its class in torch does, with a weight of its own: others are left alone."""
    original = nn.EmbeddingBag if isinstance(module, nn.EmbeddingBag) else nn.Embedding
    return type(module).forward is original.forward and "weight" in module._parameters


def _chosen(places: list[tuple[str, Embedding]], selected: list[nn.Module] | None) -> list[tuple[str, Embedding]]:
    if selected is None:
        return places
    if not isinstance(selected, list):
        raise DataError(f"select_embeddings must be a list of embedding modules, got a {type(selected).__name__}")
    found = []
    for module in selected:
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise DataError(f"select_embeddings must be made of Embedding and EmbeddingBag modules, got a {type(module).__name__}")
        if not _is_plain(module):
            raise DataError(f"select_embeddings must be plain, a {type(module).__name__} has a forward or a computed weight of its own")
        at = next((place for place in places if place[1] is module), None)
        if at is None:
            raise DataError(f"select_embeddings must be modules of the model, {module} is none")
        found.append(at)
    return found


def _renormed(weight: torch.Tensor, module: Embedding) -> torch.Tensor:
    """The weight, its rows no longer than ``max_norm``, as a forward pass would have made them. In place."""
    if module.max_norm is not None:
        weight.copy_(torch.renorm(weight, float(module.norm_type), 0, float(module.max_norm)))
    return weight


def _convert(module: Embedding, int8: torch.Tensor, scales: torch.Tensor, backend: str) -> nn.Module:
    bag = isinstance(module, nn.EmbeddingBag)
    same = not bag or (module.mode == "sum" and module.padding_idx is None and not module.include_last_offset)
    if backend == "torch" and isinstance(module, nn.EmbeddingBag) and not same:
        raise ValueError(f"backend 'torch' has no EmbeddingBag of mode {module.mode!r} with these options: take 'auto' or 'gradcomp'")
    if backend != "gradcomp" and same:
        converted = _torch_module(module, int8, scales)
        if converted is not None:
            return converted
        if backend == "torch":
            raise ValueError("backend 'torch' needs torch.ao.nn.quantized, which this torch has not: take 'auto' or 'gradcomp'")
    if not isinstance(module, nn.EmbeddingBag):
        return QuantizedEmbedding(int8, scales)
    return QuantizedEmbeddingBag(
        int8, scales, mode=module.mode, include_last_offset=module.include_last_offset, padding_idx=module.padding_idx
    )


def _like(module: Embedding, new: nn.Module) -> nn.Module:
    """The new module with the old one's hooks and mode."""
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"):
        getattr(new, hooks).update(getattr(module, hooks))
    return new.train(module.training)


def _torch_module(module: Embedding, int8: torch.Tensor, scales: torch.Tensor) -> nn.Module | None:
    """torch's quantized module with the same table, its zero point in the middle so that zero stays zero; None where there is none."""
    options: dict[str, Any] = {"dtype": torch.quint8}
    if isinstance(module, nn.EmbeddingBag):
        options |= {"mode": "sum"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch will drop them; ours follow then
        try:
            from torch.ao.nn import quantized

            make = quantized.EmbeddingBag if isinstance(module, nn.EmbeddingBag) else quantized.Embedding
            middle = torch.full_like(scales, 128.0)
            table = torch._make_per_channel_quantized_tensor((int8.to(torch.int16) + 128).to(torch.uint8), scales, middle, 0)
        except (ImportError, AttributeError):
            return None
        converted: nn.Module = make(module.num_embeddings, module.embedding_dim, _weight=table, **options)
        return converted
