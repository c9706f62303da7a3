"""What the host has yet to learn of completed steps: it reads their headers ``LAG`` steps later, when they have long been copied to it."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor

from gradcomp.core.feedback import Feedback
from gradcomp.ddp.agenda import LAG, Agenda
from gradcomp.ddp.device.flight import DeviceFlight
from gradcomp.ddp.settings import Settings
from gradcomp.ddp.step import Step
from gradcomp.ddp.traffic import Counters
from gradcomp.errors import GradcompError, NonFiniteError


@dataclass(frozen=True, slots=True)
class _Past:
    """A completed step: its flights, what each wants to be read, on the way to the CPU, and the event after which it is there."""

    number: int
    flights: list[DeviceFlight]
    seen: list[list[Tensor]]
    copied: torch.cuda.Event | None


class Backlog:
    """What begins and completes steps on the device, as :class:`gradcomp.ddp.completion.Completion` does on the CPU.

    Args:
        feedback, agenda, counters, settings: as there.
        failed: called with an error as soon as the host knows of it; it is raised when all ranks know of it.

    Attributes:
        densities: by parameter, the fraction that this rank sent in the last step that the host knows of.
    """

    def __init__(
        self, feedback: Feedback, agenda: Agenda, counters: Counters, settings: Settings, failed: "WeakMethod[Callable[[Exception], None]]"
    ) -> None:
        if settings.check:
            raise ValueError("check must be False where parameters are not on the CPU: it looks at every step there")
        agenda.reaction = LAG
        self.densities: dict[str, float] = {}
        self._agenda = agenda
        self._counters = counters
        self._failed = failed
        self._raises = settings.on_nonfinite == "raise"
        self._waiting: deque[_Past] = deque()
        self._due: deque[tuple[int, Exception]] = deque()

    def begin(self, parameters: Mapping[str, Tensor], loss_scale: float) -> None:
        """Begin a step: learn what takes effect in it, and raise the error of the step ``LAG`` steps ago, if it had one, on all ranks."""
        self._read(before=self._agenda.number - LAG + 1)
        if self._due and self._due[0][0] + LAG <= self._agenda.number:
            raise self._due.popleft()[1]

    def complete(self, step: Step[DeviceFlight]) -> None:
        """All or nothing, by a flag on the device: every bucket settles its residuals and is filled, or is spoiled and none is touched."""
        flights = step.flights
        bad = torch.stack([flight.bad for flight in flights]).any()
        seen = [[tensor.to("cpu", non_blocking=True, copy=True) for tensor in flight.seen] for flight in flights]
        for flight in flights:
            flight.land(bad)
        copied = None
        if bad.is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(bad.device))
        number = self._agenda.number
        self._agenda.go_on(carried=any(flight.plan.header for flight in flights), announced=step.flags)
        self._waiting.append(_Past(number, flights, seen, copied))

    def settle(self, *, forget: bool = False) -> None:
        """Read what there is to read, waiting for the device. What is read early takes effect when it does on ranks that did not.

        ``forget``: what would still be raised; the steps that come are not those after it.
        """
        self._read(before=self._agenda.number, raises=not forget)
        if forget:
            self._due.clear()

    def _read(self, *, before: int, raises: bool = True) -> None:
        while self._waiting and self._waiting[0].number < before:
            past = self._waiting.popleft()
            if past.copied is not None:
                past.copied.synchronize()
            fault, error = None, None
            for flight, seen in zip(past.flights, past.seen):
                try:
                    found_here = flight.read(seen)
                    fault = fault or found_here
                except GradcompError as found:
                    error = found
            if error is None:
                self._agenda.learn(past.number, past.flights, bad=fault is not None)
                self.densities |= self._counters.finish_step(past.flights, bad=fault is not None)
                if fault is not None and self._raises:
                    error = NonFiniteError(f"step {past.number}: {fault}")
            if error is not None and raises:
                self._due.append((past.number, error))
                if (failed := self._failed()) is not None:
                    failed(error)
