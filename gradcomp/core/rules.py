"""Which elements matter: a rule fills a boolean mask in place.

A rule is one of three things, and :func:`fill_mask` is the only place that tells them apart:

* an object with ``mask_(data, mask) -> None``, as :class:`Threshold`, :class:`TopK` and :class:`Dense` are;
* a plain function ``f(data, mask) -> None``;
* an object with ``update_mask(name, data, **config)`` that edits ``self.state[name]["mask"]`` in place, as data sparsifiers do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from gradcomp.core import scan
from gradcomp.core.schedule import Exponential, Schedule


@runtime_checkable
class Rule(Protocol):
    """Anything that can tell which elements of a tensor matter."""

    def mask_(self, data: torch.Tensor, mask: torch.Tensor) -> None:
        """Fill ``mask`` (bool, the shape of ``data``) in place: True where an element matters."""


@runtime_checkable
class MaskUpdater(Protocol):
    """A data sparsifier: edits ``state[name]["mask"]`` in place, starting from ones."""

    state: Any

    def update_mask(self, name: str, data: torch.Tensor, **config: Any) -> None:
        """Set ``state[name]["mask"]`` to 0 where an element of ``data`` does not matter."""


AnyRule: TypeAlias = Rule | MaskUpdater | Callable[[torch.Tensor, torch.Tensor], None]


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{field} must be a number, got {value!r}")
    return float(value)


@dataclass(frozen=True, slots=True)
class Threshold:
    """Elements whose magnitude is strictly above ``tau``; non-finite elements always.

    Args:
        tau: magnitude, in the data's own units; finite, >= 0. At 0 every non-zero element matters.

    Raises:
        ValueError: ``tau`` is not a finite number >= 0.

    Reference:
        Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015 (with the exact
        value sent, where Strom sends +-tau).
    """

    tau: float

    def __post_init__(self) -> None:
        tau = _number("Threshold.tau", self.tau)
        if not (math.isfinite(tau) and tau >= 0):
            raise ValueError(f"Threshold.tau must be finite and >= 0, got {self.tau!r}")

    def mask_(self, data: torch.Tensor, mask: torch.Tensor) -> None:
        """Fill ``mask`` with ``|data| > tau``, True also where ``data`` is NaN."""
        mask.copy_(~(data.detach().abs() <= self.tau))


@dataclass(frozen=True, slots=True)
class TopK:
    """The ``density`` share of elements with the largest magnitude, exactly.

    Zeros are never selected (then fewer are), ties go to the lowest index, non-finite elements count as largest.

    Args:
        density: fraction KEPT, in (0, 1], or a schedule of it (:mod:`gradcomp.schedule`), which the hook follows step by step.
            ``k = max(1, floor(density * n + 0.5))`` elements of a tensor of n.

    Raises:
        ValueError: ``density`` is not a number in (0, 1].

    Reference:
        Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Lin et al., "Deep gradient
        compression", ICLR 2018. Both sample the threshold; here the k largest are exact.
    """

    density: float | Schedule

    def __post_init__(self) -> None:
        if isinstance(self.density, Schedule):
            return
        density = _number("TopK.density", self.density)
        if not 0 < density <= 1:
            raise ValueError(f"TopK.density is the fraction kept and must be in (0, 1], got {self.density!r}")

    def at(self, step: int) -> "TopK":
        """The rule of one step: this one, unless its density is a schedule."""
        return TopK(self.density.at(step)) if isinstance(self.density, Schedule) else self

    def count(self, numel: int) -> int:
        """k for a tensor of ``numel`` elements."""
        if isinstance(self.density, Schedule):
            raise ValueError(f"TopK.density is a schedule, {self.density!r}: take the rule of a step, rule.at(step)")
        return min(numel, max(1, math.floor(self.density * numel + 0.5)))

    def mask_(self, data: torch.Tensor, mask: torch.Tensor) -> None:
        """Fill ``mask``: True at the k largest magnitudes."""
        flat = data.detach().reshape(-1)
        k = self.count(flat.numel())
        if flat.device.type == "cpu":
            indices = torch.from_numpy(scan.top_k(scan.Accumulation(flat), k)[0])
            chosen = torch.zeros(flat.numel(), dtype=torch.bool)
            chosen[indices] = True
        else:
            chosen = scan.top_k_mask(flat, k)
        mask.copy_(chosen.view(data.shape))


@dataclass(frozen=True, slots=True)
class Dense:
    """Every element matters: the tensor is left dense."""

    def mask_(self, data: torch.Tensor, mask: torch.Tensor) -> None:
        """Fill ``mask`` with True."""
        mask.fill_(True)


def is_dense(rule: AnyRule) -> bool:
    """Whether the rule keeps everything by its settings alone: ``Dense()`` or ``TopK(density=1.0)``."""
    return isinstance(rule, Dense) or (isinstance(rule, TopK) and rule.density == 1)


def at_step(rule: AnyRule, step: int) -> AnyRule:
    """The rule of one step, where its density follows a schedule."""
    return rule.at(step) if isinstance(rule, TopK) else rule


def warmed_up(rule: AnyRule, density: float, steps: int) -> AnyRule:
    """``rule`` with its density falling exponentially from ``density`` in ``steps`` steps; itself if it keeps as much anyway."""
    if not isinstance(rule, TopK) or isinstance(rule.density, Schedule) or rule.density >= density or not steps:
        return rule
    return TopK(Exponential(start=density, end=rule.density, steps=steps))


def check_rule(field: str, rule: object) -> AnyRule:
    """Return ``rule`` if it is one; raise a ``ValueError`` that names ``field`` otherwise."""
    if isinstance(rule, type):
        raise ValueError(f"{field} must be a rule, got the class {rule.__name__}: write {rule.__name__}(...)")
    if isinstance(rule, (Rule, MaskUpdater)) or callable(rule):
        return rule
    raise ValueError(
        f"{field} must be a rule (Threshold, TopK, Dense, an object with mask_ or update_mask, or a function of data and mask), "
        f"got {rule!r}"
    )


def fill_mask(rule: AnyRule, name: str, data: torch.Tensor, mask: torch.Tensor) -> None:
    """Let any kind of rule fill ``mask`` (bool, the shape of ``data``) for the tensor called ``name``. Mutates ``mask``."""
    if isinstance(rule, Rule):
        rule.mask_(data, mask)
    elif isinstance(rule, MaskUpdater):
        config = dict(getattr(rule, "data_groups", {}).get(name, getattr(rule, "defaults", {})))
        rule.state[name] = {"mask": torch.ones_like(mask)}
        rule.update_mask(name, data, **config)
        mask.copy_(rule.state[name]["mask"])
    else:
        rule(data, mask)


def describe(rule: AnyRule) -> str:
    """A text that is the same on every rank for the same rule (no addresses)."""
    if isinstance(rule, TopK) and isinstance(rule.density, Schedule):
        kind = type(rule.density)
        return f"TopK(density={repr(rule.density) if is_dataclass(rule.density) else kind.__module__ + '.' + kind.__qualname__})"
    if is_dataclass(rule):
        return repr(rule)
    if isinstance(rule, (Rule, MaskUpdater)):
        return f"{type(rule).__module__}.{type(rule).__qualname__}"
    return f"{getattr(rule, '__module__', '?')}.{getattr(rule, '__qualname__', type(rule).__qualname__)}"
