"""What one step's gradients look like, so that a rule, a density or a threshold can be chosen."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from gradcomp.core.magnitude import Magnitudes
from gradcomp.core.rules import TopK
from gradcomp.core.values import FORMATS, check_values
from gradcomp.ddp.plan import payload_share

DENSITIES = (0.1, 0.01, 0.001)
QUANTILES = (0.5, 0.9, 0.99, 0.999)


class Analysis(Mapping[str, Magnitudes]):
    """Magnitudes of residual + gradient of every parameter, on this rank, in the step after ``handle.analyze()``.

    A mapping from parameter name to :class:`~gradcomp.core.magnitude.Magnitudes`, empty until that step has completed; printing it
    gives a table. It describes one step: under a threshold what is not sent adds up and passes it later, so that over many steps
    more is sent than :meth:`density` says of the first; analyse again after some training.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._order = list(names)
        self._parameters: dict[str, Magnitudes] = {}
        self.ready = False
        """Whether the step has completed."""

    def add(self, name: str, magnitudes: Magnitudes) -> None:
        """For the hook: what it saw of one parameter."""
        self._parameters[name] = magnitudes

    def __getitem__(self, name: str) -> Magnitudes:
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._order if name in self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def density(self, threshold: float) -> float:
        """The fraction of all elements that ``Threshold(threshold)`` on every parameter would have sent."""
        self._check_ready()
        return sum(part.density(threshold) * part.numel for part in self.values()) / max(1, sum(part.numel for part in self.values()))

    def threshold(self, density: float) -> float:
        """The threshold that would have sent about ``density`` of all elements, of dense parameters too, on this rank.

        Ranks see different data and get slightly different values, and a rule must be the same on all of them: take rank 0's, by
        a broadcast or by hand.

        Args:
            density: fraction to send, in (0, 1].
        """
        self._check_ready()
        if not 0 < density <= 1:
            raise ValueError(f"density must be in (0, 1], got {density!r}")
        magnitudes = np.concatenate([np.empty(0), *(part.sample for part in self.values())])
        if not magnitudes.size:
            return 0.0
        weights = np.concatenate([np.full(part.sample.size, part.numel / max(1, part.sample.size)) for part in self.values()])
        order = np.argsort(-magnitudes, kind="stable")
        kept = np.cumsum(weights[order])
        return float(magnitudes[order[min(int(np.searchsorted(kept, density * kept[-1], side="right")), kept.size - 1)]])

    def payload_bytes(self, name: str, density: float, values: str = "bf16") -> int:
        """Bytes that the codec takes for ``density`` of a parameter's elements."""
        self._check_ready()
        if name not in self._parameters:
            raise ValueError(f"name must be a parameter's, one of {sorted(self._parameters)}, got {name!r}")
        numel = self._parameters[name].numel
        return payload_share(numel, TopK(density).count(numel), FORMATS[check_values(values)])

    def _check_ready(self) -> None:
        if not self.ready:
            raise ValueError("the analysis is not ready: it is filled by the next synchronised backward pass")

    def __str__(self) -> str:
        if not self.ready:
            return "gradcomp: the analysis is not ready: it is filled by the next synchronised backward pass"
        width = max([9, *(len(name) for name in self)])
        head = [f"{'parameter':<{width}} {'elements':>10}", *(f"{f'|x| {100 * q:g}%':>10}" for q in QUANTILES)]
        lines = ["gradcomp analysis: residual + gradient of one step on this rank", "  ".join([*head, f"{'bytes at 1%, bf16':>18}"])]
        for name, part in self.items():
            cells = [f"{name:<{width}} {part.numel:>10,}", *(f"{part.quantile(q):>10.3g}" for q in QUANTILES)]
            lines.append("  ".join([*cells, f"{self.payload_bytes(name, 0.01):>18,}"]) + ("" if part.finite else "  not finite"))
        for density in DENSITIES:
            lines.append(f"Threshold({self.threshold(density):.3g}) would have sent {100 * density:g}% of all elements")
        lines.append("Plain Adam moves rarely sent coordinates less far than dense gradients would: use gradcomp.optim.DelayAwareAdamW.")
        return "\n".join(lines)
