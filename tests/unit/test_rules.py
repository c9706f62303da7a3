import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import threshold_indices, top_k_indices

import gradcomp
from gradcomp.core import rules, scan
from gradcomp.core.selection import select

pytestmark = pytest.mark.usefixtures("either_way")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
VALUES = st.one_of(st.floats(width=16, allow_nan=False, allow_infinity=False), st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0]))


def mask_of(rule, data):
    mask = torch.ones(data.shape, dtype=torch.bool)
    rules.fill_mask(rule, "x", data, mask)
    return mask


@given(st.lists(VALUES, max_size=60), st.floats(0.01, 1), st.sampled_from(DTYPES))
def test_topk_is_the_exact_topk(values, density, dtype):
    data = torch.tensor(values, dtype=dtype)
    rule = gradcomp.TopK(density)
    expected = top_k_indices(data, rule.count(len(values)))
    assert mask_of(rule, data).nonzero().view(-1).tolist() == expected


@given(st.lists(VALUES, min_size=1, max_size=60), st.floats(0.01, 1))
def test_topk_without_numpy_is_the_same(values, density):
    data = torch.tensor(values)
    k = gradcomp.TopK(density).count(len(values))
    assert scan.top_k_mask(data, k).nonzero().view(-1).tolist() == top_k_indices(data, k)


@given(st.lists(VALUES, max_size=60), st.floats(0, 4), st.sampled_from(DTYPES))
def test_threshold_is_strict(values, tau, dtype):
    data = torch.tensor(values, dtype=dtype)
    assert mask_of(gradcomp.Threshold(tau), data).nonzero().view(-1).tolist() == threshold_indices(data, tau)


@pytest.mark.parametrize("numel", [5000, 2 * scan.CHUNK + 77])
@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "few", "periodic", "integers"])
def test_topk_is_exact_on_large_tensors(numel, kind):
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(numel, generator=generator)
    if kind == "heavy":
        data = data**9
    elif kind == "constant":
        data.fill_(-3.0)
    elif kind == "few":
        data[7:] = 0
    elif kind == "periodic":
        data[::2] *= 1e6
    elif kind == "integers":
        data = data.mul(2).round()
    rule = gradcomp.TopK(0.01)
    k = rule.count(numel)
    order = torch.sort(data.abs(), descending=True, stable=True)
    expected = order.indices[:k][order.values[:k] > 0].sort().values
    assert torch.equal(mask_of(rule, data).nonzero().view(-1), expected)


def test_topk_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    mask_of(gradcomp.TopK(0.01), torch.linspace(-1, 1, 300_000))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 2**24 + 1])
def test_topk_takes_any_size(numel, dtype):
    data = torch.zeros(numel, dtype=dtype)
    if numel:
        data[-1] = -2
        data[0] = 1
    chosen = mask_of(gradcomp.TopK(min(1.0, 2 / max(1, numel))), data).nonzero().view(-1).tolist()
    assert chosen == sorted({0, numel - 1} if numel else set())


@pytest.mark.parametrize("rule", [gradcomp.TopK(0.25), gradcomp.Threshold(0.5), gradcomp.Dense()])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4)])
def test_any_shape(rule, shape):
    data = torch.ones(shape)
    assert mask_of(rule, data).shape == data.shape
    assert bool(mask_of(rule, data).any()) == bool(data.numel())


