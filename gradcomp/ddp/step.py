"""One synchronised backward pass: every bucket in flight, and the one gate behind which DDP finds all of them or none."""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from gradcomp.ddp.lastcalls import at_exit_wait_for

T = TypeVar("T")


class Aboard(Protocol):
    """A bucket in flight."""

    @property
    def result(self) -> torch.Tensor:
        """What DDP is given once the step has completed."""


F = TypeVar("F", bound=Aboard)


class Step(Generic[F]):
    """A step is all or nothing: the futures handed to DDP complete together, when the last bucket has been decoded.

    Args:
        number: the step's number, equal on all ranks.
        flags: what this rank announces in its headers.
        flush: whether every residual is sent whole.
        removing: whether that may be the last time.
        loss_scale: what the step's losses were multiplied by, as far as residuals are not.
        device: where what is received is worked on by the device, for which the host does not wait: then nothing happens in callbacks,
            and all of it, on the device's own queue, when the last bucket has been issued.
        complete: called once, on the thread that finds everything decoded, before DDP gets anything; it may raise.
        failed: called once with the step's error, if it has one.
    """

    def __init__(
        self,
        number: int,
        *,
        flags: int,
        flush: bool,
        removing: bool = False,
        complete: "Callable[[Step[F]], None]",
        failed: Callable[[Exception], None],
        loss_scale: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        self.number = number
        self.flags = flags
        self.flush = flush
        self.removing = removing
        self.loss_scale = loss_scale
        self.seen: set[str] = set()
        """Names of the parameters of its buckets so far."""
        self.at_last = False
        """Whether the bucket at hand is its last."""
        self.flights: list[F] = []
        self.error: Exception | None = None
        self._complete = complete
        self._failed = failed
        self._later: list[Callable[[], None]] | None = None if device is None else []
        # A future that holds tensors of its device makes whoever waits for it wait there, not on the host.
        devices: list[int | str | torch.device] | None = [device] if device is not None and device.type != "cpu" else None
        self._gate: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        self._lock = threading.Lock()
        self._pending = 1  # the hook itself, until the last bucket has been issued
        self._open = True

    @property
    def unscale(self) -> float:
        """What brings gradients to the residuals' units."""
        return 1.0 / self.loss_scale

    def watch(self, future: torch.futures.Future[T], receive: Callable[[T], None]) -> None:
        """Have ``receive`` called with the future's result; the step waits for it. Its errors become the step's."""
        if self._later is not None:
            self._later.append(lambda: receive(future.wait()))
            return
        with self._lock:
            self._pending += 1

        def arrived(finished: torch.futures.Future[T]) -> None:
            try:
                receive(finished.value())
            except Exception as error:
                self.fail(error)
            self._done()

        future.then(at_exit_wait_for(arrived))

    def fail(self, error: Exception) -> None:
        """End the step now: every future handed to DDP raises ``error``."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            self.error = error
        self._failed(error)
        self._let_go()
        self._gate.set_result([])

    def board(self, flight: F, *, is_last: bool) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket's flight, issued in full, into the step.

        Returns:
            The future for DDP: the bucket's buffer once the whole step has completed, or the step's error.
        """
        self.flights.append(flight)

        def open_gate(_: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            if self.error is not None:
                raise self.error
            return flight.result

        delivered: torch.futures.Future[torch.Tensor] = self._gate.then(open_gate)
        if is_last:
            try:
                while self._later:
                    self._later.pop(0)()
            except Exception as error:
                self.fail(error)
            self._done()
        return delivered

    def _done(self) -> None:
        with self._lock:
            self._pending -= 1
            if self._pending or not self._open:
                return
        # Everything has arrived and DDP is still waiting: nobody else touches the residuals or the buckets now.
        try:
            self._complete(self)
        except Exception as error:
            self.fail(error)
            return
        with self._lock:
            self._open = False
        self._let_go()
        self._gate.set_result([] if self._later is None else [flight.result for flight in self.flights])

    def _let_go(self) -> None:
        """Hold nothing of the hook's state any more, and so no process group: threads of the back end hold this step a little longer."""
        self._complete = self._failed = _nothing


def _nothing(_: object) -> None:
    """What a step that has ended still calls."""
