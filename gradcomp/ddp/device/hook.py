"""A bucket's life on the device, top to bottom: the steps of :mod:`gradcomp.ddp.hook`."""

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it without saying so

from gradcomp.core.device import choose, pick
from gradcomp.core.rules import naming
from gradcomp.ddp.device.flight import DeviceFlight
from gradcomp.ddp.plan import Piece
from gradcomp.ddp.state import SparseState
from gradcomp.ddp.step import Step


def send(state: SparseState, bucket: GradBucket, step: Step[DeviceFlight], layout: tuple[Piece, ...]) -> torch.futures.Future[Tensor]:
    """As :func:`gradcomp.sparse_hook`. The host waits for the device where a layout is new, and where ``analyze`` was called."""
    buffer = bucket.buffer().detach()
    scale, feedback = state.settings.loss_scale_on(buffer.device), state.feedback
    unscale = None if scale is None else scale.reciprocal()

    # 1. Accumulate: momentum goes into the gradients; residuals stay untouched until the step completes.
    moving = {piece.name: parameter.requires_grad for piece, parameter in zip(layout, bucket.parameters())}
    zero = {piece.name: ~piece.part(buffer).any() for piece in layout}
    for piece in layout:
        if moving[piece.name]:
            feedback.push(piece.name, piece.part(buffer), scale)
    sums = {piece.name: feedback.total(piece.name, piece.part(buffer), unscale) for piece in layout}
    state.look(sums)

    # 2. Select, by parameter: a mask, then as many places as all ranks know there are.
    with state.timed("select_s"):
        masks = {piece.name: _mask(piece, sums[piece.name], buffer) for piece in layout if piece.sized_by_history}
        state.layouts.size(layout, lambda piece: int((masks[piece.name] & sums[piece.name].isfinite()).sum()))
        plan = state.layouts.plan(layout, flush=step.flush)
        masks |= {piece.name: _mask(piece, sums[piece.name], buffer) for piece in plan.sparse if piece.name not in masks}
        picked = {p.name: pick(masks[p.name], sums[p.name], p.capacity, fits=not p.sized_by_history) for p in plan.counted}
    flight = DeviceFlight(
        plan,
        step.number,
        state.exchange,
        buffer,
        feedback,
        scale=scale,
        unscale=unscale,
        moving=moving,
        zero=zero,
        removing=step.removing,
    )

    # 3. Encode. 4. Account: by what a rank's own bytes decode to. 5. Exchange. 6. Decode: when the step's last bucket has been issued.
    if plan.header:
        with state.timed("encode_s"):
            payload = flight.load_payload(step.flags, sums, picked)
        step.watch(state.exchange.gather(payload), state.timed("decode_s")(flight.receive_payloads))
    ring = flight.load_ring(sums, state.in_place(bucket))
    if ring is not None:
        step.watch(state.exchange.ring(ring), state.timed("decode_s")(flight.receive_ring))

    # 7. Complete: the step does, for all of its buckets at once.
    return step.board(flight, is_last=step.at_last)


def _mask(piece: Piece, acc: Tensor, buffer: Tensor) -> Tensor:
    with naming(piece.rule, piece.name):
        return choose(piece.rule, piece.name, acc, piece.shaped(buffer))
