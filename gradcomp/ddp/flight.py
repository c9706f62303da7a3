"""One bucket between its hook call and the end of its step: what went out, what came back, what becomes of it."""

import numpy as np
import torch

from gradcomp.core.feedback import Feedback
from gradcomp.core.scan import Accumulation, Floats
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.payload import Arrival, Released, fault_in, unpack
from gradcomp.ddp.plan import Piece, Plan, ring_limit
from gradcomp.ddp.traffic import ring_bytes


def scaled(values: Floats, loss_scale: float) -> Floats:
    """Values in the residual's units, in the gradient's; what overflows saturates on the wire."""
    if loss_scale == 1.0:
        return values
    with np.errstate(over="ignore"):
        product: Floats = values * values.dtype.type(loss_scale)
    return product


def weighed(values: torch.Tensor) -> tuple[float, float]:
    """A sum over a flat tensor that tells its elements apart, and the sum of its magnitudes, in fp64."""
    wide = values.double() * (1 + torch.arange(values.numel()) % 7)
    return float(wide.sum()), float(wide.abs().sum())


class Flight:
    """A bucket in flight. Its own callbacks write to it; it reads no other bucket's data.

    Args:
        plan: the bucket's layout in this step.
        step: the step's number.
        exchange: of the ranks.
        buffer: the bucket's own buffer [N], which holds the local gradients until :meth:`land` or :meth:`spoil`.
        loss_scale: what the gradients, and so what travels, are multiplied by beside the residuals.
        moving: by parameter, whether momentum is taken of it.
    """

    local: torch.Tensor | None = None
    """For ``check``: the local gradients as they were given."""

    def __init__(self, plan: Plan, step: int, exchange: Exchange, buffer: torch.Tensor, loss_scale: float, moving: dict[str, bool]) -> None:
        self.plan = plan
        self.arrivals: list[Arrival] = []
        self.rank = exchange.rank
        self.given: dict[str, tuple[float, float]] = {}
        self._step = step
        self._world_size = exchange.world_size
        self._scale = 1.0 / exchange.world_size
        self.loss_scale = loss_scale
        self.unscale = 1.0 / loss_scale
        self._buffer = buffer.detach()
        self._moving = moving
        self._ring: torch.Tensor | None = None
        self._ring_finite = True

    @property
    def result(self) -> torch.Tensor:
        """What DDP is given: the bucket's buffer."""
        return self._buffer

    # What goes out by the ring

    def load_ring(self, sums: dict[str, Accumulation], in_place: frozenset[str]) -> torch.Tensor | None:
        """The tensor to all-reduce, already divided by W as plain DDP does it; None where nothing travels by the ring.

        The buffer itself where no payload is gathered; else a new tensor, so that the local gradients stay. ``in_place`` names the
        parameters whose gradients accumulated in the buffer itself.
        """
        if not self.plan.rings:
            return None
        whole = not self.plan.header
        self._ring = self._buffer if whole else torch.cat([self._ring_part(piece, sums[piece.name]) for piece in self.plan.rings])
        for piece, part in zip(self.plan.rings, torch.split(self._ring, [piece.numel for piece in self.plan.rings])):
            # x / 3 is not x * (1 / 3): divided where plain DDP divides, scaled where it scales.
            part.div_(self._world_size) if piece.name in in_place else part.mul_(self._scale)
        return self._ring

    def _ring_part(self, piece: Piece, acc: Accumulation) -> torch.Tensor:
        if not piece.tracked:
            return piece.part(self._buffer).to(self._ring_dtype)
        sent = torch.from_numpy(scaled(acc.whole(), self.loss_scale))
        limit = ring_limit(piece.dtype)  # what is beyond stays in the residual
        return (sent if limit is None else sent.clamp(-limit, limit)).to(self._ring_dtype)

    @property
    def _ring_dtype(self) -> torch.dtype:
        """The gradient's own dtype; fp32 where a flush of half-precision gradients must leave nothing behind."""
        wide = self.plan.flush and self._buffer.dtype.itemsize < 4
        return torch.float32 if wide else self._buffer.dtype

    # What comes back

    def receive_payloads(self, gathered: torch.Tensor) -> None:
        """Decode every rank's payload: uint8 [W, B]."""
        self.arrivals = [unpack(self.plan, self._step, rank, row) for rank, row in enumerate(gathered.numpy())]

    def receive_ring(self, reduced: torch.Tensor) -> None:
        """Look at the reduced tensor, which is the one that was sent. A finite sum has only finite terms, so one pass is enough."""
        self._ring_finite = bool(reduced.sum().isfinite()) or bool(reduced.isfinite().all())

    def fault(self) -> str | None:
        """Why this bucket makes the step a bad one, the same on every rank; None where it is fine."""
        return fault_in(self.plan, self.arrivals, ring_finite=self._ring_finite)

    @property
    def held_back(self) -> dict[str, bool]:
        """By parameter: whether its gradient was zero on all ranks. It then releases nothing: DDP may throw the result away."""
        zero = np.logical_and.reduce([arrival.zero for arrival in self.arrivals]) if self.arrivals else [False] * len(self.plan.pieces)
        return {piece.name: bool(bit) for piece, bit in zip(self.plan.pieces, zero)}

    # What becomes of it

    def land(self, feedback: Feedback) -> None:
        """A good step: residual = residual + gradient - released, and the mean gradient into the buffer. Mutates both."""
        if not self.plan.header:
            return
        held_back = self.held_back
        for position, piece in enumerate((*self.plan.sparse, *self.plan.rides)):
            parts = [] if held_back[piece.name] else [arrival.released[position] for arrival in self.arrivals]
            gradient = piece.part(self._buffer)
            if parts and self._moving[piece.name]:
                feedback.roll(piece.name, gradient, parts[self.rank].indices, self.unscale)
            if piece.travel == "sparse" and parts and gradient.dtype == torch.float32:
                sent = [(part.indices, part.values) for part in parts if part.indices is not None]
                feedback.complete(piece.name, gradient, sent, own=self.rank, weight=self._scale, unscale=self.unscale)
                continue
            if piece.tracked and parts:
                feedback.keep(piece.name, gradient, parts[self.rank].indices, parts[self.rank].values, self.unscale)
            self._fill(gradient, parts)
        if self._ring is not None:
            for piece, reduced in zip(self.plan.rings, torch.split(self._ring, [piece.numel for piece in self.plan.rings])):
                self._land_ring(piece, reduced, feedback, held_back=held_back[piece.name])
        self._ring = None

    def _fill(self, gradient: torch.Tensor, parts: list[Released]) -> None:
        """The mean of what the ranks released of one piece."""
        gradient.zero_()
        direct = gradient.dtype in (torch.float32, torch.float64)
        total = gradient.numpy() if direct else np.zeros(gradient.numel(), np.float32)  # half precision is added in fp32
        for part in parts:  # in rank order, on every rank; a rank's indices are unique
            total[... if part.indices is None else part.indices] += part.values * total.dtype.type(self._scale)
        if not direct:
            gradient.copy_(torch.from_numpy(total))

    def _land_ring(self, piece: Piece, reduced: torch.Tensor, feedback: Feedback, *, held_back: bool) -> None:
        gradient = piece.part(self._buffer)
        if held_back:
            gradient.zero_()
            return
        if self._moving[piece.name]:
            feedback.roll(piece.name, gradient, None, self.unscale)
        if piece.tracked and gradient.dtype.itemsize >= 4:
            feedback.clear(piece.name)
        elif piece.tracked:
            sent = self._ring_part(piece, feedback.accumulate(piece.name, gradient, self.unscale))
            feedback.keep(piece.name, gradient, None, sent.float().numpy(), self.unscale)
        gradient.copy_(reduced)

    def spoil(self) -> None:
        """A bad step: make every gradient NaN, so that a GradScaler skips on all ranks. Mutates the buffer."""
        self._buffer.fill_(float("nan"))
        self._ring = None

    def moves(self, piece: Piece) -> bool:
        """Whether the piece's velocity changes in this step: some rank has a gradient, and momentum is taken of it."""
        return self._moving[piece.name] and not self.held_back[piece.name]

    def note(self, local: torch.Tensor, sums: dict[str, Accumulation]) -> None:
        """For ``check``: note the local gradients, and what this rank gives of each piece, before anything is made of it."""
        self.local = local
        for piece in self.plan.pieces:
            self.given[piece.name] = weighed(torch.from_numpy(scaled(sums[piece.name].whole(), self.loss_scale)))

    @property
    def dense_bytes(self) -> int:
        """What plain DDP would have sent."""
        return ring_bytes(self._world_size, self._buffer.numel() * self._buffer.element_size())

    @property
    def elements(self) -> int:
        """Gradient elements reduced."""
        return self._buffer.numel()

    @property
    def sent(self) -> dict[str, int]:
        """By parameter, the elements that this rank sent, by whatever way."""
        sizes = {piece.name: piece.numel for piece in self.plan.rings}
        if self.arrivals:
            sizes |= {part.piece.name: part.values.size for part in self.arrivals[self.rank].released}
        return sizes
