"""A bucket whose gradient is a sparse tensor already, as of ``Embedding(sparse=True)``: it goes as in plain DDP, and stays sparse."""

import torch

from gradcomp.core.feedback import Feedback
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.payload import Arrival
from gradcomp.ddp.plan import Plan


class CooFlight:
    """Such a bucket in flight, beside the :class:`~gradcomp.ddp.flight.Flight` of the others. It leaves no residual.

    Args:
        plan: the bucket's layout: one parameter, without a payload.
        exchange: of the ranks.
        gradient: the local gradient, sparse COO, coalesced or not.
    """

    def __init__(self, plan: Plan, exchange: Exchange, gradient: torch.Tensor) -> None:
        self.plan = plan
        self.arrivals: list[Arrival] = []
        self.ring = gradient.detach().div(exchange.world_size)
        """The tensor to all-reduce, divided by W as plain DDP does it."""
        self.dense_bytes = exchange.coo_bytes(self.ring)
        self.elements = self.ring._values().numel()
        self.given = gradient.detach()

    @property
    def result(self) -> torch.Tensor:
        """What DDP is given: a sparse tensor."""
        return self.ring

    @property
    def sent(self) -> dict[str, int]:
        """By parameter, the elements that this rank sent."""
        return {piece.name: self.elements for piece in self.plan.pieces}

    def receive_ring(self, reduced: torch.Tensor) -> None:
        """The reduced tensor is the one that was sent."""

    def fault(self) -> str | None:
        """Why this bucket makes the step a bad one, the same on every rank; None where it is fine."""
        if bool(self.ring._values().isfinite().all()):
            return None
        return f"the reduced gradient of {self.plan.pieces[0].name}, a sparse tensor, is not finite"

    def land(self, feedback: Feedback) -> None:
        """A good step: the result is there already, and nothing stays behind."""

    def spoil(self) -> None:
        """A bad step: make every value NaN. Mutates the result."""
        self.ring._values().fill_(float("nan"))
