"""How a data sparsifier is saved, loaded, copied and pickled."""

import copy
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gradcomp.data.container import Container, key_of
from gradcomp.data.masks import FakeSparsity, is_expanded, read_masks, to_dense, to_sparse, write_masks


class Saving:
    """The part of :class:`gradcomp.data.BaseDataSparsifier` that is about its state."""

    state: dict[str, dict[str, Any]]
    data_groups: dict[str, dict[str, Any]]
    _container: Container
    _whole: dict[str, torch.Tensor]
    _returned: dict[str, Any]

    def get_mask(self, name: str) -> torch.Tensor:
        """The live mask of a name."""
        raise NotImplementedError

    def _names(self) -> list[str]:
        raise NotImplementedError

    def _refresh(self, name: str) -> None:
        raise NotImplementedError

    def _delete_data(self, name: str) -> None:
        raise NotImplementedError

    def _register(
        self, name: str, weight: torch.Tensor, mask: torch.Tensor, settings: dict[str, Any], kept: dict[str, Any], *, is_original: bool
    ) -> Any:
        raise NotImplementedError

    def compact(self) -> dict[str, torch.Tensor]:
        """The masks as new bool tensors, one byte an element, by name."""
        return {name: self._whole_mask(name) != 0 for name in self._names()}

    def _whole_mask(self, name: str) -> torch.Tensor:
        """The mask of a name, with the rows that a shorter batch does not use."""
        return self._whole.get(name, self.get_mask(name))

    def save_masks(self, path: str | Path) -> None:
        """Write all masks to a file: Elias-Fano indices of the ones or of the zeros, whichever are fewer; a bitmap at most."""
        write_masks(path, self.compact())

    def load_masks(self, path: str | Path) -> None:
        """Take over masks of :meth:`save_masks`, for the names that have data. All or none.

        Raises:
            ValueError: not such a file, or a name that has no data or another shape.
        """
        masks = read_masks(path)
        for name, mask in masks.items():
            if mask.shape != self._whole_mask(name).shape:
                raise ValueError(f"the mask of {name!r} must have the shape {tuple(self._whole_mask(name).shape)}, got {tuple(mask.shape)}")
        for name, mask in masks.items():
            self._whole_mask(name).copy_(mask)
            self._refresh(name)

    def state_dict(self) -> dict[str, Any]:
        """``state`` (masks as sparse COO, by name of data), ``data_groups`` and ``_container`` (the data). A copy."""
        states = {name: {**copy.deepcopy(self.state[name]), "mask": self._whole_mask(name)} for name in self._names()}
        return {
            "state": to_sparse(states),
            "data_groups": copy.deepcopy(self.data_groups),
            "_container": {key: tensor.detach().clone() for key, tensor in self._container.state_dict().items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from :meth:`state_dict`: masks, configuration, data, and whether each name was squashed.

        Data that is held under the same name with the same shape and dtype is overwritten in place, so that it stays the tensor that
        was added; other data is held as new tensors.

        Args:
            state_dict: of this class, or of torch's data sparsifiers.
            strict: whether names that are not in it are forgotten; otherwise they stay.

        Raises:
            ValueError: a name without data, or a mask that does not fit its data; nothing is loaded then.
        """
        states, groups = to_dense(copy.deepcopy(dict(state_dict["state"]))), copy.deepcopy(dict(state_dict["data_groups"]))
        saved = state_dict["_container"]
        loaded = {}
        for name in states:
            whole, part = key_of(name), f"parametrizations.{key_of(name)}.original"
            if name not in groups or (whole not in saved and part not in saved):
                raise ValueError(f"state_dict must have configuration and data of {name!r}, it has not")
            data, parametrized = (saved[part], True) if part in saved else (saved[whole], False)
            mask = states[name].setdefault("mask", torch.ones_like(data))
            if mask.shape != data.shape and not (mask.shape[1:] == data.shape[1:] and mask.dim() and len(mask) >= len(data)):
                raise ValueError(f"the mask of {name!r} must have its data's shape {tuple(data.shape)}, got {tuple(mask.shape)}")
            loaded[name] = data, parametrized
        held = {name: self._container.original(name) for name in self._names()}
        returned = dict(self._returned)
        for name in list(held) if strict else [name for name in held if name in states]:
            self._delete_data(name)
        if strict:
            self.state.clear()
            self.data_groups.clear()
        self._whole.clear()
        for name, (saved_data, parametrized) in loaded.items():
            data, state = _into(held.get(name), saved_data), states[name]
            mask = state.pop("mask").to(data.device, data.dtype)
            if mask.shape != data.shape:
                self._whole[name] = mask
            self._register(name, data, mask if mask.shape == data.shape else mask[: len(data)], groups.pop(name), state, is_original=True)
            self._container.load_layer(name, saved)
            if not parametrized:
                self._container.uncover(name)
            if name in returned:
                self._returned[name] = returned[name]
                self._refresh(name)
        self.data_groups.update(groups)  # of names without data

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key not in ("_container", "_returned", "step")}
        data = {}
        for name in self._names():
            original = self._container.original(name)  # what is no leaf of a graph cannot be copied as such
            data[name] = (original if original.is_leaf else original.detach(), self._container.layer(name))
        return {**kept, "state": dict(self.state), "_data": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        data = state.pop("_data")
        self.__dict__.update(state)
        self.state = defaultdict(dict, state["state"])
        self._container = Container()
        self._returned = {}
        for name, (tensor, layer) in data.items():
            if isinstance(layer, FakeSparsity):
                layer.mask = self.state[name]["mask"]  # one tensor, as before
            self._container.hold(name, tensor, layer, is_original=True)


def _into(held: torch.Tensor | None, saved: torch.Tensor) -> torch.Tensor:
    """The tensor held before, with the saved values, where it can take them; a copy of them otherwise."""
    if held is None or held.shape != saved.shape or held.dtype != saved.dtype or is_expanded(held):
        return saved.detach().clone()
    with torch.no_grad():
        return held.copy_(saved)
