"""A hyper-parameter over steps: pure functions of the step, so that a resumed run needs nothing but the step's number.

A schedule is any object with ``at(step) -> float``; those here go from ``start`` to ``end`` in ``steps`` steps and stay there.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Schedule(Protocol):
    """A number for every step."""

    def at(self, step: int) -> float:
        """The value at ``step``, counted from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ramp:
    """From ``start`` at step 0 to ``end`` at step ``steps``, constant from there.

    Args:
        start: value at step 0; finite.
        end: value from ``steps`` on; finite.
        steps: length of the way, at least 0.

    Raises:
        ValueError: a field out of its range.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        for field in ("start", "end"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{type(self).__name__}.{field} must be a finite number, got {value!r}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise ValueError(f"{type(self).__name__}.steps must be an integer >= 0, got {self.steps!r}")

    def at(self, step: int) -> float:
        """The value at ``step``, counted from 0."""
        if step >= self.steps:
            return float(self.end)
        return self._between(max(0, step) / self.steps)

    def _between(self, share: float) -> float:
        """The value after ``share`` of the way, in [0, 1)."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(_Ramp):
    """A straight line from ``start`` to ``end`` in ``steps`` steps, then ``end``."""

    def _between(self, share: float) -> float:
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True, kw_only=True, slots=True)
class Exponential(_Ramp):
    """By the same factor every step from ``start`` to ``end``, both above 0, in ``steps`` steps, then ``end``.

    Reference:
        Lin et al., "Deep gradient compression", ICLR 2018, section 3.3 (there by epochs: 25%, 6.25%, 1.5625%, ...).
    """

    def __post_init__(self) -> None:
        # The zero-argument form of super() does not work in a dataclass with slots.
        _Ramp.__post_init__(self)
        for field in ("start", "end"):
            if getattr(self, field) <= 0:
                raise ValueError(f"Exponential.{field} must be above 0, got {getattr(self, field)!r}")

    def _between(self, share: float) -> float:
        return float(self.start * (self.end / self.start) ** share)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cubic(_Ramp):
    """Fast at first, slow towards ``end``: ``end + (start - end) * (1 - share)^3``.

    Reference:
        Zhu and Gupta, "To prune, or not to prune", 2017.
    """

    def _between(self, share: float) -> float:
        return self.end + (self.start - self.end) * (1 - share) ** 3
