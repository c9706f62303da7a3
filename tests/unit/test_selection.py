import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradcomp
from gradcomp.core import scan, selection

pytestmark = pytest.mark.usefixtures("either_way")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (4, 0)])
RULES = [gradcomp.TopK(0.3), gradcomp.Threshold(0.5), gradcomp.Dense(), lambda data, mask: mask.copy_(data > 0.5)]


@given(SHAPES, st.integers(0, 99), st.sampled_from(DTYPES), st.sampled_from(RULES))
def test_compress_keeps_what_the_mask_says(shape, seed, dtype, rule):
    data = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    mask = torch.zeros(shape, dtype=torch.bool)
    selection.fill_mask(rule, "x", data, mask)
    chosen = gradcomp.compress(data, rule)
    assert chosen.values.dtype == chosen.dtype == dtype
    assert chosen.indices.dtype == torch.int64
    assert chosen.shape == data.shape
    assert torch.equal(chosen.to_dense(), data * mask)
    assert chosen.density == mask.sum().item() / max(1, data.numel())


@given(SHAPES, st.integers(0, 99))
def test_both_forms_of_the_coordinates(shape, seed):
    data = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    chosen = gradcomp.compress(data, gradcomp.Threshold(0.5))
    expected = torch.nonzero(data.abs() > 0.5)
    assert torch.equal(chosen.coordinates(), expected)
    assert len(chosen.coordinates_tuple()) == len(shape)
    if shape:
        assert torch.equal(data[chosen.coordinates_tuple()], chosen.values)
    elif chosen.indices.numel():
        assert torch.equal(data[chosen.coordinates_tuple()].view(1), chosen.values)


def test_ranks_that_share_an_index_accumulate():
    parts = [gradcomp.compress(torch.tensor(grad), gradcomp.Threshold(0.5)) for grad in ([2.0, 0.1], [4.0, 6.0])]
    assert gradcomp.decompress(parts).tolist() == [6.0, 6.0]
    assert gradcomp.decompress(parts[0]).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3, 4), (0,)])
def test_the_article_named_pair(dtype, shape):
    grad = torch.full(shape, -0.75, dtype=dtype)
    part = gradcomp.compress_gradients(grad, 0.5)
    assert set(part) == {"indices", "values", "shape", "dtype"}
    assert torch.equal(gradcomp.decompress_gradients(part), grad)
    assert gradcomp.decompress_gradients(part).dtype == dtype
    assert torch.equal(gradcomp.decompress_gradients([part, part]), 2 * grad)


def test_add_to_strided_and_wider_tensors():
    dense = torch.ones(3, 2, dtype=torch.float64).t()
    gradcomp.compress(torch.tensor([[1.0, 0, 0], [0, 0, 2.0]]), gradcomp.Threshold(0.5)).add_to_(dense)
    assert dense.tolist() == [[2, 1, 1], [1, 1, 3]]


def test_strided_input_and_results_that_alias_nothing():
    data = torch.arange(6.0).view(2, 3).t()
    chosen = gradcomp.compress(data, gradcomp.Threshold(2.5))
    before = data.clone()
    assert torch.equal(chosen.to_dense(), data * (data > 2.5))
    chosen.values.zero_()
    assert torch.equal(data, before)


def test_chunks_do_not_change_indices():
    mask = torch.zeros(25, dtype=torch.bool)
    mask[[0, 9, 10, 19, 20, 24]] = True
    whole = selection.nonzero(mask)
    assert whole.dtype == torch.int64
    for chunk in (1, 10, 25, 26):
        assert torch.equal(selection.nonzero(mask, chunk=chunk), whole)
    assert whole.tolist() == [0, 9, 10, 19, 20, 24]
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        selection.nonzero(mask, chunk=0)


def test_scan_chunks_do_not_change_indices():
    data = torch.zeros(2 * scan.CHUNK + 3)
    at = [0, scan.CHUNK - 1, scan.CHUNK, 2 * scan.CHUNK, 2 * scan.CHUNK + 2]
    data[at] = 1.0
    assert gradcomp.compress(data, gradcomp.Threshold(0.5)).indices.tolist() == at


@pytest.mark.parametrize("size", [2**24 + 1])
def test_indices_beyond_the_integers_of_fp32(size):
    data = torch.zeros(size)
    data[-1] = 1
    assert gradcomp.compress(data, gradcomp.TopK(1e-7)).indices.tolist() == [size - 1]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="complex64"):
        gradcomp.compress(torch.zeros(2, dtype=torch.complex64), gradcomp.Dense())
    with pytest.raises(ValueError, match="sparse_coo"):
        gradcomp.compress(torch.zeros(2).to_sparse(), gradcomp.Dense())
    with pytest.raises(ValueError, match="rule must be a rule"):
        gradcomp.compress(torch.zeros(2), 0.1)
    with pytest.raises(ValueError, match=r"torch\.Tensor, got a list"):
        gradcomp.compress([1.0], gradcomp.Dense())
    with pytest.raises(ValueError, match=r"codec\.decode"):
        gradcomp.decompress([torch.zeros(3)])
    with pytest.raises(ValueError, match="got none"):
        gradcomp.decompress([])
    with pytest.raises(ValueError, match="shape"):
        gradcomp.decompress([gradcomp.compress(torch.zeros(n), gradcomp.Dense()) for n in (2, 3)])
    with pytest.raises(ValueError, match="dtype"):
        gradcomp.decompress_gradients({"indices": 0, "values": 0, "shape": 0})
