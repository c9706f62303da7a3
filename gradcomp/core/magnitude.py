"""How large a tensor's elements are: quantiles, what a threshold keeps, and which threshold keeps so much."""

from dataclasses import dataclass

import numpy as np

from gradcomp.core.scan import CHUNK, Accumulation, Floats


@dataclass(frozen=True, slots=True, eq=False)
class Magnitudes:
    """The magnitudes of one tensor.

    Attributes:
        numel: N.
        sample: magnitudes in ascending order: all of them up to 131,072 elements, beyond that evenly spaced ones.
        finite: whether all that were sampled are finite; those that are not are left out.
    """

    numel: int
    sample: Floats
    finite: bool

    @classmethod
    def of(cls, acc: Accumulation) -> "Magnitudes":
        """Of a tensor, or of residual + gradient."""
        stride = max(1, -(-len(acc) // CHUNK))
        magnitude = np.abs(acc.part(0, len(acc), stride | 1 if stride > 1 else 1))
        finite = np.isfinite(magnitude)
        return cls(len(acc), np.sort(magnitude[finite]), bool(finite.all()))

    def quantile(self, share: float) -> float:
        """The magnitude that ``share`` of the elements, in [0, 1], do not exceed; 0.0 for an empty tensor."""
        if not 0 <= share <= 1:
            raise ValueError(f"share must be in [0, 1], got {share!r}")
        if not self.sample.size:
            return 0.0
        return float(self.sample[max(0, int(np.ceil(share * self.sample.size)) - 1)])

    def density(self, threshold: float) -> float:
        """The fraction of elements strictly above ``threshold``."""
        if not self.sample.size:
            return 0.0
        above = self.sample.size - int(np.searchsorted(self.sample, np.float32(threshold), side="right"))
        return above / self.sample.size
