import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcomp.core.magnitude import Magnitudes
from gradcomp.core.scan import CHUNK, Accumulation


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50), st.floats(0, 1), st.floats(0, 10, width=32))
def test_against_counting(values, share, threshold):
    part = Magnitudes.of(Accumulation(torch.tensor(values, dtype=torch.float32)))
    assert part.numel == len(values)
    assert part.finite
    assert part.density(threshold) == sum(abs(x) > threshold for x in values) / max(1, len(values))
    below = sum(abs(x) <= part.quantile(share) for x in values)
    assert below >= share * len(values) - 1e-9


def test_large_tensors_are_sampled():
    data = torch.linspace(0, 1, 5 * CHUNK + 3)
    part = Magnitudes.of(Accumulation(data, torch.zeros_like(data)))
    assert part.sample.size <= CHUNK
    assert part.density(0.9) == pytest.approx(0.1, abs=1e-3)
    assert part.quantile(0.25) == pytest.approx(0.25, abs=1e-3)


def test_what_is_not_finite_is_left_out_and_said():
    part = Magnitudes.of(Accumulation(torch.tensor([1.0, float("nan"), float("inf"), -2.0])))
    assert part.sample.tolist() == [1, 2]
    assert not part.finite
    with pytest.raises(ValueError, match="share"):
        part.quantile(1.5)
    assert Magnitudes(0, np.empty(0, np.float32), True).quantile(0.5) == 0
