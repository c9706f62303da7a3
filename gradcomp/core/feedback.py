"""What was not sent: one fp32 residual per named tensor.

Reference:
    Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech DNNs",
    Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
"""

from collections.abc import Iterator

import numpy as np
import torch

from gradcomp.core.scan import Accumulation, Floats, Indices


class Feedback:
    """Residuals by name. A residual belongs to its tensor, never to a bucket or a position."""

    def __init__(self) -> None:
        self._residuals: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._residuals

    def ensure(self, name: str, numel: int) -> None:
        """Hold a residual of ``numel`` zeros for ``name``, unless one is held already."""
        if name not in self._residuals:
            self._residuals[name] = torch.zeros(numel, dtype=torch.float32, device="cpu")

    def get(self, name: str) -> torch.Tensor | None:
        """The residual itself (fp32 [N], memory order), or None where none is held."""
        return self._residuals.get(name)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and residuals, as :meth:`get` gives them."""
        return iter(self._residuals.items())

    def replace(self, residuals: dict[str, torch.Tensor]) -> None:
        """Hold these residuals (fp32 [N], memory order) and no others. Keeps the tensors given."""
        self._residuals = dict(residuals)

    def accumulate(self, name: str, grad: torch.Tensor, unscale: float = 1.0) -> Accumulation:
        """``fp32(residual + unscale * grad)`` of a flat gradient [N], not stored."""
        return Accumulation(grad, self._residuals.get(name), fp32=True, unscale=unscale)

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

    def clear(self, name: str) -> None:
        """Set the residual to zero: all of it was released."""
        self._residuals[name].zero_()
