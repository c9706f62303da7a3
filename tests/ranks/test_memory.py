"""The memory of a step, by the kernel's high-water mark, against the bound that the benchmark prints."""

import memory
import pytest
from ranks import run_ranks

import gradcomp

RULES = {"1%": gradcomp.TopK(0.01), "10%": gradcomp.TopK(0.1), "threshold": gradcomp.Threshold(7.0)}


def peak(rank, rule, values):
    return memory.measure(64, RULES[rule], values)


@pytest.mark.parametrize(("rule", "values"), [("1%", "bf16"), ("10%", "bf16"), ("1%", "int8"), ("threshold", "fp32")])
def test_20_a_large_bucket_stays_within_the_bound(rule, values):
    for record in run_ranks(2, peak, rule, values):
        assert record["density"] > 0.005
        assert record["extra_mib"] <= record["bound_mib"], record
        assert record["bound_mib"] < 32 + 2700 * record["density"], "and the bound says something"
