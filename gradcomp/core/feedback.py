"""What was not sent: one fp32 residual per named tensor, and where momentum is corrected one fp32 velocity beside it.

Reference:
    Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech DNNs",
    Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019; momentum
    correction and momentum factor masking: Lin et al., "Deep gradient compression", ICLR 2018.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from gradcomp.core.compiled import kernels
from gradcomp.core.scan import Accumulation, Floats, Indices


class Feedback:
    """Residuals by name, and velocities. They belong to their tensor, never to a bucket or a position.

    Args:
        momentum: in [0, 1); what is left of a velocity after a step. 0: there are no velocities.
    """

    def __init__(self, momentum: float = 0.0) -> None:
        self.momentum = momentum
        self._device = torch.device("cpu")
        self._residuals: dict[str, torch.Tensor] = {}
        self._velocities: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._residuals

    def ensure(self, name: str, numel: int) -> None:
        """Hold a residual of ``numel`` zeros for ``name``, unless one is held already."""
        if name not in self._residuals:
            # numpy asks for huge pages, torch does not
            on_cpu = self._device.type == "cpu"
            zeros = (
                torch.from_numpy(np.zeros(numel, np.float32)) if on_cpu else torch.zeros(numel, dtype=torch.float32, device=self._device)
            )
            self._residuals[name] = zeros

    def move(self, device: torch.device) -> None:
        """Hold everything on ``device``, from now on."""
        self._device = device
        self.replace(self._residuals, self._velocities)

    def get(self, name: str) -> torch.Tensor | None:
        """The residual itself (fp32 [N], memory order), or None where none is held."""
        return self._residuals.get(name)

    def velocity(self, name: str) -> torch.Tensor | None:
        """The velocity itself (fp32 [N], memory order), or None where none is held."""
        return self._velocities.get(name)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and residuals, as :meth:`get` gives them."""
        return iter(self._residuals.items())

    def velocities(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and velocities, as :meth:`velocity` gives them."""
        return iter(self._velocities.items())

    def replace(self, residuals: dict[str, torch.Tensor], velocities: dict[str, torch.Tensor] | None = None) -> None:
        """Hold these residuals and velocities (fp32 [N], memory order) and no others. Keeps the tensors given, if they are in place."""
        self._residuals = {name: tensor.to(self._device) for name, tensor in residuals.items()}
        self._velocities = {name: tensor.to(self._device) for name, tensor in (velocities or {}).items()}

    def accumulate(self, name: str, grad: torch.Tensor, unscale: float = 1.0, *, moving: bool = True) -> Accumulation:
        """``fp32(residual + unscale * grad)`` of a flat gradient [N], not stored.

        Momentum correction: ``momentum * velocity`` is added to the gradient first, which is mutated then; the velocity is not. Not where
        ``moving`` is False.
        """
        acc = Accumulation(grad, self._residuals.get(name), fp32=True, unscale=unscale)
        velocity = self._velocities.get(name) if moving else None
        if velocity is not None:
            acc.is_zero()  # as it was given
            grad.add_(velocity, alpha=self.momentum / unscale)
        return acc

    def roll(self, name: str, grad: torch.Tensor, indices: Indices | None, unscale: float = 1.0) -> None:
        """Complete a step: the velocity is now what :meth:`accumulate` has made of the gradient. Nothing without momentum.

        Args:
            name: a tensor.
            grad: its flat gradient [N].
            indices: where this rank released a selection: momentum factor masking stops the velocity there. None: nowhere.
            unscale: what brings the gradient to the residual's units.

        Mutates: the velocity.
        """
        if not self.momentum:
            return
        if name not in self._velocities:
            self._velocities[name] = torch.empty(grad.numel(), dtype=torch.float32)
        velocity = torch.mul(grad, unscale, out=self._velocities[name])
        if indices is not None:
            velocity.numpy()[indices] = 0.0

    def keep(self, name: str, grad: torch.Tensor, indices: Indices | None, released: Floats | None, unscale: float = 1.0) -> None:
        """Complete a step: ``residual = acc - released`` at ``indices`` (None: everywhere), ``acc`` elsewhere.

        Args:
            name: a tensor whose residual is held.
            grad: the same flat gradient that was accumulated.
            indices: unique flat indices [K], or None for all N.
            released: fp32 [K], what the receivers decode, in the gradient's units; None when nothing was released.
            unscale: what brings the gradient to the residual's units.

        Mutates: the residual.
        """
        residual = self._residuals[name]
        Accumulation(grad, residual, unscale=unscale).store()
        if released is not None:
            released = released if unscale == 1.0 else released * np.float32(unscale)
            kept = residual.numpy()
            if indices is None:
                kept -= released
            else:
                kept[indices] -= released

    def complete(
        self, name: str, grad: torch.Tensor, parts: Sequence[tuple[Indices, Floats]], *, own: int, weight: float, unscale: float = 1.0
    ) -> None:
        """Complete a step for a tensor of which every rank released some elements: :meth:`keep`, and their mean instead of the gradient.

        Args:
            name: a tensor whose residual is held.
            grad: the flat local gradient that was accumulated, fp32.
            parts: of every rank, unique ascending flat indices and the values that were decoded of them, in the gradient's units.
            own: this rank.
            weight: what values are multiplied by before they are added, in rank order.
            unscale: what brings the gradient to the residual's units.

        Mutates: the residual and ``grad``.
        """
        fast = kernels()
        if fast is None:
            self.keep(name, grad, *parts[own], unscale)
            total = grad.zero_().numpy()
            for indices, values in parts:
                total[indices] += values * np.float32(weight)
            return
        edges = np.cumsum([0, *(indices.size for indices, _ in parts)])
        indices, values = (np.concatenate(column) for column in zip(*parts))
        fast.complete(self._residuals[name].numpy(), grad.numpy(), unscale, indices, values, edges, own, weight)

    def clear(self, name: str) -> None:
        """Set the residual to zero: all of it was released."""
        self._residuals[name].zero_()

    # The same on the device that holds the gradients, without waiting for it

    def total(self, name: str, grad: torch.Tensor, unscale: torch.Tensor | None = None) -> torch.Tensor:
        """``fp32(residual + unscale * grad)`` of a flat gradient [N]: a new tensor, or the gradient itself. ``unscale``: a scalar."""
        wide = grad if grad.dtype == torch.float64 else grad.float()
        scaled = wide if unscale is None else wide * unscale
        residual = self._residuals.get(name)
        return scaled.float() if residual is None else (residual + scaled).float()

    def push(self, name: str, grad: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Momentum correction as :meth:`accumulate` does it. ``scale``: what the gradient is multiplied by. Mutates the gradient."""
        velocity = self._velocities.get(name)
        if velocity is not None:
            grad.add_(velocity if scale is None else velocity * scale, alpha=self.momentum)

    def settle(
        self, name: str, grad: torch.Tensor, released: torch.Tensor | None, skip: torch.Tensor, unscale: torch.Tensor | None = None
    ) -> None:
        """Complete a step as :meth:`keep` does it, but for ``skip``.

        Args:
            name: a tensor whose residual is held.
            grad: the same flat gradient [N] that was accumulated.
            released: fp32 [N], what the receivers decode of this rank's payload, in the gradient's units, zeros where nothing; None: all.
            skip: bool scalar; whether everything stays as it is.
            unscale: what brings the gradient to the residual's units, a scalar.

        Mutates: the residual.
        """
        residual = self._residuals[name]
        if released is None:
            after = torch.zeros_like(residual)
        else:
            after = self.total(name, grad, unscale) - (released if unscale is None else released * unscale)
        torch.where(skip, residual, after, out=residual)

    def glide(
        self, name: str, grad: torch.Tensor, sent: torch.Tensor | None, skip: torch.Tensor, unscale: torch.Tensor | None = None
    ) -> None:
        """Complete a step as :meth:`roll` does it, but for ``skip``. ``sent``: bool [N], where this rank released a selection.

        Mutates: the velocity.
        """
        if not self.momentum:
            return
        if name not in self._velocities:
            self._velocities[name] = torch.zeros_like(grad, dtype=torch.float32)
        velocity = self._velocities[name]
        after = grad if unscale is None else grad * unscale
        torch.where(skip, velocity, after if sent is None else after.masked_fill(sent, 0.0), out=velocity)
