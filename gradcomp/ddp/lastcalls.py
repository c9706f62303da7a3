"""The end of a process: the back end's threads must have let go of our callbacks before the interpreter goes.

A gloo thread destroys a callback some time after it has run, and takes the interpreter's lock for it. If the main thread has begun to
finalize the interpreter by then, the process ends with "terminate called without an active exception" and SIGABRT, after a training
that went well. torch 2.13 does that to plain DDP too, only less often; this module may go when it does not any more.
"""

import atexit
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])

LONGEST_WAIT_S = 2.0
GRACE_S = 0.02
"""After its last callback a thread still frees the future, which takes the lock once more."""

_alive: "weakref.WeakSet[Callable[..., object]]" = weakref.WeakSet()
_registered = False


def at_exit_wait_for(callback: F) -> F:
    """Return ``callback``, a function of its own to be handed to a future; the process will not end before it has been let go."""
    global _registered
    if not _registered:
        _registered = True
        atexit.register(_wait)
    _alive.add(callback)
    return callback


def _wait() -> None:
    deadline = time.monotonic() + LONGEST_WAIT_S
    while _alive and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(GRACE_S)
