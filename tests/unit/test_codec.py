import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import FORMATS, elias_fano, information_bound, rounded

import gradcomp
from gradcomp import codec
from gradcomp.core import values as formats

pytestmark = pytest.mark.usefixtures("either_way")

SUBSETS = st.integers(0, 300).flatmap(lambda numel: st.tuples(st.just(numel), st.sets(st.integers(0, max(0, numel - 1)), max_size=numel)))


def subset(numel, chosen):
    return np.array(sorted(chosen) if numel else [], np.int64)


@given(SUBSETS, st.integers(0, 40))
def test_indices_against_the_oracle(case, spare):
    numel, chosen = case
    indices = subset(numel, chosen)
    count = min(numel, indices.size + spare)
    written = codec.encode_indices(indices, numel, count)
    assert written.tobytes() == elias_fano(indices.tolist(), numel, count)
    assert written.size == codec.index_bytes(numel, count)
    assert np.array_equal(codec.decode_indices(written, numel, count, indices.size), indices)


@pytest.mark.parametrize("numel", [2**40, 2**33 + 5])
def test_huge_index_spaces(numel):
    indices = np.array([0, 1, 2**20, 2**32, numel - 2, numel - 1], np.int64)
    written = codec.encode_indices(indices, numel, 6)
    assert written.size == codec.index_bytes(numel, 6) < 6 * 6
    assert np.array_equal(codec.decode_indices(written, numel, 6, 6), indices)


@pytest.mark.parametrize("count", [512, 513, 519, 777, 4096, 65536])
@pytest.mark.parametrize("per_index", [2, 2.6, 3, 4, 7, 11.3, 19.9, 20, 31.9, 32, 33, 100, 999, 1024, 10_000])
def test_index_bytes_are_close_to_the_bound(count, per_index):
    numel = int(count * per_index)
    excess = (8 * codec.index_bytes(numel, count) - information_bound(numel, count)) / count
    assert 0 <= excess <= (0.6 if count / numel <= 0.05 else 0.8)


def test_a_bitmap_where_that_is_smaller():
    assert codec.index_bits(1000, 600) == 1000
    assert codec.index_bits(1000, 1000) == 1000
    assert codec.index_bits(1000, 0) == 0


@given(
    st.lists(st.floats(-1e5, 1e5, width=32), max_size=40),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    st.sampled_from(sorted(formats.FORMATS)),
)
def test_a_payload_round_trip(values, dtype, form):
    limit = torch.finfo(dtype).max
    data = torch.tensor(values, dtype=torch.float64).clamp(-limit, limit).to(dtype)
    chosen = gradcomp.compress(data, gradcomp.Threshold(0.5))
    payload = codec.encode(chosen, form)
    back = codec.decode(payload)
    assert payload.dtype == torch.uint8
    count = chosen.indices.numel()
    assert payload.numel() == 18 + 8 + codec.index_bytes(data.numel(), count) + formats.FORMATS[form].size(count)
    assert torch.equal(back.indices, chosen.indices)
    assert (back.shape, back.dtype, back.values.dtype) == (chosen.shape, dtype, dtype)
    expected = rounded(chosen.values.double(), form).double().clamp(-limit, limit).to(dtype)
    assert torch.equal(back.values, expected)
    if form == "fp32" and dtype != torch.float64:
        assert torch.equal(back.to_dense(), chosen.to_dense())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int8, torch.bool])
def test_any_shape_and_dtype(shape, dtype):
    data = torch.ones(shape, dtype=dtype)
    assert torch.equal(codec.decode(codec.encode(gradcomp.compress(data, gradcomp.Dense()))).to_dense(), data)


@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_narrow_formats_saturate(form):
    back = codec.decode(codec.encode(gradcomp.compress(torch.tensor([3.4e38, -3.4e38, 1.0]), gradcomp.Dense()), form))
    limit = torch.finfo(FORMATS[form]).max
    assert back.values.tolist() == [limit, -limit, 1.0]


def test_a_bf16_value_does_not_leave_the_range_of_fp16():
    data = torch.tensor([65504.0], dtype=torch.float16)
    assert codec.decode(codec.encode(gradcomp.compress(data, gradcomp.Dense()), "bf16")).values.tolist() == [65504.0]


def test_encode_refuses_what_it_cannot_write():
    chosen = gradcomp.compress(torch.ones(3), gradcomp.Dense())
    with pytest.raises(ValueError, match=r"values must be one of .*got 'fp8'"):
        codec.encode(chosen, "fp8")
    with pytest.raises(ValueError, match="finite, got 1"):
        codec.encode(gradcomp.compress(torch.tensor([1.0, float("nan")]), gradcomp.Dense()))
    with pytest.raises(ValueError, match="count"):
        codec.index_bits(3, 4)
    for indices, count, words in (
        ([2, 1], 2, "ascending"),
        ([1, 1], 2, "ascending"),
        ([0, 3], 2, "ascending in 0..2"),
        ([-1], 1, "ascending"),
        ([0], 2, "as many"),
    ):
        wrong = gradcomp.Selection(torch.tensor(indices), torch.ones(count), torch.Size([3]), torch.float32)
        with pytest.raises(ValueError, match=words):
            codec.encode(wrong)


