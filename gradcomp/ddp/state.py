"""The hook's state: settings, residuals, the layouts that the ranks have agreed on, and the step under way."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import _GeneratorContextManager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it without saying so

from gradcomp.core.feedback import Feedback
from gradcomp.core.magnitude import Magnitudes
from gradcomp.core.policy import Policy
from gradcomp.core.rules import AnyRule, Dense, TopK, at_step, describe, is_dense, is_scheduled, number, warmed_up, whole
from gradcomp.core.scan import Accumulation
from gradcomp.core.values import check_values
from gradcomp.ddp.agenda import Agenda
from gradcomp.ddp.agreement import agree, largest
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.handle import Handle
from gradcomp.ddp.network import Network
from gradcomp.ddp.plan import Piece, Plan, Routing, without_needless_gather
from gradcomp.ddp.step import Step
from gradcomp.ddp.traffic import Counters, ring_bytes
from gradcomp.errors import GradcompError, NonFiniteError


def _one_of(field: str, value: str, *allowed: str) -> str:
    if value not in allowed:
        raise ValueError(f"{field} must be one of {list(allowed)}, got {value!r}")
    return value


class SparseState(Handle):
    """The state of :func:`gradcomp.sparse_hook`, for ``model.register_comm_hook(state, gradcomp.sparse_hook)``.

    May be built before ``init_process_group``; the group is resolved at the first bucket. The module is held weakly.

    Args:
        module: the network, wrapped in DDP or not; its parameters real and on the CPU.
        rule: the rule of parameters with two dimensions and at least 1,024 elements; ``TopK(0.01)`` if None.
        overrides: glob over parameter names -> rule; the first match wins. Other parameters are ``Dense``.
        values: format of sparse values in payloads: ``fp32``, ``bf16``, ``fp16``, ``int8`` or ``sign``; small dense parameters
            are sent as bf16 beside the last two.
        warmup_steps: steps over which the density of every ``TopK`` rule falls exponentially to its own; other rules have no
            density to warm up.
        warmup_density: the fraction kept at step 0 of a warm-up.
        on_nonfinite: ``propagate`` fills every gradient of a bad step with NaN on all ranks (a GradScaler skips it); ``raise``
            raises from ``backward()`` on all ranks: a RuntimeError, as torch makes of any error in a future, that names rank and
            parameter; the :class:`gradcomp.NonFiniteError` itself is ``last_error``. Residuals stay as they were either way. Training
            can go on after a raise, but with ``find_unused_parameters=True`` torch's own bookkeeping is broken off by it.
        fallback: ``dense`` lets a parameter travel dense where that costs fewer bytes; ``never`` keeps it sparse.
        group: the process group of the DDP model; if None that of ``module`` where it is wrapped, else the default group.

    Raises:
        ValueError: a setting out of its range, named with its value.

    Communication:
        A bucket: one all-gather of its payload, ``(W-1) * payload`` bytes a rank, and where some of its parameters travel dense
        one ring all-reduce of those, ``2(W-1)/W`` of their bytes. A new bucket layout: one blocking all-gather of 16 bytes, and 8
        for each parameter whose capacity has no history.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        rule: AnyRule | None = None,
        *,
        overrides: Mapping[str, AnyRule] | None = None,
        values: str = "bf16",
        warmup_steps: int = 0,
        warmup_density: float = 0.25,
        on_nonfinite: str = "propagate",
        fallback: str = "dense",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        policy = Policy(TopK(0.01) if rule is None else rule, overrides)
        self._values = check_values(values)
        steps = whole("warmup_steps", warmup_steps)
        start = number("warmup_density", warmup_density)
        if not 0 < start <= 1:
            raise ValueError(f"warmup_density is the fraction kept at the first step and must be in (0, 1], got {warmup_density!r}")
        self._on_nonfinite = _one_of("on_nonfinite", on_nonfinite, "propagate", "raise")
        self._reports = self._on_nonfinite == "raise"
        self._fallback = _one_of("fallback", fallback, "dense", "never")
        self._group = group if group is not None else getattr(module, "process_group", None)
        self._network = Network(module)
        self._shapes = self._network.shapes
        policy.warn_unmatched(self._shapes)
        rules = {name: policy.rule_for(name, like.shape) for name, like in self._shapes.items()}
        self._rules = {name: warmed_up(rule, start, steps) for name, rule in rules.items()}
        if steps and self._rules == rules:
            text = f"warmup_steps={warmup_steps} has nothing to warm up: no TopK rule of a density below {warmup_density}"
            warnings.warn(f"gradcomp: {text}", UserWarning, stacklevel=3)
        self._feedback = Feedback()
        self._agenda = Agenda()
        self._counters = Counters()
        self._densities = {}
        self._connected: tuple[Exchange, Routing] | None = None
        self._layouts: dict[tuple[object, ...], tuple[Piece, ...]] = {}
        self._plans: dict[tuple[str, ...], tuple[object, object, Plan]] = {}
        self._step: Step | None = None

    def __repr__(self) -> str:
        return f"<gradcomp.SparseState of {len(self._rules)} parameters, values={self._values!r}, {self._agenda.number} steps>"

    # Agreement

    def connect(self) -> tuple[Exchange, Routing]:
        """Resolve the process group, once, and with it what the world size decides."""
        if self._connected is None:
            group = self._group if self._group is not None else dist.group.WORLD
            if group is None:
                raise ValueError("group is None and there is no default process group: call init_process_group first")
            exchange = Exchange(group, self._counters)
            self._network.look_again()
            parameters = [(name, self._rules[name], like.numel(), like.dtype) for name, like in self._shapes.items()]
            routing = Routing(parameters, values=self._values, fallback=self._fallback, world_size=exchange.world_size)
            self._connected = exchange, routing
            self._warn_inactive(routing, exchange.world_size)
        return self._connected

    @property
    def exchange(self) -> Exchange:
        """The collectives of the group, counted."""
        return self.connect()[0]

    def _warn_inactive(self, routing: Routing, world_size: int) -> None:
        asked = {name: rule for name, rule in self._rules.items() if not is_dense(rule) and name in self._network.trained}
        if not asked or not all(type(rule) is TopK and not is_scheduled(rule) for rule in asked.values()):
            return  # nothing was asked for, or how much is not known yet
        likes = self._shapes
        if all(routing.route(n, rule, likes[n].numel(), likes[n].dtype, None)[0] != "sparse" for n, rule in asked.items()):
            warnings.warn(
                f"gradcomp: compression is configured but inactive: at world size {world_size} every parameter costs fewer bytes "
                "dense; lower the density, or pass fallback='never' to insist",
                UserWarning,
                stacklevel=4,
            )

    def _resolve(self) -> Exchange | None:
        return self.exchange if self._connected is not None or dist.is_initialized() else None

    def _has_run(self) -> bool:
        return bool(self._layouts)

    def _description(self) -> dict[str, str]:
        """Everything that must be equal on all ranks, of the whole model: how one parameter travels can depend on the others."""
        settings = {"values": self._values, "on_nonfinite": self._on_nonfinite, "fallback": self._fallback}
        progress = {key: repr(value) for key, value in self._agenda.state_dict().items() if key != "announce"}
        held = {"parameters with a residual": repr(sorted(name for name in self._shapes if name in self._feedback))}
        rules = {f"parameter {n}": f"{tuple(s.shape)}, {s.dtype}, {describe(self._rules[n])}" for n, s in self._shapes.items()}
        return settings | progress | held | rules

    # One step

    def step_of(self, bucket: GradBucket) -> Step:
        """The step that ``bucket`` belongs to; bucket 0 begins a new one."""
        if bucket.index() == 0:
            agenda = self._agenda
            self._step = Step(agenda.number, flags=agenda.announce, flush=agenda.flushing, complete=self._complete, failed=self._remember)
        if self._step is None:
            raise GradcompError(f"bucket {bucket.index()} came before bucket 0 of its backward pass")
        return self._step

    def layout_of(self, bucket: GradBucket) -> tuple[Piece, ...]:
        """The bucket's parameters and their places, agreed with all ranks the first time they are seen so."""
        exchange = self.exchange
        parameters = bucket.parameters()
        names = tuple(self._network.name_of(parameter) for parameter in parameters)
        key = (bucket.index(), names, tuple(parameter.stride() for parameter in parameters), self._agenda.removed)
        if key not in self._layouts:
            buffer, start, pieces = bucket.buffer(), 0, []
            for name, parameter in zip(names, parameters):
                like = self._place(name, parameter, buffer.dtype)
                rule = Dense() if self._agenda.removed else self._rules[name]
                shape, numel = tuple(like.shape), like.numel()
                pieces.append(Piece(name=name, rule=rule, start=start, numel=numel, dtype=buffer.dtype, shape=shape, stride=like.stride()))
                start += numel
            if start != buffer.numel():
                raise GradcompError(f"bucket {bucket.index()} has {buffer.numel()} elements, its parameters {start}")
            agree(exchange, self._description() | {f"parameters of bucket {bucket.index()}": repr(names)})
            self._layouts[key] = tuple(pieces)
        layout = self._layouts[key]
        if not any(is_scheduled(piece.rule) for piece in layout):
            return layout
        return tuple(replace(piece, rule=at_step(piece.rule, self._agenda.number)) for piece in layout)

    def _place(self, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A parameter's shape and strides, which are those of its gradient in the bucket, whatever ``bucket.gradients()`` says."""
        if parameter.is_complex():
            raise GradcompError(f"parameter {name} must be real, complex ones are not supported so far, got {parameter.dtype}")
        seen, now = self._shapes[name], torch.empty_like(parameter, device="meta")
        if (dtype, now.stride()) != (seen.dtype, seen.stride()):
            raise GradcompError(
                f"parameter {name} was {seen.dtype} with strides {seen.stride()} and has a {dtype} gradient and strides {now.stride()}: "
                "change dtype and memory format before the model is wrapped in DDP, which keeps its buckets as they were"
            )
        return now

    def size(self, layout: tuple[Piece, ...], wanted: Mapping[str, int]) -> None:
        """Give parameters that are sized by history and have none their first capacities: collective where there are any."""
        fresh = [piece for piece in layout if piece.sized_by_history and self._agenda.capacity(piece.name) is None]
        if fresh:
            for piece, most in zip(fresh, largest(self.exchange, [wanted[piece.name] for piece in fresh])):
                self._agenda.start(piece.name, piece.numel, most)

    def plan_of(self, layout: tuple[Piece, ...], *, flush: bool) -> Plan:
        """How the bucket's parameters travel in this step: the same on all ranks."""
        capacities = tuple(self._agenda.capacity(piece.name) if piece.sized_by_history else None for piece in layout)
        names = tuple(piece.name for piece in layout)
        cached = self._plans.get(names)
        if cached is None or cached[0] is not layout or cached[1] != (capacities, flush, self._held(names)):
            routed = [self._routed(piece, history, flush) for piece, history in zip(layout, capacities)]
            plan = Plan(
                without_needless_gather(routed, self._values),
                self._values,
                flush=flush,
                report=self._reports and not self._agenda.removed,
            )
            # Routing makes parameters hold residuals: what holds is noted afterwards.
            cached = self._plans[names] = layout, (capacities, flush, self._held(names)), plan
        return cached[2]

    def _held(self, names: Iterable[str]) -> tuple[bool, ...]:
        return tuple(name in self._feedback for name in names)

    def _routed(self, piece: Piece, history: int | None, flush: bool) -> Piece:
        routing = self.connect()[1]
        if self._agenda.removed:
            return replace(piece, travel="ring", capacity=0, tracked=False)
        travel, capacity = routing.route(piece.name, piece.rule, piece.numel, piece.dtype, history)
        if routing.keeps_rest(travel, piece.dtype):
            self._feedback.ensure(piece.name, piece.numel)
        if flush:
            travel, capacity = "ring", 0
        return replace(piece, travel=travel, capacity=capacity, tracked=piece.name in self._feedback)

    def accumulate(self, piece: Piece, grad: torch.Tensor) -> Accumulation:
        """Residual + gradient of a piece, formed when it is read."""
        acc = self._feedback.accumulate(piece.name, grad)
        if self._analysis is not None:
            self._analysis.add(piece.name, Magnitudes.of(acc))
        return acc

    def watch_gradients(self) -> None:
        """To be called before every forward pass of a model with ``gradient_as_bucket_view``: see :meth:`in_place`."""
        self._network.remember_gradients()

    def in_place(self, bucket: GradBucket) -> frozenset[str]:
        """Parameters whose gradients accumulated in their bucket's own buffer, which plain DDP treats differently."""
        self._network.remember_bucket(bucket.buffer(), is_first=bucket.index() == 0)
        return self._network.in_place

    def timed(self, name: str) -> "_GeneratorContextManager[None]":
        """Count the seconds of a block, or of every call of a function that this decorates, under ``name``."""
        return self._counters.timed(name)

    def _complete(self, step: Step) -> None:
        """All or nothing: every bucket settles its residuals and is filled, or every bucket is spoiled and no residual is touched."""
        exchange = self.exchange
        with self.timed("decode_s"):
            fault = next((fault for flight in step.flights if (fault := flight.fault())), None)
            for flight in step.flights:
                if fault is None:
                    flight.settle(self._feedback)
                    flight.fill()
                else:
                    flight.spoil()
        if self._analysis is not None:
            self._analysis.ready, self._analysis = True, None
        self._agenda.advance(step.flights, announced=step.flags, bad=fault is not None)
        for flight in step.flights:
            size, sent = flight.result.numel(), flight.sent
            self._counters.add(
                dense_bytes=ring_bytes(exchange.world_size, size * flight.result.element_size()),
                payload_bytes=flight.plan.payload_bytes,
                elements=size,
                sent_elements=sum(sent.values()),
            )
            self._densities |= {piece.name: sent[piece.name] / max(1, piece.numel) for piece in flight.plan.pieces}
        plans = [flight.plan for flight in step.flights]
        sparse, parameters = sum(len(plan.sparse) for plan in plans), sum(len(plan.pieces) for plan in plans)
        self._counters.finish_step(bad=fault is not None, sparse_parameters=sparse, parameters=parameters)
        self._step = None
        if fault is not None and self._reports:
            raise NonFiniteError(f"step {step.number}: {fault}")

    def give_up(self, error: Exception) -> None:
        """An error in the hook itself: leave no future of the step open."""
        if self._step is None:
            self._remember(error)
        else:
            self._step.fail(error)

    def _remember(self, error: Exception) -> None:
        self.last_error = error
