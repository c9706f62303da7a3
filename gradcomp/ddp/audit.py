"""``check=True``: every step is done a second time, in the slow and obvious way, and compared; replicas are compared by checksum.

Nothing here shares code with what it checks, but for the payloads as they were decoded.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from gradcomp.core.feedback import Feedback
from gradcomp.ddp.agreement import agree
from gradcomp.ddp.coo import CooFlight
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.flight import Flight
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
        # Another loss scale than a power of two rounds once more on the way to the residual's units and back.
        self._exact = all(math.frexp(flight.loss_scale)[0] == 0.5 for flight in flights if isinstance(flight, Flight))
        self._before = {name: residual.clone() for name, residual in feedback.items()}
        self._gradients = [flight.result.clone() for flight in flights]

    def verify(self, feedback: Feedback) -> None:
        """Compare what was done with what should have been.

        Raises:
            AccountingError: naming the parameter, and how many of its elements are wrong.
        """
        expected = dict(self._before)
        for flight, gradients in zip(self._flights, self._gradients):
            if self._good and isinstance(flight, Flight):
                for piece in flight.plan.pieces:
                    if piece.tracked:
                        expected[piece.name] = self._kept(flight, piece, piece.part(gradients))
                self._verify_mean(flight)
        for name, residual in feedback.items():
            _compare(f"the residual of {name}", residual, expected[name], 0.0 if self._exact else 1e-5)

    def _kept(self, flight: Flight, piece: Piece, gradient: torch.Tensor) -> torch.Tensor:
        """What should stay of a parameter: ``fp32(residual + gradient)`` less what this rank's release gave everybody."""
        acc = (self._before[piece.name].double() + gradient.double() * flight.unscale).float()
        released = self._released(flight, piece, acc)
        kept = acc - released
        if flight.plan.form.name != "sign" and self._exact and bool((acc.abs() < 2.0**29).all()):
            _compare(f"what was released and what was kept of {piece.name}", released.double() + kept.double(), acc.double())
        return kept

    def _released(self, flight: Flight, piece: Piece, acc: torch.Tensor) -> torch.Tensor:
        """What this rank's release gave everybody, in the residual's units."""
        if _silent(flight, piece):
            return torch.zeros_like(acc)
        if piece.travel == "ring":
            limit = ring_limit(piece.dtype)
            if limit is None:
                return acc
            sent = (acc.double() * flight.loss_scale).clamp(-limit, limit).float()
            return (sent if flight.plan.flush else sent.to(piece.dtype).float()) * flight.unscale
        own = _release(flight.arrivals[flight.rank], piece)
        values = torch.from_numpy(own.values * flight.unscale).float()
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

    def digests(self) -> dict[str, str]:
        """Checksums of the reduced gradients, for the next step's :func:`agree_on_replicas`."""
        return dict(self._digest())

    def _digest(self) -> Iterable[tuple[str, str]]:
        for flight in self._flights:
            for piece in flight.plan.pieces:
                whole = flight.result
                part = whole if isinstance(flight, CooFlight) else piece.part(whole)
                yield f"the reduced gradient of {piece.name} in the last step", _checksum(part)


def _release(arrival: Arrival, piece: Piece) -> Released:
    return next(part for part in arrival.released if part.piece is piece)


def _silent(flight: Flight, piece: Piece) -> bool:
    """Whether no rank had a gradient, so that nothing may be released: DDP would throw it away."""
    position = flight.plan.pieces.index(piece)
    return all(bool(arrival.zero[position]) for arrival in flight.arrivals)


def _compare(what: str, seen: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> None:
    """Raise where a finite value differs by more than ``tolerance`` times the largest."""
    most = tolerance * float(expected.abs().max()) if expected.numel() else 0.0
    difference = (seen.double() - expected.double()).abs()
    wrong = int((~(difference <= most)).sum())
    if wrong:
        text = f"{what} is wrong in {wrong} of {expected.numel()} elements, by at most {float(difference.max())}"
        raise AccountingError(f"{text}: an error of gradcomp's, please report it")