@pytest.mark.parametrize("rule", [gradcomp.TopK(0.25), gradcomp.Threshold(0.5), gradcomp.Dense()])
def test_what_is_not_finite_is_never_hidden(rule):
    data = torch.tensor([0.0, math.nan, 0.1, math.inf, 0.2, -math.inf, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    mask = mask_of(rule, data)
    assert mask[[1, 3, 5]].all()


def test_strided_data_and_masks():
    data = torch.arange(24.0).view(4, 6).t()
    mask = torch.zeros(4, 6, dtype=torch.bool).t()
    gradcomp.TopK(3 / 24).mask_(data, mask)
    assert torch.equal(mask, data >= 21)


@pytest.mark.parametrize("density", [0, 1.5, -0.1, math.nan, "1%", None, True])
def test_bad_density_is_refused(density):
    with pytest.raises(ValueError, match=r"TopK\.density"):
        gradcomp.TopK(density)


@pytest.mark.parametrize("tau", [-1, math.inf, math.nan, "x"])
def test_bad_tau_is_refused(tau):
    with pytest.raises(ValueError, match=r"Threshold\.tau"):
        gradcomp.Threshold(tau)


@pytest.mark.parametrize(("density", "numel", "k"), [(0.001, 3, 1), (0.01, 1, 1), (0.01, 150, 2), (0.01, 149, 1), (1.0, 7, 7), (0.5, 0, 0)])
def test_count(density, numel, k):
    assert gradcomp.TopK(density).count(numel) == k


class Sparsifier:
    """As a data sparsifier: ten lines of update_mask."""

    def __init__(self):
        self.state, self.data_groups, self.defaults = {}, {"x": {"level": 2.0}}, {"level": 99.0}

    def update_mask(self, name, data, level):
        self.state[name]["mask"][data.abs() < level] = 0


def test_the_three_kinds_of_rules_agree():
    data = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    expected = torch.tensor([[False, True], [True, False]])
    assert torch.equal(mask_of(Sparsifier(), data), expected)
    assert torch.equal(mask_of(lambda data, mask: mask.copy_(data.abs() > 1.5), data), expected)
    assert torch.equal(mask_of(gradcomp.Threshold(1.5), data), expected)


class Positive(gradcomp.Threshold):
    def mask_(self, data, mask):
        mask.copy_(data > self.tau)


def test_a_rule_of_a_rule_keeps_its_own_mask():
    data = torch.tensor([1.0, -1.0, 0.2])
    assert gradcomp.compress(data, Positive(0.5)).indices.tolist() == [0]


def test_a_rule_that_returns_its_mask_is_refused():
    for rule in (lambda data, mask: data.abs() > 0.5, Sparsifier):
        with pytest.raises(ValueError, match=r"must fill the mask in place|must be an object"):
            gradcomp.compress(torch.ones(3), rule)
    assert gradcomp.compress(torch.ones(3), lambda data, mask: mask.fill_(True)).indices.numel() == 3


def test_a_rule_that_writes_to_its_data_changes_nothing():
    def rule(data, mask):
        data.abs_()
        mask.copy_(data > 0.5)

    data = torch.tensor([-1.0, 0.1])
    found = select(rule, "x", scan.Accumulation(data, torch.tensor([-0.5, 0.0])), data)
    assert found.values.tolist() == [-1.5]


@pytest.mark.parametrize("tau", [1e39, 1e300])
def test_a_threshold_beyond_fp32_hides_nothing_infinite(tau):
    data = torch.tensor([1.0, math.inf, math.nan, 3e38])
    assert mask_of(gradcomp.Threshold(tau), data).tolist() == [False, True, True, False]
    assert gradcomp.compress(data, gradcomp.Threshold(tau)).indices.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masks_and_selections_agree_in_half_precision(dtype):
    data = torch.tensor([0.3, 0.1, 0.7], dtype=dtype)
    for tau in (0.3, 0.1, 0.7):
        mask = mask_of(gradcomp.Threshold(tau), data)
        assert gradcomp.compress(data, gradcomp.Threshold(tau)).indices.tolist() == mask.nonzero().view(-1).tolist()


def test_what_is_no_rule_is_refused():
    with pytest.raises(ValueError, match=r"field must be an object, got the class TopK: write TopK\(\.\.\.\)"):
        rules.check_rule("field", gradcomp.TopK)
    with pytest.raises(ValueError, match=r"field must be a rule, got 0\.01: write TopK\(0\.01\)"):
        rules.check_rule("field", 0.01)


def test_descriptions_hold_no_addresses():
    assert rules.describe(gradcomp.TopK(0.5)) == "TopK(density=0.5)"
    assert rules.describe(Sparsifier()) == rules.describe(Sparsifier())
    assert rules.describe(mask_of) == "test_rules.mask_of"
    assert rules.describe(gradcomp.TopK(np.float32(0.5))) == "TopK(density=0.5)"
    assert rules.describe(gradcomp.TopK(1)) == rules.describe(gradcomp.TopK(1.0)) == "TopK(density=1.0)"
    assert rules.describe(Holder(mask_of, [1, "a"])) == "Holder(rule=test_rules.mask_of, others=[1.0, 'a'])"


@dataclass(frozen=True)
class Holder:
    rule: object
    others: list
