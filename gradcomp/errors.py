"""Everything gradcomp raises that is not a plain ``ValueError``, in one place, and how it warns.

A wrong setting is a ``ValueError`` raised where the setting is given. The classes below are for what can only be found out
later: bytes that are not ours, ranks that disagree, gradients that are not finite.
"""

import sys
import warnings


def warn(text: str) -> None:
    """Warn of something, at the line outside of gradcomp that led to it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "gradcomp":
        level, frame = level + 1, frame.f_back
    warnings.warn(f"gradcomp: {text}", UserWarning, stacklevel=level)


class GradcompError(Exception):
    """Base of every error that gradcomp defines."""


class DataError(GradcompError, ValueError, AssertionError):
    """Data that a data sparsifier cannot hold, or a mask that does not fit; an AssertionError too, as upstream raises."""


class PayloadError(GradcompError, ValueError):
    """Bytes that are truncated, damaged or were not written by gradcomp's codec."""


class DesyncError(GradcompError, RuntimeError):
    """Ranks that disagree about settings, bucket layout or step. Raised on every rank, before any payload moves."""


class AccountingError(GradcompError, ArithmeticError):
    """``check=True`` found that something of a gradient was lost, or that a mean is not the mean of what was sent."""


class NonFiniteError(GradcompError, ArithmeticError):
    """A gradient was NaN or infinite and ``on_nonfinite="raise"`` was asked for, on every rank.

    ``backward()`` raises a RuntimeError that carries its text; this object is ``handle.last_error``.
    """
