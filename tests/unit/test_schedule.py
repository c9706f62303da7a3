import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradcomp
from gradcomp.core import rules
from gradcomp.core.schedule import Cubic, Exponential, Linear

KINDS = [Linear, Exponential, Cubic]


@given(st.sampled_from(KINDS), st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 50))
def test_from_start_to_end_and_no_further(kind, start, end, steps):
    schedule = kind(start=start, end=end, steps=steps)
    values = [schedule.at(step) for step in range(steps + 3)]
    assert values[steps:] == [end] * 3
    if steps:
        assert values[0] == pytest.approx(start)
        assert schedule.at(-1) == values[0]
    for now, after in itertools.pairwise(values):
        assert (after - now) * (end - start) >= -1e-12
        assert min(start, end) - 1e-12 <= now <= max(start, end) + 1e-12


def test_the_shapes():
    assert [Linear(start=1, end=0, steps=4).at(step) for step in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    assert [Exponential(start=0.25, end=0.25 / 64, steps=3).at(step) for step in range(4)] == pytest.approx(
        [0.25, 0.0625, 0.015625, 0.00390625]
    )
    assert [Cubic(start=1, end=0, steps=4).at(step) for step in range(5)] == pytest.approx([1, 0.421875, 0.125, 0.015625, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "value"), [("start", float("nan")), ("end", "x"), ("start", True), ("steps", -1), ("steps", 1.5), ("steps", True)]
)
def test_bad_fields_are_named(kind, field, value):
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.{field}"):
        kind(**{"start": 1.0, "end": 0.5, "steps": 3, field: value})


def test_an_exponential_never_reaches_zero():
    with pytest.raises(ValueError, match=r"Exponential\.end must be above 0"):
        Exponential(start=1.0, end=0.0, steps=3)


def test_a_scheduled_rule():
    rule = gradcomp.TopK(Linear(start=1.0, end=0.5, steps=2))
    assert [rule.at(step) for step in (0, 1, 2, 9)] == [gradcomp.TopK(1.0), gradcomp.TopK(0.75), gradcomp.TopK(0.5), gradcomp.TopK(0.5)]
    assert not rules.is_dense(rule)
    with pytest.raises(ValueError, match=r"rule\.at\(step\)"):
        rule.count(10)
    with pytest.raises(ValueError, match=r"rule\.at\(step\)"):
        gradcomp.compress(torch.ones(3), rule)
    for start, end in ((0.5, 2.0), (0.5, 0.0), (1.5, 0.5)):
        with pytest.raises(ValueError, match=r"TopK\.density"):
            gradcomp.TopK(Linear(start=start, end=end, steps=2))
    assert rules.at_step(gradcomp.Dense(), 3) == gradcomp.Dense()


class Mine:
    def at(self, step):
        return 0.5


def test_descriptions_of_schedules_hold_no_addresses():
    assert rules.describe(gradcomp.TopK(Mine())) == "TopK(density=test_schedule.Mine)"
    assert rules.describe(gradcomp.TopK(Linear(start=1, end=0.5, steps=2))) == "TopK(density=Linear(start=1.0, end=0.5, steps=2.0))"


def test_warming_up():
    warm = rules.warmed_up(gradcomp.TopK(0.01), 0.25, 4)
    assert [warm.at(step).density for step in (0, 2, 4, 5)] == pytest.approx([0.25, 0.05, 0.01, 0.01])
    for rule in (gradcomp.TopK(0.3), gradcomp.Threshold(1.0), gradcomp.Dense()):
        assert rules.warmed_up(rule, 0.25, 4) is rule
