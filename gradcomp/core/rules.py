"""Which elements matter: a rule fills a boolean mask in place.

A rule is one of three things, and :func:`fill_mask` is the only place that tells them apart:

* an object with ``mask_(data, mask) -> None``, as :class:`Threshold`, :class:`TopK` and :class:`Dense` are;
* a plain function ``f(data, mask) -> None``;
* an object with ``update_mask(name, data, **config)`` that edits ``self.state[name]["mask"]`` in place, as data sparsifiers do.
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from gradcomp.core import scan
from gradcomp.core.schedule import Exponential, Schedule
from gradcomp.errors import GradcompError


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


def number(field: str, value: object) -> float:
    """``value`` as a float if it is a number; a ``ValueError`` that names ``field`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{field} must be a number, got {value!r}")
    return float(value)


def whole(field: str, value: Any) -> int:
    """``value`` as an int if it is an integer >= 0; a ``ValueError`` that names ``field`` otherwise."""
    try:
        if isinstance(value, bool) or operator.index(value) < 0:
            raise TypeError
    except TypeError:
        raise ValueError(f"{field} must be an integer >= 0, got {value!r}") from None
    return operator.index(value)


@dataclass(frozen=True, slots=True)
class Threshold:
    """Elements whose magnitude is strictly above ``tau``; non-finite elements always.

    Args:
        tau: magnitude, in the data's own units; finite, >= 0. At 0 every non-zero element matters. For gradients,
            ``handle.analyze()`` shows which threshold keeps how much.

    Raises:
        ValueError: ``tau`` is not a finite number >= 0.

    Reference:
        Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015 (with the exact
        value sent, where Strom sends +-tau).
    """

    tau: float

    def __post_init__(self) -> None:
        tau = number("Threshold.tau", self.tau)
        if not (math.isfinite(tau) and tau >= 0):
            raise ValueError(f"Threshold.tau must be finite and >= 0, got {self.tau!r}")

    def mask_(self, data: torch.Tensor, mask: torch.Tensor) -> None:
        """Fill ``mask`` with ``|data| > tau``, True also where ``data`` is not finite. Half precision is compared as fp32."""
        magnitude = data.detach().abs()
        if data.dtype in (torch.float16, torch.bfloat16):
            magnitude = magnitude.float()
        mask.copy_(~(magnitude <= self.tau) | ~magnitude.isfinite())


@dataclass(frozen=True, slots=True)
class TopK:
    """The ``density`` share of elements with the largest magnitude, exactly.

    Zeros are never selected (then fewer are), ties go to the lowest index, non-finite elements count as largest.

    Args:
        density: fraction KEPT, in (0, 1], or a schedule of it (:mod:`gradcomp.schedule`), which the hook follows step by step.
            ``k = max(1, floor(density * n + 0.5))`` elements of a tensor of n. For gradients, ``handle.analyze()`` shows what that
            costs in bytes.

    Raises:
        ValueError: ``density`` is not a number in (0, 1].

    Reference:
        Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Lin et al., "Deep gradient
        compression", ICLR 2018. Both sample the threshold; here the k largest are exact.
    """

    density: float | Schedule

    def __post_init__(self) -> None:
        if isinstance(self.density, Schedule):
            for step in (0, 1 << 40):  # the ends of a schedule that falls or rises; what is between is checked step by step
                try:
                    self.at(step)
                except ValueError as error:
                    raise ValueError(f"{error}, from {describe(self.density)} at step {step}") from None
            return
        density = number("TopK.density", self.density)
        if not 0 < density <= 1:
            raise ValueError(f"TopK.density is the fraction kept and must be in (0, 1], got {self.density!r}")
        object.__setattr__(self, "density", density)  # one type for a number: asked for every parameter and step

    def at(self, step: int) -> "TopK":
        """The rule of one step: this one, unless its density is a schedule."""
        return self if isinstance(self.density, float) else TopK(self.density.at(step))

    def count(self, numel: int) -> int:
        """k for a tensor of ``numel`` elements."""
        if not isinstance(self.density, float):
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
    return type(rule) is Dense or (type(rule) is TopK and rule.density == 1)


def is_scheduled(rule: AnyRule) -> bool:
    """Whether the rule is a ``TopK`` whose density changes from step to step."""
    return type(rule) is TopK and not isinstance(rule.density, float)


def at_step(rule: AnyRule, step: int) -> AnyRule:
    """The rule of one step, where its density follows a schedule."""
    return rule.at(step) if type(rule) is TopK else rule


def warmed_up(rule: AnyRule, density: float, steps: int) -> AnyRule:
    """``rule`` with its density falling exponentially from ``density`` in ``steps`` steps; itself if it keeps as much anyway."""
    if type(rule) is not TopK or isinstance(rule.density, Schedule) or rule.density >= density or not steps:
        return rule
    return TopK(Exponential(start=density, end=rule.density, steps=steps))


def _takes_two(function: Callable[..., object]) -> bool:
    """Whether a function can be called with data and mask; True where Python cannot tell."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def check_rule(field: str, rule: object) -> AnyRule:
    """Return ``rule`` if it is one; raise a ``ValueError`` that names ``field`` otherwise."""
    if isinstance(rule, type):
        raise ValueError(f"{field} must be an object, got the class {rule.__name__}: write {rule.__name__}(...)")
    if isinstance(rule, (Schedule, Real)) and not isinstance(rule, Rule):
        raise ValueError(f"{field} must be a rule, got {rule!r}: write TopK({rule!r}) for a density, Threshold(...) for a magnitude")
    if isinstance(rule, (Rule, MaskUpdater)) or (callable(rule) and _takes_two(rule)):
        return rule
    raise ValueError(
        f"{field} must be a rule (Threshold, TopK, Dense, an object with mask_ or update_mask, or a function of data and mask), "
        f"got {rule!r}"
    )


def fill_mask(rule: AnyRule, name: str, data: torch.Tensor, mask: torch.Tensor) -> None:
    """Let any kind of rule fill ``mask`` (bool, the shape of ``data``) for the tensor called ``name``. Mutates ``mask``."""
    returned: object = None
    if isinstance(rule, Rule):
        returned = rule.mask_(data, mask)  # type: ignore[func-returns-value]
    elif isinstance(rule, MaskUpdater):
        config = {**getattr(rule, "defaults", {}), **getattr(rule, "data_groups", {}).get(name, {})}
        entry = rule.state.setdefault(name, {})  # what else the updater keeps there stays
        held = {"mask": entry["mask"]} if "mask" in entry else {}
        entry["mask"] = torch.ones_like(data, memory_format=torch.contiguous_format)
        try:
            rule.update_mask(name, data, **config)
            mask.copy_(rule.state[name]["mask"])
        finally:
            rule.state[name].pop("mask", None)
            rule.state[name].update(held)
            if not rule.state[name]:
                del rule.state[name]
    else:
        returned = rule(data, mask)
    if returned is not None and returned is not mask:
        raise ValueError(f"rule {describe(rule)} returned a {type(returned).__name__}: a rule must fill the mask in place, mask.copy_(...)")


@contextmanager
def naming(rule: AnyRule, name: str) -> Iterator[None]:
    """Have errors of a rule, which may be the user's, name it and the tensor."""
    try:
        yield
    except Exception as error:
        raise GradcompError(f"the rule {describe(rule)} failed on parameter {name}: {error!r}") from error


def describe(value: object) -> str:
    """A text that is the same on every rank for the same rule, or field of a rule: no addresses, one spelling for a number."""
    if isinstance(value, (str, bool, bytes, type(None))):
        return repr(value)
    if isinstance(value, Real):
        return repr(float(value))
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}({', '.join(f'{f.name}={describe(getattr(value, f.name))}' for f in fields(value))})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(describe, value))}]"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
