"""What a user asked of the hook beside the rules, checked where it is given."""

from dataclasses import dataclass

import torch

from gradcomp.core.rules import AnyRule, number, warmed_up, whole
from gradcomp.core.values import check_values
from gradcomp.errors import GradcompError, warn


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fields are those of :class:`gradcomp.SparseState`.

    Raises:
        ValueError: a field out of its range, named with its value.
    """

    values: str
    warmup_steps: int
    warmup_density: float
    momentum: float
    grad_scaler: torch.amp.GradScaler | None
    on_nonfinite: str
    fallback: str
    check: bool

    def __post_init__(self) -> None:
        check_values(self.values)
        whole("warmup_steps", self.warmup_steps)
        if not 0 < number("warmup_density", self.warmup_density) <= 1:
            text = "warmup_density is the fraction kept at the first step and must be in (0, 1]"
            raise ValueError(f"{text}, got {self.warmup_density!r}")
        if not 0 <= number("momentum", self.momentum) < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        if self.grad_scaler is not None and not isinstance(self.grad_scaler, torch.amp.GradScaler):
            raise ValueError(f"grad_scaler must be a torch.amp.GradScaler or None, got a {type(self.grad_scaler).__name__}")
        for field, allowed in (("on_nonfinite", ["propagate", "raise"]), ("fallback", ["dense", "never"]), ("check", [False, True])):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {allowed}, got {getattr(self, field)!r}")

        if self.values == "fp16" and self.scales_losses:
            text = "values='fp16' holds up to 65504 in scaled units, the rest waits: with a GradScaler 'bf16' delivers more"
            warn(text)

    @property
    def scales_losses(self) -> bool:
        """Whether there is a scaler that does anything."""
        return self.grad_scaler is not None and self.grad_scaler.is_enabled()

    @property
    def loss_scale(self) -> float:
        """What the losses of the coming step are multiplied by; 1.0 without a scaler, or before it has scaled anything."""
        scaler = self.grad_scaler
        if scaler is None or not scaler.is_enabled() or scaler._get_scale_async() is None:
            return 1.0
        scale = float(scaler.get_scale())
        if not scale > 0:
            raise GradcompError(f"the scale of grad_scaler must be above 0, got {scale!r}: it has been backed off too often")
        return scale

    def loss_scale_on(self, device: torch.device) -> torch.Tensor | None:
        """:attr:`loss_scale` as a scalar on ``device``, without waiting for it; None for 1."""
        scaler = self.grad_scaler
        scale = scaler._get_scale_async() if scaler is not None and scaler.is_enabled() else None
        return None if scale is None else scale.to(device, torch.float32, non_blocking=True)

    def warm_up(self, rules: dict[str, AnyRule]) -> dict[str, AnyRule]:
        """The rules by parameter, with the densities of ``TopK`` ones falling to their own over the warm-up."""
        warmed = {name: warmed_up(rule, float(self.warmup_density), self.warmup_steps) for name, rule in rules.items()}
        if self.warmup_steps and warmed == rules:
            text = f"warmup_steps={self.warmup_steps} has nothing to warm up: no TopK rule of a density below {self.warmup_density}"
            warn(text)
        return warmed

    def describe(self) -> dict[str, str]:
        """What of it must be equal on all ranks."""
        scaler = self.grad_scaler
        scaling = "none"
        if scaler is not None and scaler.is_enabled():
            growth = f"growth {scaler.get_growth_factor()} every {scaler.get_growth_interval()}, backoff {scaler.get_backoff_factor()}"
            scaling = f"scale {scaler.get_scale()}, {growth}"
        fields = {
            "values": self.values,
            "momentum": repr(float(self.momentum)),
            "on_nonfinite": self.on_nonfinite,
            "fallback": self.fallback,
        }
        return fields | {"grad_scaler": scaling, "check": str(bool(self.check))}
