"""What a user holds of a registered hook: its traffic, its residuals, its switches and its state."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradcomp.core.feedback import Feedback
from gradcomp.ddp import checkpoint
from gradcomp.ddp.agenda import Agenda
from gradcomp.ddp.agreement import agree
from gradcomp.ddp.analysis import Analysis
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.payload import FLUSH, REMOVE
from gradcomp.ddp.traffic import Counters, Traffic
from gradcomp.errors import DesyncError


class Handle:
    """The public face of a hook's state; :func:`gradcomp.register` returns one."""

    _shapes: dict[str, torch.Tensor]
    _feedback: Feedback
    _agenda: Agenda
    _counters: Counters
    _densities: dict[str, float]
    _analysis: Analysis | None = None

    last_error: Exception | None = None
    """The typed error behind the RuntimeError that a backward pass raised, if one did."""

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent since registration; ``print`` it for a table. Waits for a GPU, as all that is read here does."""
        self._settle()
        return self._counters.snapshot()

    @property
    def densities(self) -> dict[str, float]:
        """By parameter, the fraction of its elements that this rank sent in the last completed step; empty before the first."""
        self._settle()
        return dict(self._densities)

    def analyze(self) -> Analysis:
        """Look at the next step's residual + gradient: magnitudes by parameter, what a threshold would keep, bytes by the codec.

        Returns:
            An :class:`gradcomp.Analysis` that the next step fills; print it then. Nothing is sent for it.
        """
        self._analysis = Analysis(self._shapes)
        return self._analysis

    def residual(self, name: str) -> torch.Tensor:
        """What has not been sent of a parameter's gradients: a new fp32 CPU tensor in the parameter's shape.

        Raises:
            ValueError: no parameter of that name.
        """
        return self._in_shape(name, self._feedback.get)

    def velocity(self, name: str) -> torch.Tensor:
        """What is left of a parameter's past gradients, where there is momentum: a new fp32 CPU tensor in the parameter's shape.

        Raises:
            ValueError: no parameter of that name.
        """
        return self._in_shape(name, self._feedback.velocity)

    def _in_shape(self, name: str, find: Callable[[str], torch.Tensor | None]) -> torch.Tensor:
        if name not in self._shapes:
            raise ValueError(f"name must be a parameter's, one of {sorted(self._shapes)}, got {name!r}")
        like, held = self._shapes[name], find(name)
        if held is None:
            return torch.zeros(like.shape, device="cpu")
        return held.as_strided(like.shape, like.stride()).to("cpu", copy=True, memory_format=torch.contiguous_format)

    def flush(self) -> None:
        """Send every residual whole, once: announced in the next step's headers, done two steps later.

        One rank's call is enough. In that step every parameter that holds a residual travels by the ring all-reduce, residual
        included, and its residual becomes zero. Half-precision gradients go as fp32, so at twice plain DDP's bytes, and what is beyond
        their range stays. A parameter whose gradient is zero on all ranks keeps its residual, since DDP may throw its result away. A
        bad step is tried again.
        """
        self._agenda.announce |= FLUSH

    def remove(self) -> None:
        """Turn the hook dense: announced in the next step's headers; two steps later one flush, then plain DDP's all-reduce.

        ``momentum`` goes on in the hook, with a gather of headers beside the all-reduce of every bucket.

        One rank's call is enough. Flushing goes on until no rank has anything pending, for as long as a parameter with a residual has
        no gradient on any rank. A DDP model takes one hook in its life, so the hook stays registered.
        """
        self._agenda.announce |= REMOVE

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for an exact resume on the same rank. A copy; passes ``torch.load(weights_only=True)``.

        Keys: ``format``, ``rank`` and ``world_size`` (None outside a process group), ``parameters`` (name -> shape), ``step``,
        ``residual`` and ``velocity`` (name -> fp32 tensor in the parameter's shape), ``capacity``, and what is announced but not yet done.
        """
        exchange = self._resolve()
        self._settle()
        return {
            "format": checkpoint.FORMAT,
            "rank": exchange.rank if exchange else None,
            "world_size": exchange.world_size if exchange else None,
            "parameters": {name: list(like.shape) for name, like in self._shapes.items()},
            **self._held(),
            **self._agenda.state_dict(),
        }

    def _held(self) -> dict[str, dict[str, torch.Tensor]]:
        """Residuals and velocities in their parameters' shapes: copies."""
        found = {"residual": self._feedback.get, "velocity": self._feedback.velocity}
        names = self._shapes
        return {kind: {name: self._in_shape(name, find) for name in names if find(name) is not None} for kind, find in found.items()}

    def _hold(self, held: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take over copies of what :meth:`_held` returned."""
        self._feedback.replace(
            *({name: self._in_memory_order(name, tensor) for name, tensor in held[kind].items()} for kind in ("residual", "velocity"))
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. The state is copied; nothing is loaded if anything is wrong with it.

        After the first step this is collective: every rank calls it between the same two steps.

        Raises:
            ValueError: another format, rank or world size, a field of another type, or residuals that do not fit the model.
            DesyncError: after the first step, where another rank refuses its state or has one of another step.
        """
        self._load(lambda: state, together=self._has_run())

    def _load(self, read: Callable[[], Mapping[str, Any]], *, together: bool) -> None:
        """Take over the state that ``read`` returns; ``together``: on all ranks or on none."""
        exchange = self._resolve()
        state: Mapping[str, Any] = {}
        refusal = None
        try:
            state = read()
            checkpoint.check(state, self._shapes, exchange, momentum=self._feedback.momentum)
        except ValueError as error:
            refusal = error
        except Exception as error:
            refusal = ValueError(f"state cannot be read: {error!r}")
        if exchange is not None and together:
            # The ranks tell each other first: one that raised by itself would leave the others waiting.
            own = ("rank", "residual", "velocity", "announce")
            fits = {} if refusal else {key: repr(state[key]) for key in sorted(state) if key not in own}
            for kind in ("residual", "velocity") if refusal is None else ():
                fits[f"parameters with a {kind}"] = repr(sorted(state.get(kind, {})))
            try:
                agree(exchange, {"the state to load": f"refused, {refusal}" if refusal else "fits"} | fits)
            except DesyncError:
                if refusal is None:
                    raise
        if refusal is not None:
            raise refusal
        self._settle(forget=True)  # what the host has yet to learn is of steps that are not those before the loaded state
        self._hold({kind: state.get(kind, {}) for kind in ("residual", "velocity")})
        self._agenda.load_state_dict(state)

    def _in_memory_order(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        like = self._shapes[name]
        placed = torch.empty_strided(like.shape, like.stride(), dtype=torch.float32).copy_(tensor)
        return placed.as_strided((like.numel(),), (1,))

    def _settle(self, *, forget: bool = False) -> None:
        """Have the host learn all there is to learn of completed steps. ``forget``: errors of theirs that were still to be raised."""
        raise NotImplementedError

    def _resolve(self) -> Exchange | None:
        """The exchange, connected now if there is a process group to connect to."""
        raise NotImplementedError

    def _has_run(self) -> bool:
        raise NotImplementedError
