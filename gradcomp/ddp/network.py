"""The parameters of a network: their names, shapes, strides and dtypes. Holds the network, and every parameter, weakly."""

import re
import sys

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from gradcomp.errors import GradcompError


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The network inside DDP's and torch.compile's wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and hasattr(module, "process_group"):
            inner = getattr(module, "module", None)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def real_like(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device with the shape, strides and dtype of the parameter's gradient in DDP's buckets.

    Complex gradients lie there as pairs of real numbers: one dimension more, of two.
    """
    like = torch.empty_like(parameter, device="meta")
    return torch.view_as_real(like) if like.is_complex() else like


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _refuse_sharded(module: torch.nn.Module) -> None:
    """Raise where not every rank has all of every parameter: DDP's hooks, and error feedback by rank, need that."""
    sharded, placed = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.tensor")
    for part in module.modules() if sharded else ():
        if isinstance(part, sharded.FullyShardedDataParallel):  # type: ignore[union-attr]
            raise ValueError("module must not be sharded by FullyShardedDataParallel: wrap it in DistributedDataParallel instead")
    for name, parameter in module.named_parameters() if placed else ():
        if isinstance(parameter, placed.DTensor):  # type: ignore[union-attr]
            raise ValueError(f"parameter {name} must be a plain tensor, got a DTensor: use DistributedDataParallel, without fully_shard")


class Network:
    """Names of parameters, and what their gradients look like.

    Attributes:
        shapes: name -> a tensor on the meta device, as :func:`real_like` makes it.
        complex: names of the parameters that are complex.
        trained: names of the parameters that require gradients.
        in_place: names of those whose gradients accumulate in their bucket's buffer, as far as that is watched.

    Raises:
        ValueError: not a module, sharded, without parameters, or with trained ones that are not all on the CPU, or on one CUDA device.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ValueError(f"module must be a torch.nn.Module, got a {type(module).__name__}")
        _refuse_sharded(module)
        self._names = WeakTensorKeyDictionary()
        self.shapes: dict[str, torch.Tensor] = {}
        self.complex: set[str] = set()
        self.trained: set[str] = set()
        self.in_place: frozenset[str] = frozenset()
        self._device: torch.device | None = None
        self._buckets: set[StorageWeakRef] = set()
        network = unwrapped(module)
        ignored = set(getattr(network, "_ddp_params_and_buffers_to_ignore", ()))  # where DDP looks for them
        for raw, parameter in network.named_parameters():
            if (raw if "." in raw else f".{raw}") in ignored:  # as DDP spells them
                continue
            name = re.sub(r"(^|\.)_orig_mod\.", r"\1", raw)  # parts of the network may be compiled
            self._names[parameter] = name
            self._see(name, parameter)
        if not self.shapes:
            raise ValueError(f"module must have parameters, got a {type(module).__name__} without any")

    @property
    def device(self) -> torch.device:
        """Where the parameters that are trained are."""
        return self._device or torch.device("cpu")

    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that are still alive, by name, in no order."""
        return {name: parameter for parameter, name in self._names.items()}  # type: ignore[no-untyped-call]

    def shape_of(self, name: str) -> torch.Size:
        """A parameter's own shape."""
        shape = self.shapes[name].shape
        return shape[:-1] if name in self.complex else shape

    def look_again(self) -> None:
        """Note how the parameters are now: the network may have been cast, or moved, since."""
        self._device = None
        for name, parameter in self.parameters().items():
            self._see(name, parameter)

    def remember_gradients(self) -> None:
        """Before a forward pass: note which gradients lie in the buckets of the last step, and so will accumulate in place.

        (DDP may rebuild its buckets in the forward pass; gradients that lie in them move along.)
        """
        held = ((name, parameter.grad) for name, parameter in self.parameters().items())
        lying = ((name, _storage_of(grad)) for name, grad in held if grad is not None and grad.layout == torch.strided)
        self.in_place = frozenset(name for name, storage in lying if storage in self._buckets)

    def remember_bucket(self, buffer: torch.Tensor, *, is_first: bool) -> None:
        """In a step: note where its buckets lie."""
        if is_first:
            self._buckets.clear()
        if buffer.layout == torch.strided:
            self._buckets.add(_storage_of(buffer))  # by address another tensor might lie there by then

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of a parameter of the network."""
        if parameter not in self._names:
            shape = tuple(parameter.shape)
            raise GradcompError(f"a parameter of shape {shape} in the bucket is not one of the module that the state was made for")
        return str(self._names[parameter])

    def _see(self, name: str, parameter: torch.Tensor) -> None:
        self.shapes[name] = real_like(parameter)
        if parameter.is_complex():
            self.complex.add(name)
        if not parameter.requires_grad:
            return
        self.trained.add(name)
        if parameter.device.type not in ("cpu", "cuda"):
            raise ValueError(f"parameter {name} must be on the CPU or on a CUDA device, got {parameter.device}")
        if self._device is not None and parameter.device != self._device:
            raise ValueError(f"parameter {name} must be on {self._device} as the others are, got {parameter.device}")
        self._device = parameter.device
