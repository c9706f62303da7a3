"""Sparsifying tensors at rest: masks that are owned here, not by the model, and applied to the tensors themselves only when asked.

The public contract is that of ``torch.ao.pruning._experimental.data_sparsifier``, which is no longer maintained: code written for it
runs after changing its imports. Nothing of ``torch.ao`` is imported.
"""

import abc
import copy
import re
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradcomp.data.container import Container
from gradcomp.data.masks import FakeSparsity, is_expanded
from gradcomp.data.saving import Saving
from gradcomp.errors import DataError, warn

EMBEDDING_TYPES = {nn.Embedding, nn.EmbeddingBag}
"""Modules whose ``weight`` is the data; subclasses too."""

SUPPORTED_TYPES = {torch.Tensor, nn.Parameter, *EMBEDDING_TYPES}
"""What :meth:`BaseDataSparsifier.add_data` takes; subclasses too."""


UNSUPPORTED = {getattr(torch, name) for name in dir(torch) if re.fullmatch(r"uint(16|32|64)|float8_\w+|float4_\w+", name)}
"""dtypes that torch stores and does not multiply."""


class BaseDataSparsifier(Saving, abc.ABC):
    """Masks for named tensors, parameters and embeddings; a subclass says in :meth:`update_mask` which elements do not matter.

    The same object is a rule for gradients (``gradcomp.register(model, sparsifier)``, with parameter names), for tensors at rest
    (:meth:`add_data`) and for activations (:func:`gradcomp.core.rules.fill_mask`).

    Args:
        data_list: (name, data) pairs to add.
        **defaults: configuration of every name that is not overridden in :meth:`add_data`; passed on to :meth:`update_mask`.

    Attributes:
        state: name -> ``{"mask": tensor}`` and whatever :meth:`update_mask` keeps there. A mask has the shape and dtype of its data, 1
            where an element stays and 0 where it is left out.
        data_groups: name -> configuration. A name that has a configuration and no data configures a gradient or an activation.
        defaults: the configuration of the others.
        enable_mask_update: whether :meth:`step` does anything.
    """

    def __init__(self, data_list: Iterable[tuple[str, Any]] | None = None, **defaults: Any) -> None:
        self.defaults: dict[str, Any] = defaults
        self.state: dict[str, dict[str, Any]] = defaultdict(dict)
        self.data_groups: dict[str, dict[str, Any]] = {}
        self.enable_mask_update = True
        self._container = Container()
        self._whole: dict[str, torch.Tensor] = {}  # masks of which a shorter batch uses the first rows
        self._returned: dict[str, weakref.ref[torch.Tensor]] = {}
        for name, data in data_list or ():
            self.add_data(name, data, **copy.deepcopy(self.defaults))

    def prepare(self, model: object, config: object) -> None:
        """Of model sparsifiers; not defined here."""
        raise NotImplementedError("a data sparsifier has no prepare: give it tensors, parameters or embeddings with add_data")

    @abc.abstractmethod
    def update_mask(self, name: str, data: torch.Tensor, **config: Any) -> None:
        """Change ``self.state[name]["mask"]``, which is all ones, in place: 0 where an element of ``data`` does not matter.

        Args:
            name: of the data.
            data: as it is without its mask.
            config: of this name.
        """

    # Data

    def add_data(self, name: str, data: Any, reuse_mask: bool = True, **config: Any) -> torch.Tensor:
        """Hold ``data`` under ``name``, masked from now on; the data itself is not changed before :meth:`squash_mask`.

        Data of the same name is replaced, with a UserWarning; its configuration stays but for what is given, and so does its mask
        unless ``mask`` is given or ``reuse_mask`` is False. A batch that is only shorter in dimension 0 uses the mask's first rows.

        Args:
            name: any string; dots are allowed.
            data: a Tensor, Parameter, Embedding or EmbeddingBag (subclasses too), strided. The tensor itself is held, not a copy.
            reuse_mask: whether a mask of the same name is used again.
            **config: of this name, over the defaults. ``mask``: the first mask; ``parametrization``: a class, made with the mask, that
                is applied instead of :class:`FakeSparsity`.

        Returns:
            The data with its mask applied: a new tensor, which later steps and squashes bring up to date.

        Raises:
            DataError: (an AssertionError too) another type of data, or a shape that the mask does not fit.
        """
        known = name in self.state and name in self.data_groups
        if known:
            warn(f"the data called {name!r} is replaced; was another name meant?")
        return self._hold(name, data, reuse_mask, config, known)

    def replace_data(self, name: str, data: Any, **config: Any) -> torch.Tensor:
        """As :meth:`add_data` with ``reuse_mask=True``, for data that is replaced on purpose: without a warning."""
        return self._hold(name, data, True, config, name in self.state and name in self.data_groups)

    def _hold(self, name: str, data: Any, reuse_mask: bool, config: dict[str, Any], known: bool) -> torch.Tensor:
        weight = self._extract_weight(data)
        settings = copy.deepcopy(self.data_groups[name] if known else {**self.defaults, **self.data_groups.get(name, {})})
        settings.update(config)
        mask = settings.get("mask")
        if known and reuse_mask and "mask" not in config and self._has_mask(name):
            whole = self._whole.get(name, self.state[name]["mask"])
            mask = self._rows_for(name, weight, whole)
            if mask.shape != whole.shape:
                self._whole[name] = whole
        elif known:
            self._whole.pop(name, None)
            if "mask" not in config:
                mask = None
                settings.pop("mask", None)
        if mask is None:
            mask = torch.ones_like(weight, requires_grad=False)
        elif not isinstance(mask, torch.Tensor) or mask.shape != weight.shape:
            raise DataError(f"mask of {name!r} must be a tensor of the data's shape {tuple(weight.shape)}, got {_shape_of(mask)}")
        mask = mask.to(weight.device, weight.dtype)
        mask = mask.clone() if is_expanded(mask) else mask
        self._try_layer(name, weight, mask, settings)
        kept = {key: value for key, value in self.state[name].items() if key != "mask"} if known and reuse_mask else {}
        if known:
            self._delete_data(name)
        return self._register(name, weight, mask, settings, kept)

    def _try_layer(self, name: str, weight: torch.Tensor, mask: torch.Tensor, settings: dict[str, Any]) -> None:
        """Raise before anything is replaced if the layer does not fit the data."""
        make = settings.get("parametrization", FakeSparsity)
        if make is not FakeSparsity:
            Container().hold(name, weight.detach().clone(), make(mask))

    def _register(
        self,
        name: str,
        weight: torch.Tensor,
        mask: torch.Tensor,
        settings: dict[str, Any],
        kept: dict[str, Any],
        *,
        is_original: bool = False,
    ) -> torch.Tensor:
        layer = settings.get("parametrization", FakeSparsity)(mask)
        value = self._container.hold(name, weight, layer, is_original=is_original)
        self.state[name] = {**kept, "mask": mask}
        self.data_groups[name] = settings
        self._returned[name] = weakref.ref(value)
        return value

    def _rows_for(self, name: str, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The part of a mask of ``name`` that fits ``weight``: all of it, or its first rows."""
        if weight.shape == mask.shape:
            return mask
        if weight.dim() and weight.dim() == mask.dim() and weight.shape[1:] == mask.shape[1:] and len(weight) < len(mask):
            return mask[: len(weight)]
        text = f"data of {name!r} must have the shape of its mask, {tuple(mask.shape)}, or fewer rows, got {tuple(weight.shape)}"
        raise DataError(f"{text}: pass reuse_mask=False to begin anew")

    def _extract_weight(self, data: Any) -> torch.Tensor:
        """The tensor of a supported type of data."""
        if isinstance(data, (nn.Embedding, nn.EmbeddingBag)) and "weight" not in data._parameters:
            raise DataError(f"data must have its weight as a parameter, that of the {type(data).__name__} is computed: remove what does it")
        weight: Any = data.weight if isinstance(data, (nn.Embedding, nn.EmbeddingBag)) else data
        if not isinstance(weight, torch.Tensor):
            raise DataError(f"data must be a Tensor, Parameter, Embedding or EmbeddingBag, got a {type(data).__name__}")
        if weight.layout != torch.strided or weight.is_quantized:
            raise DataError(f"data must be strided and not quantized, got {weight.layout}, {weight.dtype}")
        if weight.dtype in UNSUPPORTED:
            raise DataError(f"data must be of a dtype that torch computes with, got {weight.dtype}")
        return weight

    def _delete_data(self, name: str) -> None:
        """Forget a name; the data stays as it is."""
        self._container.drop(name)
        for held in (self.state, self.data_groups, self._returned):
            held.pop(name, None)

    def _has_mask(self, name: str) -> bool:
        return name in self.state and "mask" in self.state[name]

    def get_data(self, name: str, return_original: bool = True) -> torch.Tensor:
        """The data of ``name``: the tensor that was added, or with ``return_original=False`` what its mask leaves of it.

        Raises:
            ValueError: no such name, or the original of data whose mask was squashed.
        """
        if not self._container.holds(name):
            raise ValueError(f"name must be one of the data's, {sorted(self._names())}, got {name!r}")
        if not return_original:
            return self._container.seen(name)
        if not self._container.is_covered(name):
            raise ValueError(f"the mask of {name!r} was squashed: the original does not exist any more")
        return self._container.original(name)

    def get_mask(self, name: str) -> torch.Tensor:
        """The live mask of ``name``, in its data's dtype.

        Raises:
            ValueError: no such name.
        """
        if not self._has_mask(name):
            raise ValueError(f"name must be one of the data's, {sorted(self._names())}, got {name!r}")
        mask: torch.Tensor = self.state[name]["mask"]
        return mask

    def _names(self) -> list[str]:
        return [name for name in self.data_groups if self._has_mask(name)]

    # Steps

    def step(self) -> None:
        """Compute every mask anew, from ones, with :meth:`update_mask`; where that raises, the mask stays at ones.

        Data whose mask was squashed is left alone. Of a batch shorter than its mask the first rows are computed, the others stay.
        """
        if not self.enable_mask_update:
            return
        with torch.no_grad():
            for name in self._names():
                if self._container.is_covered(name):
                    mask = self.get_mask(name)
                    mask.fill_(1)
                    self.update_mask(name, self.get_data(name), **self.data_groups[name])
                    self._keep_in_place(name, mask)
                    self._refresh(name)

    def _keep_in_place(self, name: str, mask: torch.Tensor) -> None:
        """Undo what an ``update_mask`` may do instead of editing in place: another tensor, another dtype."""
        new = self.state[name]["mask"]
        if new is not mask or new.dtype != self._container.original(name).dtype:
            values = new.detach().to(self._container.original(name).dtype, copy=True)
            mask.data = mask.data.to(values.dtype)
            mask.copy_(values)
            self.state[name]["mask"] = mask

    def _refresh(self, name: str) -> None:
        """Bring the value that :meth:`add_data` returned up to date, if somebody still has it."""
        returned = self._returned[name]() if name in self._returned else None
        if returned is not None:
            value = self._container.seen(name)
            if value is not returned:
                returned.data.copy_(value)

    def squash_mask(self, *args: Any, leave_parametrized: bool = True, names: Iterable[str] | None = None, **kwargs: Any) -> None:
        """Make masks final: apply them to the tensors that were added, in place, or let go of them.

        Args:
            leave_parametrized: True multiplies the data by its mask, so that a model's embedding becomes sparse now; False leaves the
                data as it is. (The name is that of ``torch.nn.utils.parametrize.remove_parametrizations``.)
            names: of the data; all if None. What is squashed already stays so.
            *args, **kwargs: accepted as upstream does, and without a meaning there too.

        Raises:
            ValueError: a name that has no data.

        Mutates: the data.
        """
        chosen = self._names() if names is None else [names] if isinstance(names, str) else list(names)
        for name in chosen:
            self.get_mask(name)
        for name in chosen:
            if not self._container.is_covered(name):
                continue
            if leave_parametrized:
                original, value = self._container.original(name), self.get_data(name, return_original=False)
                with torch.no_grad():
                    original.set_(value) if is_expanded(original) else original.copy_(value)  # type: ignore[call-overload]
            self._container.uncover(name)
            self._refresh(name)

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for name, config in self.data_groups.items():
            lines.append(f"  {name}: " + ", ".join(f"{key}={config[key]}" for key in sorted(config) if key != "mask"))
        return "\n".join([*lines, ")"])


def _shape_of(mask: object) -> object:
    return tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
