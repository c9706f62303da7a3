"""``check=True``: every step is done a second time, in the slow and obvious way, and compared; replicas are compared by checksum.

Nothing here shares code with what it checks, but for the payloads as they were decoded.
"""

import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from gradcomp.core.feedback import Feedback
from gradcomp.ddp.agreement import agree
from gradcomp.ddp.coo import CooFlight
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.flight import Flight, weighed
from gradcomp.ddp.payload import Arrival, Released
from gradcomp.ddp.plan import Piece, ring_limit
from gradcomp.errors import AccountingError


def _checksum(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided:
        return _checksum(tensor.coalesce().indices()) + _checksum(tensor.coalesce().values())
    return f"{zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()):08x}" if tensor.numel() else "empty"


def agree_on_replicas(
    exchange: Exchange, step: int, loss_scale: float, parameters: Mapping[str, torch.Tensor], reduced: Mapping[str, str]
) -> None:
    """Make sure that the ranks are the same replica.

    Args:
        exchange: of the ranks.
        step: the coming step.
        loss_scale: of the coming step.
        parameters: by name, as they are now.
        reduced: the checksums of the last step's reduced gradients, from :meth:`Audit.digests`.

    Raises:
        DesyncError: on every rank, naming rank, parameter and both checksums.

    Communication:
        One blocking all-gather of 16 bytes a rank.
    """
    values = {f"the value of parameter {name} before step {step}": _checksum(parameters[name]) for name in sorted(parameters)}
    agree(exchange, {f"the loss scale of step {step}": repr(loss_scale)} | dict(reduced) | values)


class Sums(NamedTuple):
    """Of one parameter that travelled by an all-reduce: weighed sums in fp64."""

    name: str
    given: float
    magnitude: float
    reduced: float
    eps: float


def agree_on_sums(exchange: Exchange, sums: Sequence[Sums]) -> None:
    """Make sure that what the last step's all-reduces gave is the mean of what the ranks put in, as far as a sum can tell.

    Raises:
        AccountingError: on every rank, naming the parameter.

    Communication:
        One blocking all-gather of 16 bytes a rank for each parameter that travelled so; none if there is none.
    """
    if not sums:
        return
    form = f"<{2 * len(sums)}d"
    own = struct.pack(form, *(number for part in sums for number in (part.given, part.magnitude)))
    rows = [struct.unpack(form, row) for row in exchange.gather_now(own)]
    for place, part in enumerate(sums):
        mean, magnitude = (sum(row[2 * place + which] for row in rows) / len(rows) for which in (0, 1))
        if not abs(part.reduced - mean) <= 4 * len(rows) * part.eps * magnitude + 1e-30:
            text = f"the reduced gradient of {part.name} in the last step is not the mean of what the ranks gave"
            raise AccountingError(f"{text}: it sums to {part.reduced} where {mean} was due")


class Audit:
    """The books of one step on one rank, opened before its residuals change.

    Args:
        flights: the step's buckets, decoded, their buffers still holding the local gradients.
        feedback: the residuals, still as before the step.
        good: whether the step completes; else no residual may change.
    """

    def __init__(self, flights: Sequence[Flight | CooFlight], feedback: Feedback, *, good: bool) -> None:
        self._flights = flights
        self._good = good
        self._before = {name: residual.clone() for name, residual in feedback.items()}
        self._velocities = {name: velocity.clone() for name, velocity in feedback.velocities()}
        self._gradients = [flight.result.clone() for flight in flights]

    def verify(self, feedback: Feedback) -> None:
        """Compare what was done with what should have been.

        Raises:
            AccountingError: naming the parameter, and how many of its elements are wrong.
        """
        expected, velocities = dict(self._before), dict(self._velocities)
        for flight, gradients in zip(self._flights, self._gradients):
            if self._good and isinstance(flight, Flight):
                for piece in flight.plan.pieces:
                    if feedback.momentum and flight.moves(piece):
                        self._verify_push(flight, piece, piece.part(gradients), feedback.momentum)
                        velocities[piece.name] = self._left(flight, piece, piece.part(gradients))
                    if piece.tracked:
                        expected[piece.name] = self._kept(flight, piece, piece.part(gradients))
                    elif piece.travel == "ride" and math.frexp(flight.loss_scale)[0] == 0.5:
                        own = torch.from_numpy(_release(flight.arrivals[flight.rank], piece).values)
                        _compare(f"what was sent of {piece.name}", own, piece.part(gradients).float())
                self._verify_mean(flight)
        for name, residual in feedback.items():
            _compare(f"the residual of {name}", residual, expected[name])
        for name, velocity in feedback.velocities():
            _compare(f"the velocity of {name}", velocity, velocities[name])

    def _verify_push(self, flight: Flight, piece: Piece, gradient: torch.Tensor, momentum: float) -> None:
        """What was made of the local gradient is, to rounding, its sum with ``momentum`` times the velocity."""
        if flight.local is None:
            return
        local, velocity = piece.part(flight.local).double(), self._velocities.get(piece.name)
        pushed = torch.zeros_like(local) if velocity is None else momentum / flight.unscale * velocity.double()
        error = (gradient.double() - local - pushed).abs()
        seen = torch.where(error <= 2.0**-22 * (local.abs() + pushed.abs()), local + pushed, gradient.double())
        _compare(f"the momentum of {piece.name}", seen, local + pushed)

    def _left(self, flight: Flight, piece: Piece, gradient: torch.Tensor) -> torch.Tensor:
        """What should be left of a parameter's velocity: all of it but where this rank released a selection."""
        left = (gradient * flight.unscale).float()
        own = _release(flight.arrivals[flight.rank], piece) if piece.travel == "sparse" else None
        return left if own is None or own.indices is None else left.index_fill(0, torch.from_numpy(own.indices), 0)

    def _kept(self, flight: Flight, piece: Piece, gradient: torch.Tensor) -> torch.Tensor:
        """What should stay of a parameter: ``fp32(residual + gradient)`` less what this rank's release gave everybody."""
        if _silent(flight, piece):
            return self._before[piece.name]
        scaled = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * flight.unscale
        acc = (self._before[piece.name].double() + scaled.double()).float()
        released = self._released(flight, piece, acc)
        kept = acc - released
        if flight.plan.form.name != "sign" and math.frexp(flight.loss_scale)[0] == 0.5:
            # What is subnormal rounds on its way to the residual's units; fp16 is exact below 2^29 in the gradient's.
            exact = (acc == 0) | ((acc.abs() > 2.0**-100) & (acc.abs().double() * flight.loss_scale < 2.0**29))
            both = released.double() + kept.double()
            _compare(f"what was released and what was kept of {piece.name}", both[exact], acc.double()[exact])
        return kept

    def _released(self, flight: Flight, piece: Piece, acc: torch.Tensor) -> torch.Tensor:
        """What this rank's release gave everybody, in the residual's units."""
        if piece.travel == "ring":
            limit = ring_limit(piece.dtype)
            if limit is None:
                return acc
            sent = (acc * flight.loss_scale).clamp(-limit, limit)
            return (sent if flight.plan.flush else sent.to(piece.dtype).float()) * flight.unscale
        own = _release(flight.arrivals[flight.rank], piece)
        values = torch.from_numpy(own.values.copy()) * flight.unscale
        return values if own.indices is None else torch.zeros_like(acc).index_put_((torch.from_numpy(own.indices),), values)

    def _verify_mean(self, flight: Flight) -> None:
        buffer = flight.result
        for piece in (*flight.plan.sparse, *flight.plan.rides):
            total = torch.zeros(piece.numel, dtype=torch.promote_types(buffer.dtype, torch.float32))
            for arrival in flight.arrivals:
                release = _release(arrival, piece)
                values = torch.from_numpy(release.values.copy()).to(total.dtype) * (1.0 / len(flight.arrivals))
                indices = torch.arange(piece.numel) if release.indices is None else torch.from_numpy(release.indices)
                total.index_add_(0, indices, values)
            mean = total.zero_() if _silent(flight, piece) else total
            _compare(f"the mean gradient of {piece.name}", piece.part(buffer), mean.to(buffer.dtype))

    def sums(self) -> list[Sums]:
        """What this rank gave to the step's all-reduces and what they gave it, for the next step's :func:`agree_on_sums`."""
        return list(self._sum()) if self._good else []

    def _sum(self) -> Iterator[Sums]:
        for flight in self._flights:
            if isinstance(flight, CooFlight):
                given, reduced = weighed(_rows(flight.given)), weighed(_rows(flight.result))
                yield Sums(flight.plan.pieces[0].name, *given, reduced[0], torch.finfo(flight.given.dtype).eps)
                continue
            for piece in flight.plan.rings:
                total, magnitude = flight.given[piece.name]
                saturated = piece.tracked and ring_limit(piece.dtype) is not None
                if not saturated and not (flight.arrivals and _silent(flight, piece)):
                    eps = max(torch.finfo(piece.dtype).eps, 2.0**-23)  # what was given was noted in fp32
                    yield Sums(piece.name, total, magnitude, weighed(piece.part(flight.result))[0], eps)

    def digests(self) -> dict[str, str]:
        """Checksums of the reduced gradients, for the next step's :func:`agree_on_replicas`."""
        return dict(self._digest())

    def _digest(self) -> Iterator[tuple[str, str]]:
        for flight in self._flights:
            for piece in flight.plan.pieces:
                whole = flight.result
                part = whole if isinstance(flight, CooFlight) else piece.part(whole)
                yield f"the reduced gradient of {piece.name} in the last step", _checksum(part)


def _rows(gradient: torch.Tensor) -> torch.Tensor:
    """A sparse gradient's sum over columns, by row: dense and flat."""
    gradient = gradient.coalesce()
    sums = torch.zeros(gradient.shape[0], dtype=torch.float64)
    return sums.index_add_(0, gradient.indices()[0], gradient.values().double().flatten(1).sum(1))


def _release(arrival: Arrival, piece: Piece) -> Released:
    return next(part for part in arrival.released if part.piece is piece)


def _silent(flight: Flight, piece: Piece) -> bool:
    """Whether no rank had a gradient, so that nothing may be released: DDP would throw it away."""
    position = flight.plan.pieces.index(piece)
    return all(bool(arrival.zero[position]) for arrival in flight.arrivals)


def _compare(what: str, seen: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = int((seen != expected).sum())
    if wrong:
        text = f"{what} is wrong in {wrong} of {expected.numel()} elements, by at most"
        raise AccountingError(f"{text} {float((seen.double() - expected.double()).abs().max())}: an error of gradcomp's, please report it")
