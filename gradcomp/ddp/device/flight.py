"""One bucket between its hook call and the end of its step, as :class:`gradcomp.ddp.flight.Flight`, on the device."""

import torch
from torch import Tensor

from gradcomp.core.device import Picked
from gradcomp.core.feedback import Feedback
from gradcomp.ddp.device.payload import Chosen, Received, pack, unpack
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.payload import Arrival, fault_in, read_header
from gradcomp.ddp.plan import Piece, Plan, ring_limit
from gradcomp.ddp.traffic import ring_bytes
from gradcomp.errors import GradcompError


class DeviceFlight:
    """A bucket in flight.

    Args:
        plan: the bucket's layout in this step.
        step: the step's number.
        exchange: of the ranks.
        buffer: the bucket's own buffer [N], which holds the local gradients until :meth:`land`.
        feedback: the residuals and velocities.
        scale: what the gradients, and so what travels, are multiplied by beside the residuals: a scalar, None for 1.
        unscale: 1 / scale.
        moving: by parameter, whether momentum is taken of it.
        zero: by parameter, whether its local gradient was zero everywhere: a bool scalar.
        removing: whether this flush may be the last.
    """

    def __init__(
        self,
        plan: Plan,
        step: int,
        exchange: Exchange,
        buffer: Tensor,
        feedback: Feedback,
        *,
        scale: Tensor | None,
        unscale: Tensor | None,
        moving: dict[str, bool],
        zero: dict[str, Tensor],
        removing: bool = False,
    ) -> None:
        self.plan = plan
        self.arrivals: list[Arrival] = []
        """What the headers said, once the host has read them."""
        self.elements = buffer.numel()
        self.dense_bytes = ring_bytes(exchange.world_size, buffer.numel() * buffer.element_size())
        self.sent: dict[str, int] = {piece.name: 0 if piece.travel == "sparse" else piece.numel for piece in plan.pieces}
        """By parameter, the elements that this rank sent: of sparse ones once the host has read the headers."""
        self._step = step
        self._rank = exchange.rank
        self._world_size = exchange.world_size
        self._weight = 1.0 / exchange.world_size
        self._buffer = buffer
        self._scale = scale
        self._unscale = unscale
        self._moving = moving
        self._feedback = feedback
        self._zero = zero
        self._removing = removing
        self._received: Received | None = None
        self._headers: Tensor | None = None
        self._ring: Tensor | None = None
        self._rung: dict[str, Tensor] = {}
        self._flag = buffer.new_zeros((), dtype=torch.bool)

    @property
    def result(self) -> Tensor:
        """What DDP is given: the bucket's buffer."""
        return self._buffer

    # What goes out

    def _scaled(self, values: Tensor) -> Tensor:
        return values if self._scale is None else values * self._scale

    def load_payload(self, flags: int, sums: dict[str, Tensor], picked: dict[str, Picked]) -> Tensor:
        """The payload to gather: uint8 [B].

        Args:
            flags: what this rank announces.
            sums: by parameter, residual + gradient.
            picked: what was selected of the pieces that are counted.
        """
        chosen = [self._choose(piece, sums[piece.name], picked.get(piece.name)) for piece in self.plan.pieces]
        return pack(self.plan, self._step, flags, chosen, self._buffer)

    def _choose(self, piece: Piece, exact: Tensor, picked: Picked | None) -> Chosen:
        true, false = ~self._flag, self._flag
        zero = self._zero[piece.name] if piece.tracked or self.plan.momentum else false
        if piece.travel == "sparse" and picked is not None:
            return Chosen(picked._replace(values=self._scaled(picked.values)), None, zero, picked.finite, false)
        flushed = self.plan.flush and piece.tracked
        finite = true if picked is None else picked.finite
        if not (piece.travel == "ride" or self.plan.report or flushed):
            return Chosen(picked, None, zero, finite, false)
        values, rest = self._scaled(exact), false
        if flushed:
            limit, left = ring_limit(piece.dtype), self._owes(piece)
            beyond = false if limit is None else (values.abs() > limit).any()
            rest = torch.where(zero, left, beyond & left if self._removing else beyond)
        return Chosen(picked, values if piece.travel == "ride" else None, zero, finite & exact.isfinite().all(), rest)

    def load_ring(self, sums: dict[str, Tensor], in_place: frozenset[str]) -> Tensor | None:
        """The tensor to all-reduce, as :meth:`gradcomp.ddp.flight.Flight.load_ring`."""
        if not self.plan.rings:
            return None
        parts = [self._ring_part(piece, sums[piece.name]) for piece in self.plan.rings] if self.plan.header else []
        self._ring = torch.cat(parts) if parts else self._buffer
        for piece, part in zip(self.plan.rings, torch.split(self._ring, [piece.numel for piece in self.plan.rings])):
            part.div_(self._world_size) if piece.name in in_place else part.mul_(self._weight)
        return self._ring

    def _ring_part(self, piece: Piece, exact: Tensor) -> Tensor:
        wide = self.plan.flush and self._buffer.dtype.itemsize < 4
        dtype = torch.float32 if wide else self._buffer.dtype
        if not piece.tracked:
            return piece.part(self._buffer).to(dtype)
        values, limit = self._scaled(exact), ring_limit(piece.dtype)
        if limit is None:
            return values.to(dtype)
        sent = values.clamp(-limit, limit)  # what is beyond stays in the residual
        if self._removing:  # it is not known yet whether this flush is the last: where nothing is pending it leaves nothing
            sent = torch.where(self._owes(piece), sent, values)
        self._rung[piece.name] = sent = sent.to(dtype)
        return sent

    def _owes(self, piece: Piece) -> Tensor:
        """Whether the residual is not zero everywhere."""
        residual = self._feedback.get(piece.name)
        return self._flag.new_zeros(()) if residual is None else residual.any()

    # What comes back

    def receive_payloads(self, gathered: Tensor) -> None:
        """Decode every rank's payload: uint8 [W, B]."""
        self._received = unpack(self.plan, self._step, gathered, self.elements)
        self._headers = gathered[:, : self.plan.header_bytes]
        self._flag = self._flag | self._received.not_finite.any() | ~self._received.intact

    def receive_ring(self, reduced: Tensor) -> None:
        """Look at the reduced tensor, which is the one that was sent."""
        self._flag = self._flag | ~reduced.isfinite().all()

    @property
    def bad(self) -> Tensor:
        """Whether this bucket makes the step a bad one, the same on every rank: a bool scalar."""
        return self._flag

    @property
    def seen(self) -> list[Tensor]:
        """What the host has to know of it, to be copied there: whether it is bad, has a loss scale, and is intact; the headers."""
        received, scaled = self._received, torch.ones_like(self._flag) if self._scale is None else self._scale > 0
        if received is None or self._headers is None:
            return [torch.stack([self._flag, scaled])]
        return [torch.stack([self._flag, scaled, received.intact]), self._headers.contiguous()]

    # What becomes of it

    def land(self, bad: Tensor) -> None:
        """Complete the step: residuals and velocities, and the mean gradient into the buffer; NaN instead, and neither, if it is bad.

        Args:
            bad: bool scalar, of the whole step.
        """
        received = self._received
        if received is not None:
            self._land_payload(received, bad)
        self._buffer.masked_fill_(bad, float("nan"))
        self._received = self._headers = self._ring = None
        self._rung.clear()

    def _land_payload(self, received: Received, bad: Tensor) -> None:
        held_back = dict(zip((piece.name for piece in self.plan.pieces), received.zero.all(0)))
        exact = torch.float64 if self._buffer.dtype == torch.float64 else torch.float32
        mean = self._buffer.new_zeros(self.elements + 1, dtype=exact)  # the last place is for padding
        own = self._buffer.new_zeros(self.elements + 1, dtype=torch.float32)
        sent = self._buffer.new_zeros(self.elements + 1, dtype=torch.bool)
        for places, values in zip(received.places, received.values):  # in rank order, on every rank; a rank's places are unique
            mean.index_add_(0, places, values.to(exact) * self._weight)
        if received.places:
            own.index_copy_(0, received.places[self._rank], received.values[self._rank])
            sent.index_fill_(0, received.places[self._rank], True)
        for piece, rides in zip(self.plan.rides, received.rides):
            for values in rides:
                piece.part(mean).add_(values.to(exact) * self._weight)
            piece.part(own).copy_(rides[self._rank])
        for piece in (*self.plan.sparse, *self.plan.rides):
            skip = held_back[piece.name] | bad
            gradient = piece.part(self._buffer)
            if self._moving[piece.name]:
                self._feedback.glide(piece.name, gradient, piece.part(sent) if piece.travel == "sparse" else None, skip, self._unscale)
            if piece.tracked:
                self._feedback.settle(piece.name, gradient, piece.part(own), skip, self._unscale)
            gradient.copy_(torch.where(held_back[piece.name], 0.0, piece.part(mean)))
        if self._ring is not None:
            for piece, reduced in zip(self.plan.rings, torch.split(self._ring, [piece.numel for piece in self.plan.rings])):
                self._land_ring(piece, reduced, held_back[piece.name], bad)

    def _land_ring(self, piece: Piece, reduced: Tensor, held_back: Tensor, bad: Tensor) -> None:
        gradient, skip = piece.part(self._buffer), held_back | bad
        if self._moving[piece.name]:
            self._feedback.glide(piece.name, gradient, None, skip, self._unscale)
        if piece.tracked:
            rung = self._rung.get(piece.name)
            self._feedback.settle(piece.name, gradient, None if rung is None else rung.float(), skip, self._unscale)
        gradient.copy_(torch.where(held_back, 0.0, reduced))

    # Later, on the host

    def read(self, seen: list[Tensor]) -> str | None:
        """Take note of what :attr:`seen` held, on the CPU by now.

        Returns:
            Why this bucket made its step a bad one; None where it did not.

        Raises:
            GradcompError: what was gathered cannot be right, or there was no loss scale.
        """
        bad, scaled, *intact = seen[0].tolist()
        if not scaled:
            raise GradcompError(f"step {self._step}: the scale of grad_scaler must be above 0: it has been backed off too often")
        for rank, row in enumerate(seen[1].numpy() if intact else ()):
            arrival, sent, _ = read_header(self.plan, self._step, rank, row)
            self.arrivals.append(arrival)
            if rank == self._rank:
                self.sent |= {piece.name: sent[piece.name] for piece in self.plan.sparse}
        if not all(intact):
            raise GradcompError(f"step {self._step}: a rank's payload does not hold what its header announces")
        return fault_in(self.plan, self.arrivals, ring_finite=not bad)  # what else is bad is in the headers
