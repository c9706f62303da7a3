"""The hook's state: settings, residuals, the layouts that the ranks have agreed on, and the step under way."""

import weakref
from collections.abc import Mapping
from contextlib import _GeneratorContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it without saying so

from gradcomp.core.feedback import Feedback
from gradcomp.core.magnitude import Magnitudes
from gradcomp.core.policy import Policy
from gradcomp.core.rules import AnyRule, TopK
from gradcomp.core.scan import Accumulation
from gradcomp.ddp.agenda import Agenda
from gradcomp.ddp.connection import Connection, connect
from gradcomp.ddp.device.backlog import Backlog
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.handle import Handle
from gradcomp.ddp.layouts import Layouts
from gradcomp.ddp.network import Network
from gradcomp.ddp.settings import Settings
from gradcomp.ddp.step import Step
from gradcomp.ddp.traffic import Counters
from gradcomp.errors import GradcompError, warn


class SparseState(Handle):
    """The state of :func:`gradcomp.sparse_hook`, for ``model.register_comm_hook(state, gradcomp.sparse_hook)``.

    May be built before ``init_process_group``; the group is resolved at the first bucket. The module is held weakly.

    Args:
        module: the network, wrapped in DDP or not; its parameters on the CPU or on one CUDA device, whole on every rank. Complex
            parameters are treated as pairs of real numbers, one dimension more, of two; gradients that are sparse tensors go as in plain
            DDP, on the CPU.
        rule: the rule of parameters with two dimensions and at least 1,024 elements; ``TopK(0.01)`` if None.
        overrides: glob over parameter names -> rule; the first match wins. Other parameters are ``Dense``.
        values: format of sparse values in payloads: ``fp32``, ``bf16``, ``fp16``, ``int8`` or ``sign``; small dense parameters
            are sent as bf16 beside the last two.
        warmup_steps: steps over which the density of every ``TopK`` rule falls exponentially to its own; other rules have no
            density to warm up.
        warmup_density: the fraction kept at step 0 of a warm-up.
        momentum: of stochastic gradient descent, corrected for what is late: it is taken here, before the selection, on every
            parameter, and stops where a selection was sent (momentum factor masking). The optimizer then has momentum 0. For
            fp32 gradients, and one synchronised backward pass a step. Takes one more fp32 tensor a parameter.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the losses. Rules and residuals are then in unscaled units, so that what
            is pending keeps its worth when the scale changes; gradients and payloads stay in scaled ones.
        on_nonfinite: ``propagate`` fills every gradient of a bad step with NaN on all ranks (a GradScaler skips it); ``raise``
            raises from ``backward()`` on all ranks: a RuntimeError, as torch makes of any error in a future, that names rank and
            parameter; the :class:`gradcomp.NonFiniteError` itself is ``last_error``. Residuals stay as they were either way. Training
            can go on after a raise, but with ``find_unused_parameters=True`` torch's own bookkeeping is broken off by it. On CUDA the host
            learns of it two steps later, raises from the hook, and training cannot go on.
        fallback: ``dense`` lets a parameter travel dense where that costs fewer bytes; ``never`` keeps it sparse.
        check: verify every step: that nothing of residual + gradient was lost, that the mean is the mean of what was sent (else an
            :class:`gradcomp.AccountingError`), and that gradients, parameters and loss scale are equal on all ranks (else a
            :class:`gradcomp.DesyncError`). Slow. Not for ``Join``, under which parameters do differ for a while.
        group: the process group of the DDP model; if None that of ``module`` where it is wrapped, else the default group.

    Raises:
        ValueError: a setting out of its range, named with its value.

    Communication:
        A bucket: one all-gather of its payload, ``(W-1) * payload`` bytes a rank, and where some of its parameters travel dense
        one ring all-reduce of those, ``2(W-1)/W`` of their bytes. A new bucket layout: one blocking all-gather of 16 bytes, and 8
        for each parameter whose capacity has no history. ``check``: two blocking all-gathers a step, of 16 bytes, and of 16 for each
        parameter that travels by an all-reduce.
    """

    _waiting: Mapping[str, Mapping[str, torch.Tensor]] = {"residual": {}, "velocity": {}}
    """What a copy holds by parameter until it is attached."""
    _scaled = False
    """Whether those are in unscaled units of scaled losses."""

    def __init__(
        self,
        module: torch.nn.Module,
        rule: AnyRule | None = None,
        *,
        overrides: Mapping[str, AnyRule] | None = None,
        values: str = "bf16",
        warmup_steps: int = 0,
        warmup_density: float = 0.25,
        momentum: float = 0.0,
        grad_scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: str = "propagate",
        fallback: str = "dense",
        check: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        policy = Policy(TopK(0.01) if rule is None else rule, overrides)
        self._settings = Settings(
            values=values,
            warmup_steps=warmup_steps,
            warmup_density=warmup_density,
            momentum=momentum,
            grad_scaler=grad_scaler,
            on_nonfinite=on_nonfinite,
            fallback=fallback,
            check=check,
        )
        self._group = group if group is not None else getattr(module, "process_group", None)
        self._network = Network(module)
        self._shapes = self._network.shapes
        policy.warn_unmatched(self._shapes)
        self._rules = self._settings.warm_up({name: policy.rule_for(name, self._network.shape_of(name)) for name in self._shapes})
        self._feedback = Feedback(float(momentum))
        self._agenda = Agenda()
        self._begin()

    def _begin(self) -> None:
        """Everything that belongs to one process group and is not saved."""
        self._counters = Counters()
        self._densities = {}
        self._connected: Connection | None = None
        self._step: Step[Any] | None = None

    def __repr__(self) -> str:
        return f"<gradcomp.SparseState of {len(self._rules)} parameters, values={self._settings.values!r}, {self._agenda.number} steps>"

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        kept = {key: getattr(self, key) for key in ("_rules", "_agenda")}
        held = self._held() if self._shapes else self._waiting
        scaled = self._scaled or self._settings.scales_losses
        return kept | {"settings": {**vars(self._settings), "grad_scaler": None}, "_waiting": held, "_scaled": scaled}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self._settings = Settings(**kept.pop("settings"))
        self.__dict__ |= kept
        self._group, self._shapes, self._feedback = None, {}, Feedback(float(self._settings.momentum))
        self._begin()
        warn(
            "the copy of a DDP model has no hook: register again, and give the new handle the old one's state_dict(). The copy "
            "of a SparseState holds rules, settings, residuals and progress, but no process group, GradScaler or network: attach(model)."
        )

    def attach(
        self, module: torch.nn.Module, *, grad_scaler: torch.amp.GradScaler | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Give a copied or unpickled state what copies do not hold; then register it: ``model.register_comm_hook(state, sparse_hook)``.

        Args:
            module, grad_scaler, group: as for the constructor.

        Raises:
            ValueError: the module's parameters are not those of the state, or its residuals are in the units of a scaler and none is given.
            GradcompError: the state has a network already.
        """
        if self._shapes:
            raise GradcompError("the state has its network already; attach is for copies and for states that were unpickled")
        network = Network(module)
        if set(network.shapes) != set(self._rules):
            different = sorted(set(network.shapes) ^ set(self._rules))
            raise ValueError(f"module must have the parameters that the state was made for; only one of the two has {different}")
        for name, held in (pair for kind in self._waiting.values() for pair in kind.items()):
            own = network.shapes[name].shape
            if held.shape != own:
                raise ValueError(f"parameter {name} of module must have its residual's shape {tuple(held.shape)}, got {tuple(own)}")
        if self._scaled and grad_scaler is None:
            raise ValueError("grad_scaler must be given: the state's residuals are in unscaled units")
        settings = {**vars(self._settings), "grad_scaler": grad_scaler}
        self._settings, self._network, self._shapes = Settings(**settings), network, network.shapes
        self._hold(self._waiting)
        del self._waiting
        self._group = group if group is not None else getattr(module, "process_group", None)

    # The process group

    def connect(self) -> Connection:
        """Resolve the process group, once, and with it what the world size decides."""
        if self._connected is None:
            if not self._shapes:
                self._refuse_bare_copy()
            group = self._group if self._group is not None else dist.group.WORLD
            if group is None:
                raise ValueError("group is None and there is no default process group: call init_process_group first")
            self._network.look_again()
            self._connected = self._connect(Exchange(group, self._counters, self._network.device))
        return self._connected

    def _connect(self, exchange: Exchange) -> Connection:
        books = self._feedback, self._agenda, self._counters
        return connect(exchange, self._network, self._rules, self._settings, *books, weakref.WeakMethod(self._remember))

    def _refuse_bare_copy(self) -> None:
        raise GradcompError("this state is a copy and has no network: call state.attach(module) first")

    @property
    def exchange(self) -> Exchange:
        """The collectives of the group, counted."""
        return self.connect().exchange

    @property
    def layouts(self) -> Layouts:
        """Where parameters lie in buckets and how they travel."""
        return self.connect().layouts

    def _resolve(self) -> Exchange | None:
        if not self._shapes:
            self._refuse_bare_copy()
        return self.exchange if self._connected is not None or dist.is_initialized() else None

    def _has_run(self) -> bool:
        return self._connected is not None and len(self.layouts) > 0

    # One step

    def step_of(self, bucket: GradBucket) -> Step[Any]:
        """The step that ``bucket`` belongs to; bucket 0 begins a new one.

        In the first step of a static graph torch calls every bucket number 0, and none the last: a bucket of parameters that the step has
        not seen goes on with it, and the one that completes them is the last.
        """
        names = {self._network.name_of(parameter) for parameter in bucket.parameters()}
        under_way = self._step if self._step is not None and self._step.error is None else None
        delayed = under_way is not None and bucket.index() == 0 and not names & under_way.seen
        if bucket.index() == 0 and not delayed:
            agenda = self._agenda
            scale = 1.0 if self.on_device else self._settings.loss_scale  # a device is asked for it without waiting
            self.connect().completion.begin(self._network.parameters(), scale)
            self._step = Step(
                agenda.number,
                flags=agenda.announce,
                flush=agenda.flushing,
                removing=agenda.removing,
                loss_scale=scale,
                complete=self._complete,
                failed=self._remember,
                device=self._network.device if self.on_device else None,
            )
        if self._step is None:
            raise GradcompError(f"bucket {bucket.index()} came before bucket 0 of its backward pass")
        self._step.seen |= names
        self._step.at_last = bucket.is_last() or (delayed and self._step.seen >= self._network.trained)
        return self._step

    @property
    def settings(self) -> Settings:
        """What was asked for beside the rules."""
        return self._settings

    @property
    def on_device(self) -> bool:
        """Whether gradients are where the host must not wait for them."""
        return isinstance(self.connect().completion, Backlog)

    @property
    def feedback(self) -> Feedback:
        """Residuals and velocities."""
        return self._feedback

    def look(self, sums: Mapping[str, Accumulation | torch.Tensor]) -> None:
        """Have residual + gradient of some parameters analysed, if that was asked for."""
        if self._analysis is not None:
            for name, acc in sums.items():
                self._analysis.add(name, Magnitudes.of(Accumulation(acc.cpu()) if isinstance(acc, torch.Tensor) else acc))

    def _settle(self, *, forget: bool = False) -> None:
        if self._connected is not None:
            self._connected.completion.settle(forget=forget)
            self._densities = self._connected.completion.densities

    def watch_gradients(self, *_: object) -> None:
        """To be called before every forward pass of a model with ``gradient_as_bucket_view``: see :meth:`in_place`."""
        if self._shapes:  # a copied model calls its copied state, which has no network
            self._network.remember_gradients()

    def in_place(self, bucket: GradBucket) -> frozenset[str]:
        """Parameters whose gradients accumulated in their bucket's own buffer, which plain DDP treats differently."""
        self._network.remember_bucket(bucket.buffer(), is_first=bucket.index() == 0)
        return self._network.in_place

    def timed(self, name: str) -> "_GeneratorContextManager[None]":
        """Count the seconds of a block, or of every call of a function that this decorates, under ``name``."""
        return self._counters.timed(name)

    def _complete(self, step: Step[Any]) -> None:
        if self._analysis is not None:
            self._analysis.ready, self._analysis = True, None
        self._step = None
        self.connect().completion.complete(step)

    def give_up(self, error: Exception) -> None:
        """An error in the hook itself: leave no future of the step open."""
        if self._step is None:
            self._remember(error)
        else:
            self._step.fail(error)

    def _remember(self, error: Exception) -> None:
        self.last_error = error
