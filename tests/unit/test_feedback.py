import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import accumulated, rounded

from gradcomp.core.feedback import Feedback
from gradcomp.core.scan import CHUNK, Accumulation
from gradcomp.core.values import FORMATS, decode_values, encode_values, scale_of

pytestmark = pytest.mark.usefixtures("either_way")

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**28), max_value=2.0**28)
PAIRS = st.lists(st.tuples(FLOATS, FLOATS, st.booleans()), min_size=1, max_size=40)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def through(acc, form):
    """What the wire makes of one parameter's values."""
    chosen = FORMATS[form]
    scale = scale_of(acc, chosen)
    data = encode_values(acc, chosen, scale)
    assert data.size == chosen.size(acc.size)
    return decode_values(data, chosen, acc.size, scale)


def held(residual):
    feedback = Feedback()
    feedback.replace({"x": residual.clone()})
    return feedback


@given(PAIRS, st.sampled_from(DTYPES), st.sampled_from(sorted(FORMATS)))
def test_promise_one_bit_for_bit(rows, dtype, form):
    residual = torch.tensor([row[0] for row in rows])
    grad = torch.tensor([row[1] for row in rows], dtype=torch.float64).clamp(-60000, 60000).to(dtype)
    sent = np.flatnonzero([row[2] for row in rows])
    feedback = held(residual)

    acc = torch.from_numpy(feedback.accumulate("x", grad).whole())
    assert acc.numpy().tobytes() == accumulated(residual, grad).numpy().tobytes()
    assert torch.equal(feedback.get("x"), residual), "nothing is stored before the step completes"

    released = through(acc.numpy()[sent], form)
    assert released.tobytes() == rounded(acc[sent], form).numpy().tobytes()
    feedback.keep("x", grad, sent, released)
    kept = feedback.get("x")
    expected = acc.clone()
    expected[sent] = acc[sent] - torch.from_numpy(released)
    assert torch.equal(kept, expected)
    # The parts sum to the whole: exactly, in fp64; for sign within one ulp of the larger.
    decoded = torch.zeros(len(rows), dtype=torch.float64)
    decoded[sent] = torch.from_numpy(released).double()
    error = (decoded + kept.double() - acc.double()).abs()
    if form == "sign":
        assert bool((error <= torch.from_numpy(np.spacing(np.maximum(acc.abs().numpy(), decoded.abs().float().numpy())))).all())
    else:
        assert not bool(error.count_nonzero())


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("size", [1e-45, 3e-45, 1e-40, 1e-38, 1e30, 3.4028234e38])
def test_extreme_values_stay_finite_and_accounted_for(form, size):
    acc = (np.linspace(-1, 1, 41) * size).astype(np.float32)
    released = through(acc, form)
    assert np.isfinite(released).all()
    kept = acc - released
    assert np.isfinite(kept).all()
    if form != "fp16" or size < 2**29:
        error = np.abs(kept.astype(np.float64) + released - acc)
        ulp = np.maximum(np.abs(acc), np.abs(released)).astype(np.float64) * 2.0**-23 + 2.0**-149
        assert (error <= (ulp if form == "sign" else 0)).all()


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_what_saturates_stays(form):
    feedback = held(torch.tensor([3.0e38 if form == "fp16" else 3.3e38]))
    grad = torch.zeros(1)
    acc = feedback.accumulate("x", grad).whole()
    released = through(acc, form)
    assert np.isfinite(released).all()
    feedback.keep("x", grad, None, released)
    assert feedback.get("x").numpy()[0] == acc[0] - released[0]


def test_nothing_released_keeps_everything():
    feedback = held(torch.tensor([1.0, 2.0]))
    feedback.keep("x", torch.tensor([0.5, 0.0]), np.array([0]), None)
    assert feedback.get("x").tolist() == [1.5, 2.0]
    feedback.clear("x")
    assert feedback.get("x").tolist() == [0.0, 0.0]


def test_ensure_never_overwrites():
    feedback = held(torch.tensor([1.0]))
    feedback.ensure("x", 1)
    feedback.ensure("y", 3)
    assert feedback.get("x").tolist() == [1.0]
    assert feedback.get("y").tolist() == [0.0] * 3
    assert feedback.get("z") is None
    assert "z" not in feedback


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_are_the_whole(dtype):
    numel = 2 * CHUNK + 5
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    residual = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    assert np.array_equal(Accumulation(grad, residual).whole(), accumulated(residual, grad).numpy())
    assert np.array_equal(Accumulation(grad, fp32=True).whole(), grad.float().numpy())


def test_zero_is_about_the_gradient_alone():
    residual = torch.ones(CHUNK + 2000)
    grad = torch.zeros_like(residual)
    assert Accumulation(grad, residual).is_zero()
    assert Accumulation(-grad, residual).is_zero()
    for position in (0, 1023, 1024, CHUNK + 1023, CHUNK + 1024, CHUNK + 1999):
        other = grad.clone()
        other[position] = float("nan") if position == 0 else 1e-30
        assert not Accumulation(other, residual).is_zero()
    assert Accumulation(torch.zeros(0), torch.zeros(0)).is_zero()
    with pytest.raises(ValueError, match="without a residual"):
        Accumulation(grad).store()


def test_residuals_on_a_device_are_fp32_whatever_the_default():
    feedback = Feedback(0.9)
    feedback.move(torch.device("meta"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        feedback.ensure("x", 5)
    finally:
        torch.set_default_dtype(before)
    residual = feedback.get("x")
    assert (residual.dtype, residual.device.type, residual.numel()) == (torch.float32, "meta", 5)
