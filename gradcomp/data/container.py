"""The module that holds a data sparsifier's data: buffers, each parametrized by its mask until that is squashed."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.utils import parametrize


class Container(nn.Module):
    """Data by name. A name is the attribute that holds it, escaped where a module could not have such an attribute."""

    def hold(self, name: str, data: torch.Tensor, layer: nn.Module | None, *, is_original: bool = False) -> torch.Tensor:
        """Hold a tensor, itself and not a copy, behind ``layer`` if that is given; return what is seen of it.

        Where a layer has a ``right_inverse``, the data becomes what the layer makes itself of, unless it ``is_original`` already.
        """
        key = key_of(name)
        # register_parametrization() calls set_() on what it is given, after which a parameter's gradients pass DDP's reducer by: it is
        # given an alias, and the tensor itself comes in afterwards.
        self.register_buffer(key, data if layer is None else data.data)
        if layer is not None:
            parametrize.register_parametrization(self, key, layer)
            layers = self._layers(name)
            if hasattr(layer, "right_inverse") and not is_original:
                with torch.no_grad():
                    data.copy_(layers.original)
            layers._buffers["original"] = data
        return self.seen(name)

    def load_layer(self, name: str, saved: Mapping[str, torch.Tensor]) -> None:
        """Give the layer in front of the data what it has of its own, from a ``state_dict()``."""
        start = f"parametrizations.{key_of(name)}.0."
        layer = self.layer(name)
        if layer is not None:
            layer.load_state_dict({key[len(start) :]: value for key, value in saved.items() if key.startswith(start)}, strict=False)

    def drop(self, name: str) -> None:
        """Let go of a tensor, and leave it as it is."""
        self.uncover(name)
        delattr(self, key_of(name))

    def uncover(self, name: str) -> None:
        """Take the layer away from a tensor, if it has one, and leave the tensor as it is."""
        if self.is_covered(name):
            parametrize.remove_parametrizations(self, key_of(name), leave_parametrized=False)

    def holds(self, name: str) -> bool:
        """Whether there is data of that name."""
        key = key_of(name)  # hasattr would compute what the layer lets through
        return key in self._buffers or key in self._parameters or self.is_covered(name)

    def is_covered(self, name: str) -> bool:
        """Whether a layer is in front of the data."""
        return bool(parametrize.is_parametrized(self, key_of(name)))

    def seen(self, name: str) -> torch.Tensor:
        """What the layer lets through: a new tensor; the data itself without one."""
        value: torch.Tensor = getattr(self, key_of(name))
        return value

    def original(self, name: str) -> torch.Tensor:
        """The tensor that was given."""
        if not self.is_covered(name):
            return self.seen(name)
        return self._layers(name).original

    def layer(self, name: str) -> nn.Module | None:
        """The layer in front of the data."""
        return self._layers(name)[0] if self.is_covered(name) else None

    def _layers(self, name: str) -> parametrize.ParametrizationList:
        return self.parametrizations[key_of(name)]  # type: ignore[index, return-value]


_TAKEN = frozenset(dir(Container())) | {"parametrizations"}


def key_of(name: str) -> str:
    """The attribute for ``name``: no two names have the same."""
    if name and "." not in name and "%" not in name and name not in _TAKEN:
        return name
    return "%" + name.replace("%", "%25").replace(".", "%2E")