def test_decode_refuses_values_that_are_not_finite():
    payload = codec.encode(gradcomp.compress(torch.ones(1), gradcomp.Dense()), "fp32")
    payload[-4:] = torch.tensor([float("nan")]).view(torch.uint8)
    with pytest.raises(gradcomp.PayloadError, match="not finite"):
        codec.decode(payload)
    empty = struct.pack("<2s4B2QQf", b"GC", 1, 0, 0, 2, 2**64 - 1, 0, 0, 0)
    with pytest.raises(gradcomp.PayloadError, match="shape"):
        codec.decode(torch.tensor(list(empty), dtype=torch.uint8))


GOOD = codec.encode(gradcomp.compress(torch.arange(50.0), gradcomp.Threshold(30.0)))


@pytest.mark.parametrize("form", sorted(formats.FORMATS))
@pytest.mark.parametrize("density", [0.001, 1 / 512, 0.01, 1 / 64, 1 / 32, 0.05, 0.1, 0.125, 0.2, 0.25])
def test_payloads_are_close_to_the_bound(form, density):
    numel = 1_000_000
    count = int(density * numel)
    bound = information_bound(numel, count) + formats.FORMATS[form].bits * count
    over = 8 * (codec.index_bytes(numel, count) + formats.FORMATS[form].size(count) + 18) / bound
    close = {"sign": density == 0.01, "int8": density <= 0.1}.get(form, True)
    assert 1 <= over <= (1.06 if close else 1.20)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_is_no_scale_is_refused(scale):
    payload = codec.encode(gradcomp.compress(torch.ones(4), gradcomp.Dense()), "int8")
    payload[22:26] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(gradcomp.PayloadError, match="scale"):
        codec.decode(payload)


@pytest.mark.parametrize("size", range(GOOD.numel()))
def test_truncated_payloads_are_refused(size):
    with pytest.raises(gradcomp.PayloadError, match="payload"):
        codec.decode(GOOD[:size])


@given(st.binary(max_size=80))
def test_foreign_payloads_are_refused(data):
    with pytest.raises(gradcomp.PayloadError):
        codec.decode(torch.tensor(list(data), dtype=torch.uint8))


@given(st.integers(0, GOOD.numel() - 1), st.integers(1, 255))
def test_damage_is_refused_or_harmless(position, flip):
    damaged = GOOD.clone()
    damaged[position] ^= flip
    try:
        back = codec.decode(damaged)
    except gradcomp.PayloadError:
        return
    assert back.indices.numel() == back.values.numel()
    assert bool((back.indices.diff() > 0).all())
    assert not back.indices.numel() or 0 <= back.indices[0] <= back.indices[-1] < back.shape.numel()


def test_other_damage_is_named():
    with pytest.raises(gradcomp.PayloadError, match="got a bytes"):
        codec.decode(b"abc")
    with pytest.raises(ValueError, match="got a Tensor"):
        codec.encode(torch.ones(3))
    with pytest.raises(gradcomp.PayloadError, match="uint8"):
        codec.decode(torch.zeros(30))
    with pytest.raises(gradcomp.PayloadError, match="must be"):
        codec.decode(torch.cat([GOOD, GOOD[:1]]))
    other = GOOD.clone()
    other[2] = 9
    with pytest.raises(gradcomp.PayloadError, match="version 9"):
        codec.decode(other)
    huge = struct.pack("<2s4B2QQf", b"GC", 1, 0, 0, 2, 2**62, 2**62, 5, 0)
    with pytest.raises(gradcomp.PayloadError, match="announces 5 elements"):
        codec.decode(torch.tensor(list(huge), dtype=torch.uint8))
    with pytest.raises(gradcomp.PayloadError, match="room for 1"):
        codec.decode_indices(codec.encode_indices(np.array([1]), 9, 1), 9, 1, 2)
    with pytest.raises(gradcomp.PayloadError, match="bitmap holds"):
        codec.decode_indices(codec.encode_indices(np.array([1, 5]), 9, 3), 9, 3, 3)


@pytest.mark.parametrize(
    ("numel", "lows", "highs", "match"),
    [
        (10, "100", "110001", "not strictly ascending below 10"),  # 1, 1, 8
        (11, "001", "1100001", "not strictly ascending below 11"),  # 0, 1, 11
        (10, "000", "111111", "holds (6|more) indices where 3"),
        (10, "000", "110000", "holds 2 indices where 3"),
        (10, "000", "110100", None),  # 0, 1, 4: as it should be, so the others fail for what is wrong in them
    ],
)
def test_index_bits_that_cannot_be_right_are_named(numel, lows, highs, match):
    bits = (lows + highs).ljust(16, "0")
    data = np.array([int(bits[i : i + 8][::-1], 2) for i in (0, 8)], np.uint8)
    if match is None:
        assert codec.decode_indices(data, numel, 3, 3).tolist() == [0, 1, 4]
        return
    with pytest.raises(gradcomp.PayloadError, match=match):
        codec.decode_indices(data, numel, 3, 3)
