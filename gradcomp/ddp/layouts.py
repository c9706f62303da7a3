"""Where a bucket's parameters lie and how they travel: agreed with all ranks once for each layout, then known to each by itself."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it without saying so

from gradcomp.core.feedback import Feedback
from gradcomp.core.rules import AnyRule, Dense, TopK, at_step, describe, is_dense, is_scheduled
from gradcomp.ddp.agenda import Agenda
from gradcomp.ddp.agreement import agree, largest
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.network import Network, real_like
from gradcomp.ddp.plan import Piece, Plan, Routing, without_needless_gather
from gradcomp.ddp.settings import Settings
from gradcomp.errors import GradcompError, warn


class Layouts:
    """The layouts of one model's buckets at one world size.

    Args:
        exchange: of the ranks.
        network: the model's parameters.
        rules: name -> rule.
        settings: the hook's.
        feedback: the residuals; a parameter that travels in a way that leaves something behind is given one.
        agenda: what changes from step to step.
        settle: called before ranks agree, so that all of them know what there is to know of completed steps.

    Attributes:
        routing: how each parameter travels.
    """

    def __init__(
        self,
        exchange: Exchange,
        network: Network,
        rules: Mapping[str, AnyRule],
        settings: Settings,
        feedback: Feedback,
        agenda: Agenda,
        settle: Callable[[], None],
    ) -> None:
        self._exchange = exchange
        self._network = network
        self._rules = rules
        self._settings = settings
        self._feedback = feedback
        self._agenda = agenda
        self._settle = settle
        for name, parameter in network.parameters().items():
            if parameter.requires_grad:
                self._check_momentum(name, network.shapes[name].dtype)
        parameters = [(name, rules[name], like.numel(), like.dtype) for name, like in network.shapes.items()]
        self.routing = Routing(parameters, values=settings.values, fallback=settings.fallback, world_size=exchange.world_size)
        self._layouts: dict[tuple[object, ...], tuple[Piece, ...]] = {}
        self._plans: dict[tuple[str, ...], tuple[object, object, Plan]] = {}

    def warn_if_inactive(self) -> None:
        """Warn where compression is asked for and every parameter that is trained would travel dense."""
        asked = {name: rule for name, rule in self._rules.items() if not is_dense(rule) and name in self._network.trained}
        if not asked or not all(type(rule) is TopK and not is_scheduled(rule) for rule in asked.values()):
            return  # nothing was asked for, or how much is not known yet
        likes = self._network.shapes
        if all(self.routing.route(n, rule, likes[n].numel(), likes[n].dtype, None)[0] != "sparse" for n, rule in asked.items()):
            warn(
                f"compression is configured but inactive: at world size {self._exchange.world_size} every parameter costs fewer "
                "bytes dense; lower the density, or pass fallback='never' to insist"
            )

    def _check_momentum(self, name: str, dtype: torch.dtype) -> None:
        if self._settings.momentum and dtype != torch.float32:
            text = "it is added to the gradient, and kept as fp32"
            raise ValueError(f"momentum must be 0 where gradients are not fp32, and that of parameter {name} is {dtype}: {text}")

    def __len__(self) -> int:
        return len(self._layouts)

    def _description(self) -> dict[str, str]:
        """Everything that must be equal on all ranks, of the whole model: how one parameter travels can depend on the others."""
        progress = {key: repr(value) for key, value in self._agenda.state_dict().items() if key != "announce"}
        shapes = self._network.shapes
        device = {"device": self._network.device.type}
        held = {"parameters with a residual": repr(sorted(name for name in shapes if name in self._feedback))}
        rules = {f"parameter {n}": f"{tuple(s.shape)}, {s.dtype}, {describe(self._rules[n])}" for n, s in shapes.items()}
        return self._settings.describe() | device | progress | held | rules

    def of(self, bucket: GradBucket) -> tuple[Piece, ...]:
        """The bucket's parameters and their places, agreed with all ranks the first time they are seen so."""
        parameters = bucket.parameters()
        names = tuple(self._network.name_of(parameter) for parameter in parameters)
        removed, buffer = self._agenda.removed, bucket.buffer()
        key = (bucket.index(), names, tuple(parameter.stride() for parameter in parameters), buffer.layout, removed)
        if key not in self._layouts:
            pieces = self._pieces(names, parameters, buffer)
            if sum(piece.numel for piece in pieces) != buffer.numel():
                raise GradcompError(f"bucket {bucket.index()} has {buffer.numel()} elements, its parameters another number")
            self._settle()
            agree(self._exchange, self._description() | {f"parameters of bucket {bucket.index()}": repr((names, str(buffer.layout)))})
            self._layouts[key] = pieces
        layout = self._layouts[key]
        if not any(is_scheduled(piece.rule) for piece in layout):
            return layout
        return tuple(replace(piece, rule=at_step(piece.rule, self._agenda.number)) for piece in layout)

    def _pieces(self, names: tuple[str, ...], parameters: list[torch.Tensor], buffer: torch.Tensor) -> tuple[Piece, ...]:
        start, pieces = 0, []
        for name, parameter in zip(names, parameters):
            like = self._place(name, parameter, buffer.dtype)
            if buffer.layout != torch.strided and name in self._feedback:
                raise GradcompError(
                    f"parameter {name} has a sparse gradient and a residual of dense ones, which a sparse gradient cannot carry: flush(), "
                    "and go on for three steps, before its gradients become sparse"
                )
            self._check_momentum(name, buffer.dtype)  # it may have been frozen when the group was resolved
            if buffer.layout != torch.strided and self._settings.momentum:
                raise ValueError(f"momentum must be 0 where gradients are sparse tensors, and that of parameter {name} is")
            # A gradient that is a sparse tensor already goes as in plain DDP.
            rule = Dense() if self._agenda.removed or buffer.layout != torch.strided else self._rules[name]
            shape, numel = tuple(like.shape), like.numel()
            pieces.append(Piece(name=name, rule=rule, start=start, numel=numel, dtype=buffer.dtype, shape=shape, stride=like.stride()))
            start += numel
        return tuple(pieces)

    def _place(self, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A parameter's shape and strides, which are those of its gradient in the bucket, whatever ``bucket.gradients()`` says."""
        seen, now = self._network.shapes[name], real_like(parameter)
        if (dtype, now.stride()) != (seen.dtype, seen.stride()):
            raise GradcompError(
                f"parameter {name} was {seen.dtype} with strides {seen.stride()} and has a {dtype} gradient and strides {now.stride()}: "
                "change dtype and memory format before the model is wrapped in DDP, which keeps its buckets as they were"
            )
        return now

    def size(self, layout: tuple[Piece, ...], wanted: Callable[[Piece], int]) -> None:
        """Give parameters that are sized by history and have none their first capacities: collective where there are any."""
        fresh = [piece for piece in layout if piece.sized_by_history and self._agenda.capacity(piece.name) is None]
        if fresh:
            for piece, most in zip(fresh, largest(self._exchange, [wanted(piece) for piece in fresh])):
                self._agenda.start(piece.name, piece.numel, most)

    def plan(self, layout: tuple[Piece, ...], *, flush: bool) -> Plan:
        """How the bucket's parameters travel in this step: the same on all ranks."""
        capacities = tuple(self._agenda.capacity(piece.name) if piece.sized_by_history else None for piece in layout)
        names = tuple(piece.name for piece in layout)
        cached = self._plans.get(names)
        if cached is None or cached[0] is not layout or cached[1] != (capacities, flush, self._held(names)):
            routed = [self._routed(piece, history, flush) for piece, history in zip(layout, capacities)]
            values, report = self._settings.values, self._settings.on_nonfinite == "raise" and not self._agenda.removed
            momentum = self._settings.momentum > 0
            pieces = routed if momentum else without_needless_gather(routed, values)
            plan = Plan(pieces, values, flush=flush, report=report, momentum=momentum)
            # Routing makes parameters hold residuals: what holds is noted afterwards.
            cached = self._plans[names] = layout, (capacities, flush, self._held(names)), plan
        return cached[2]

    def _held(self, names: Iterable[str]) -> tuple[bool, ...]:
        return tuple(name in self._feedback for name in names)

    def _routed(self, piece: Piece, history: int | None, flush: bool) -> Piece:
        if self._agenda.removed:
            return replace(piece, travel="ring", capacity=0, tracked=False)
        travel, capacity = self.routing.route(piece.name, piece.rule, piece.numel, piece.dtype, history)
        if self.routing.keeps_rest(travel, piece.dtype):
            self._feedback.ensure(piece.name, piece.numel)
        if flush:
            travel, capacity = "ring", 0
        return replace(piece, travel=travel, capacity=capacity, tracked=piece.name in self._feedback)
