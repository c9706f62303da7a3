"""The communication hook: a bucket's life, top to bottom.

This module must not import annotations from the future: DDP checks the hook's real annotation when it is registered.
"""

import numpy as np
import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it without saying so

from gradcomp.core.rules import naming
from gradcomp.core.scan import Accumulation, keep_largest
from gradcomp.core.selection import Found, select
from gradcomp.ddp.coo import CooFlight
from gradcomp.ddp.device import hook as device
from gradcomp.ddp.flight import Flight, scaled
from gradcomp.ddp.payload import NOTHING, Chosen, pack
from gradcomp.ddp.plan import Piece, Plan, ring_limit
from gradcomp.ddp.state import SparseState
from gradcomp.ddp.step import Step


def sparse_hook(state: SparseState, bucket: GradBucket, *unexpected: object) -> torch.futures.Future[torch.Tensor]:
    """Send the elements of a bucket that matter, keep the rest: register with ``model.register_comm_hook(state, sparse_hook)``.

    Args:
        state: a :class:`gradcomp.SparseState` made for the model's network.
        bucket: DDP's bucket of local gradients, any floating dtype, on the CPU, dense or sparse COO, or dense on a CUDA device.
        unexpected: nothing; FSDP passes more, and is told so.

    Returns:
        A future of the bucket's buffer holding the mean over ranks of what was released; all futures of a backward pass complete
        together.

    Communication:
        See :class:`gradcomp.SparseState`. Issued here, in bucket order, never in a callback.

    Raises:
        DesyncError: the ranks disagree; on all ranks, before any payload moves.
        GradcompError: a rule failed; on this rank. Its peers wait for it until the process group's timeout.
    """
    if not isinstance(state, SparseState):
        raise ValueError(f"state must be a gradcomp.SparseState made for the network, got a {type(state).__name__}")
    if unexpected or not hasattr(bucket, "buffer"):
        given = f"{1 + len(unexpected)} argument(s), the first a {type(bucket).__name__}"
        raise ValueError(
            f"bucket must be a bucket of DistributedDataParallel's own reducer, got {given}: FullyShardedDataParallel and the python "
            "reducer of torch.compile (torch._dynamo.config.optimize_ddp) have none; wrap the network in DistributedDataParallel and keep "
            "its default reducer, compiled or not"
        )
    try:
        with torch.no_grad(), torch.autocast(bucket.buffer().device.type, enabled=False):  # rules see and keep fp32
            return _send(state, bucket)
    except Exception as error:
        state.give_up(error)
        raise


def _send(state: SparseState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    step = state.step_of(bucket)
    layout = state.layouts.of(bucket)
    buffer = bucket.buffer().detach()
    if buffer.layout != torch.strided:
        return _send_coo(state, bucket, step, layout)
    if state.on_device:
        return device.send(state, bucket, step, layout)

    # 1. Accumulate: residual + gradient, formed chunk by chunk when read; residuals stay untouched until the step completes. (What is
    # frozen has no gradient; should an old one lie in the bucket, it gets no momentum.)
    given = buffer.clone() if state.settings.check else None
    moving = {piece.name: parameter.requires_grad for piece, parameter in zip(layout, bucket.parameters())}
    sums = {p.name: state.feedback.accumulate(p.name, p.part(buffer), step.unscale, moving=moving[p.name]) for p in layout}
    state.look(sums)

    # 2. Select, by parameter. Rules that do not fix their count go first: what the ranks want decides how parameters travel.
    with state.timed("select_s"):
        found = {piece.name: _select(piece, sums[piece.name], buffer) for piece in layout if piece.sized_by_history}
    state.layouts.size(layout, lambda piece: int(np.isfinite(found[piece.name].values).sum()))
    plan = state.layouts.plan(layout, flush=step.flush)
    flight = Flight(plan, step.number, state.exchange, buffer, step.loss_scale, moving)
    if given is not None:
        flight.note(given, sums)

    if plan.header:
        with state.timed("select_s"):
            chosen = [_choose(piece, plan, sums[piece.name], found.get(piece.name), buffer, step) for piece in plan.pieces]

        # 3. Encode, into a buffer whose size every rank knows. 4. Account: what a rank releases is what its own bytes decode to,
        # so nothing is subtracted here; the payload comes back with the others.
        with state.timed("encode_s"):
            payload = torch.from_numpy(pack(plan, step.number, step.flags, chosen))

        # 5. Exchange: one all-gather, and beside it one ring all-reduce of what travels dense, both issued here.
        # 6. Decode, in the callbacks of both.
        step.watch(state.exchange.gather(payload), state.timed("decode_s")(flight.receive_payloads))
    ring = flight.load_ring(sums, state.in_place(bucket))
    if ring is not None:
        step.watch(state.exchange.ring(ring), state.timed("decode_s")(flight.receive_ring))

    # 7. Complete: the step does, for all of its buckets at once, when the last one has been decoded.
    return step.board(flight, is_last=step.at_last)


def _select(piece: Piece, acc: Accumulation, buffer: torch.Tensor) -> Found:
    """What the piece's rule selects."""
    with naming(piece.rule, piece.name):
        return select(piece.rule, piece.name, acc, piece.shaped(buffer))


def _send_coo(
    state: SparseState, bucket: GradBucket, step: Step[Flight | CooFlight], layout: tuple[Piece, ...]
) -> torch.futures.Future[torch.Tensor]:
    """A gradient that is a sparse tensor already goes as in plain DDP, inside the step's gate like all others."""
    if state.on_device:
        name, where = layout[0].name, bucket.buffer().device
        raise ValueError(f"the gradient of {name} must be dense on {where}: sparse tensors are sent on the CPU only, as yet")
    plan = Plan(layout, "fp32", flush=False, report=False)
    flight = CooFlight(plan, state.exchange, bucket.buffer())
    step.watch(state.exchange.ring_coo(flight.ring), flight.receive_ring)
    return step.board(flight, is_last=step.at_last)


def _choose(
    piece: Piece, plan: Plan, acc: Accumulation, found: Found | None, buffer: torch.Tensor, step: Step[Flight | CooFlight]
) -> Chosen:
    """What this rank sends of one piece, and what its header says about it."""
    zero = (piece.tracked or plan.momentum) and acc.is_zero()
    wanted = 0 if found is None else found.indices.size
    if piece.travel == "sparse":
        indices, values, finite = found or _select(piece, acc, buffer)
        wanted = indices.size
        indices, values = keep_largest(indices, values, piece.capacity)
        return Chosen(indices, scaled(values, step.loss_scale), wanted, zero, finite)
    flushed = plan.flush and piece.tracked
    values = acc.whole() if piece.travel == "ride" or plan.report or flushed else NOTHING.values
    finite = bool(np.isfinite(values).all()) and (found is None or found.finite)
    values = scaled(values, step.loss_scale)
    # Without a local gradient the residual may have to stay; with one, what half precision cannot hold.
    limit = ring_limit(piece.dtype)
    beyond = not acc.leaves_nothing() if zero else limit is not None and bool((np.abs(values) > limit).any())
    rest = flushed and beyond
    return Chosen(NOTHING.indices, values if piece.travel == "ride" else NOTHING.values, wanted, zero, finite, rest)
