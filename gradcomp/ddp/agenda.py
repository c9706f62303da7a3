"""What changes from step to step, and when: a pure function of what all ranks saw in headers, so that no rank is ahead.

An announcement takes effect two steps after the step whose headers carried it: by then every rank has read it, on every device.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from gradcomp.ddp.coo import CooFlight
from gradcomp.ddp.flight import Flight
from gradcomp.ddp.payload import FLUSH, REMOVE
from gradcomp.ddp.plan import capacity_for

LAG = 2


class Agenda:
    """Step number, capacities of parameters sized by history, and flushes and removals under way."""

    def __init__(self) -> None:
        self.number = 0
        """Steps completed, bad ones included."""
        self.announce = 0
        """Flags this rank puts into its next headers."""
        self.removed = False
        """Whether the hook has turned dense."""
        self._capacity: dict[str, tuple[int, int]] = {}  # for the coming step and the one after it
        self._flush_at: list[int] = []
        self._remove_at: int | None = None

    @property
    def flushing(self) -> bool:
        """Whether the coming step sends every residual whole."""
        removing = self._remove_at is not None and self.number >= self._remove_at
        return not self.removed and (removing or any(self.number >= at for at in self._flush_at))

    def capacity(self, name: str) -> int | None:
        """Elements of payload kept for ``name`` in the coming step; None where it has no history."""
        return self._capacity[name][0] if name in self._capacity else None

    def start(self, name: str, numel: int, wanted: int) -> None:
        """Give ``name`` its first two capacities, from what the ranks wanted at most."""
        self._capacity[name] = (capacity_for(numel, wanted),) * 2

    def advance(self, flights: Iterable[Flight | CooFlight], *, announced: int, bad: bool) -> None:
        """Complete a step. ``flights``: every bucket's; ``announced``: the flags that this rank put into its headers."""
        flags, rest, carried = 0, False, False
        for flight in flights:
            for arrival in flight.arrivals:
                carried = True
                flags |= arrival.flags
                rest |= bool(arrival.rest.any())
            for piece in flight.plan.pieces:
                if piece.sized_by_history and flight.arrivals:
                    after = self._capacity[piece.name][1]
                    wanted = max(arrival.wanted[piece.name] for arrival in flight.arrivals)
                    self._capacity[piece.name] = (after, after if bad else capacity_for(piece.numel, wanted))
        if self.flushing and not bad:
            self._flush_at = [at for at in self._flush_at if at > self.number]
            # A removal goes on flushing until no rank has a rest: nobody would send it afterwards.
            self.removed = self._remove_at is not None and self.number >= self._remove_at and not rest
        if flags & FLUSH and not self.removed:
            self._flush_at.append(self.number + LAG)
        if flags & REMOVE and self._remove_at is None:
            self._remove_at = self.number + LAG
        if carried:  # a step that gathered nothing told nobody
            self.announce &= ~announced
        self.number += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything here, as plain Python."""
        return {
            "step": self.number,
            "capacity": {name: list(sizes) for name, sizes in self._capacity.items()},
            "announce": self.announce,
            "flush_at": list(self._flush_at),
            "remove_at": self._remove_at,
            "removed": self.removed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.number = state["step"]
        self._capacity = {name: (now, after) for name, (now, after) in state["capacity"].items()}
        self.announce = state["announce"]
        self._flush_at, self._remove_at, self.removed = list(state["flush_at"]), state["remove_at"], state["removed"]
