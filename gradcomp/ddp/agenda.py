"""What changes from step to step, and when: a pure function of what all ranks saw in headers, so that no rank is ahead.

An announcement takes effect two steps after the step whose headers carried it: by then every rank has read it, on every device.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from gradcomp.ddp.payload import FLUSH, REMOVE, Arrival
from gradcomp.ddp.plan import Plan, capacity_for

LAG = 2


class Flown(Protocol):
    """A bucket of a completed step."""

    plan: Plan
    arrivals: list[Arrival]


class Agenda:
    """Step number, capacities of parameters sized by history, and flushes and removals under way."""

    def __init__(self) -> None:
        self.number = 0
        """Steps completed, bad ones included."""
        self.announce = 0
        """Flags this rank puts into its next headers."""
        self.reaction = 1
        """Steps after a flush in which one that failed is tried again: ``LAG`` where it is not known at once."""
        self._capacity: dict[str, tuple[int, int]] = {}  # for the coming step and the one after it
        self._flush_at: list[int] = []
        self._remove_at: int | None = None
        self._removed_from: int | None = None

    @property
    def removed(self) -> bool:
        """Whether the hook has turned dense."""
        return self._removed_from is not None and self.number >= self._removed_from

    @property
    def flushing(self) -> bool:
        """Whether the coming step sends every residual whole."""
        return not self.removed and (self._removing(self.number) or self.number in self._flush_at)

    @property
    def removing(self) -> bool:
        """Whether the coming step may be the last that sends residuals: a removal is under way."""
        return self._removing(self.number)

    def _removing(self, step: int) -> bool:
        return self._remove_at is not None and step >= self._remove_at

    def capacity(self, name: str) -> int | None:
        """Elements of payload kept for ``name`` in the coming step; None where it has no history."""
        return self._capacity[name][0] if name in self._capacity else None

    def start(self, name: str, numel: int, wanted: int) -> None:
        """Give ``name`` its first two capacities, from what the ranks wanted at most."""
        self._capacity[name] = (capacity_for(numel, wanted),) * 2

    def advance(self, flights: Sequence[Flown], *, announced: int, bad: bool) -> None:
        """Complete a step of which everything is known: :meth:`go_on`, and :meth:`learn` at once."""
        self.go_on(carried=any(flight.arrivals for flight in flights), announced=announced)
        self.learn(self.number - 1, flights, bad=bad)

    def go_on(self, *, carried: bool, announced: int) -> None:
        """Complete a step. ``announced``: the flags that this rank put into its headers; ``carried``: whether any header was gathered."""
        if carried:  # a step that gathered nothing told nobody
            self.announce &= ~announced
        self._capacity = {name: (after, after) for name, (_, after) in self._capacity.items()}
        self.number += 1

    def learn(self, step: int, flights: Iterable[Flown], *, bad: bool) -> None:
        """Take note of what the headers of a completed step said, before the step ``LAG`` steps after it begins, and once."""
        flags, rest = 0, False
        for flight in flights:
            for arrival in flight.arrivals:
                flags |= arrival.flags
                rest |= bool(arrival.rest.any())
            for piece in flight.plan.pieces:
                if piece.sized_by_history and flight.arrivals and not bad:
                    size = capacity_for(piece.numel, max(arrival.wanted[piece.name] for arrival in flight.arrivals))
                    now = size if step + LAG == self.number else self._capacity[piece.name][0]
                    self._capacity[piece.name] = (now, size)
        if bad and step in self._flush_at:
            self._flush_at.append(step + self.reaction)
        self._flush_at = [at for at in self._flush_at if at > step]
        # A removal goes on flushing until no rank has a rest: nobody would send it afterwards.
        if self._removing(step) and not bad and not rest and self._removed_from is None:
            self._removed_from = step + self.reaction
        if flags & FLUSH and self._removed_from is None:
            self._flush_at.append(step + LAG)
        if flags & REMOVE and self._remove_at is None:
            self._remove_at = step + LAG

    def state_dict(self) -> dict[str, Any]:
        """Everything here, as plain Python."""
        return {
            "step": self.number,
            "capacity": {name: list(sizes) for name, sizes in self._capacity.items()},
            "announce": self.announce,
            "flush_at": list(self._flush_at),
            "remove_at": self._remove_at,
            "removed": self.removed,
            "removed_from": self._removed_from,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.number = state["step"]
        self._capacity = {name: (now, after) for name, (now, after) in state["capacity"].items()}
        self.announce = state["announce"]
        self._flush_at = [max(at, self.number) for at in state["flush_at"]]  # one that failed was kept as it was by older versions
        self._remove_at = state["remove_at"]
        self._removed_from = state.get("removed_from", self.number if state["removed"] else None)  # older states have none
