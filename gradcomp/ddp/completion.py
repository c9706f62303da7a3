"""The end of a step on the CPU: what was decoded settles residuals and fills buckets, of all of the step's buckets or of none."""

from collections.abc import Mapping

import torch

from gradcomp.core.feedback import Feedback
from gradcomp.ddp.agenda import Agenda
from gradcomp.ddp.audit import Audit, Sums, agree_on_replicas, agree_on_sums
from gradcomp.ddp.coo import CooFlight
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.flight import Flight
from gradcomp.ddp.settings import Settings
from gradcomp.ddp.step import Step
from gradcomp.ddp.traffic import Counters
from gradcomp.errors import NonFiniteError


class Completion:
    """What begins and completes steps.

    Args:
        exchange: of the ranks.
        feedback: the residuals and velocities.
        agenda: learns from every step.
        counters: counts every step.
        settings: the hook's.

    Attributes:
        densities: by parameter, the fraction that this rank sent in the last completed step.
    """

    def __init__(self, exchange: Exchange, feedback: Feedback, agenda: Agenda, counters: Counters, settings: Settings) -> None:
        self.densities: dict[str, float] = {}
        self._exchange = exchange
        self._feedback = feedback
        self._agenda = agenda
        self._counters = counters
        self._settings = settings
        self._reduced: dict[str, str] = {}
        self._sums: list[Sums] = []
        agenda.reaction = 1

    def begin(self, parameters: Mapping[str, torch.Tensor], loss_scale: float) -> None:
        """Begin a step: with ``check``, see that the last one left the ranks equal."""
        if self._settings.check:
            agree_on_replicas(self._exchange, self._agenda.number, loss_scale, parameters, self._reduced)
            agree_on_sums(self._exchange, self._sums)

    def complete(self, step: Step[Flight | CooFlight]) -> None:
        """All or nothing: every bucket settles its residuals and is filled, or every bucket is spoiled and no residual is touched."""
        with self._counters.timed("decode_s"):
            fault = next((fault for flight in step.flights if (fault := flight.fault())), None)
            audit = Audit(step.flights, self._feedback, good=fault is None) if self._settings.check else None
            for flight in step.flights:
                if fault is None:
                    flight.land(self._feedback)
                else:
                    flight.spoil()
        if audit is not None:
            audit.verify(self._feedback)
            self._reduced, self._sums = audit.digests(), audit.sums()
        self._agenda.advance(step.flights, announced=step.flags, bad=fault is not None)
        self.densities |= self._counters.finish_step(step.flights, bad=fault is not None)
        if fault is not None and self._settings.on_nonfinite == "raise":
            raise NonFiniteError(f"step {step.number}: {fault}")

    def settle(self, *, forget: bool = False) -> None:
        """Everything is known, and raised, as soon as a step has completed."""
