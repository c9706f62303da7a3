"""Lightning callbacks that sparsify a module's parameters, after or during training. Needs the extra ``lightning``."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from gradcomp.data.base import BaseDataSparsifier

try:
    from pytorch_lightning import Callback, LightningModule, Trainer
except ImportError:  # the one package has two names
    from lightning.pytorch import Callback, LightningModule, Trainer  # type: ignore[import-not-found, no-redef]


def _get_valid_name(name: str) -> str:
    """A parameter's name as upstream's callbacks spell it: without dots."""
    return name.replace(".", "_")


def names_of(module: nn.Module) -> dict[str, str]:
    """Parameter name -> name of its data: without dots, unless two parameters would then have the same."""
    listed = [name for name, _ in module.named_parameters()]
    plain = [_get_valid_name(name) for name in listed]
    return {name: valid if plain.count(valid) == 1 else name for name, valid in zip(listed, plain)}


def _copy_of(module: LightningModule) -> nn.Module:
    """A copy of ``module.model``, or of the module itself where it has none, without its trainer."""
    inner = getattr(module, "model", None)
    if isinstance(inner, nn.Module):
        return copy.deepcopy(inner)
    trainer, module._trainer = module._trainer, None
    try:
        return copy.deepcopy(module)
    finally:
        module._trainer = trainer


class PostTrainingDataSparsity(Callback):
    """Sparsifies a copy of the model at the end of ``fit``; the model itself stays as it is.

    Args:
        data_sparsifier_class: made when training ends.
        data_sparsifier_args: for its constructor, without ``data_list``.

    Attributes:
        sparsified: the copy, of ``module.model`` or of the module itself; None before.
        data_sparsifier: the sparsifier; None before.
    """

    def __init__(self, data_sparsifier_class: type[BaseDataSparsifier], data_sparsifier_args: Mapping[str, Any]) -> None:
        super().__init__()
        self.data_sparsifier_class = data_sparsifier_class
        self.data_sparsifier_args = dict(data_sparsifier_args)
        self.data_sparsifier: BaseDataSparsifier | None = None
        self.sparsified: nn.Module | None = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy, sparsify, squash."""
        self.sparsified = _copy_of(pl_module).eval()
        self.data_sparsifier = self.data_sparsifier_class(**self.data_sparsifier_args)
        parameters = dict(self.sparsified.named_parameters())
        for name, valid in names_of(self.sparsified).items():
            self.data_sparsifier.add_data(valid, parameters[name])
        self.data_sparsifier.step()
        self.data_sparsifier.squash_mask()


class TrainingAwareDataSparsity(Callback):
    """Sparsifies a copy of the model after every epoch, on a schedule; masks and configuration go from epoch to epoch.

    Args:
        data_sparsifier_class: made when training starts.
        data_sparsifier_args: for its constructor, without ``data_list``.
        data_scheduler_class: made when training starts.
        data_scheduler_args: for its constructor, without ``data_sparsifier``.

    Attributes:
        sparsified: the copy of the last epoch, its masks squashed once training has ended.
        data_sparsifier, data_scheduler: None before training.
        data_sparsifier_state_dict: the sparsifier's state after the last epoch.
    """

    def __init__(
        self,
        data_sparsifier_class: type[BaseDataSparsifier],
        data_sparsifier_args: Mapping[str, Any],
        data_scheduler_class: Any,
        data_scheduler_args: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.data_sparsifier_class = data_sparsifier_class
        self.data_sparsifier_args = dict(data_sparsifier_args)
        self.data_scheduler_class = data_scheduler_class
        self.data_scheduler_args = dict(data_scheduler_args)
        self.data_sparsifier: BaseDataSparsifier | None = None
        self.data_scheduler: Any = None
        self.sparsified: nn.Module | None = None
        self.data_sparsifier_state_dict: dict[str, Any] | None = None
        self._restored: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make sparsifier and scheduler, with a first copy of the model; from a checkpoint, as they were."""
        self.data_sparsifier = self.data_sparsifier_class(**self.data_sparsifier_args)
        self._attach(pl_module)
        self.data_scheduler = self.data_scheduler_class(data_sparsifier=self.data_sparsifier, **copy.deepcopy(self.data_scheduler_args))
        if self._restored is not None and self._restored["data_sparsifier"] is not None:
            self.data_sparsifier_state_dict = self._restored["data_sparsifier"]
            self.data_sparsifier.load_state_dict(self._restored["data_sparsifier"])
            self.data_scheduler.load_state_dict(self._restored["data_scheduler"])
        self._restored = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sparsify a new copy with the masks and the configuration so far, and go on with the schedule."""
        if self.data_sparsifier is None:
            return
        self._attach(pl_module)
        self.data_sparsifier.step()
        self.data_scheduler.step()
        self.data_sparsifier_state_dict = self.data_sparsifier.state_dict()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the masks of the last copy final."""
        if self.data_sparsifier is not None:
            self.data_sparsifier.squash_mask()

    def _attach(self, pl_module: LightningModule) -> None:
        """Hold the parameters of a new copy, instead of the last one's."""
        self.sparsified = _copy_of(pl_module)
        parameters = dict(self.sparsified.named_parameters())
        for name, valid in names_of(self.sparsified).items():
            self.data_sparsifier.replace_data(valid, parameters[name])  # type: ignore[union-attr]

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoints: the sparsifier's and the scheduler's state."""
        scheduler = None if self.data_scheduler is None else self.data_scheduler.state_dict()
        return {"data_sparsifier": self.data_sparsifier_state_dict, "data_scheduler": scheduler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` when training starts."""
        self._restored = dict(state_dict)
