"""The path of CUDA tensors, on the CPU: the same bits as the numpy passes, and nothing for which the host would wait."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import gradcomp
from gradcomp.core import codec, device, scan, selection
from gradcomp.core.feedback import Feedback
from gradcomp.core.values import FORMATS, decode_values, encode_values, scale_of
from gradcomp.ddp import payload
from gradcomp.ddp.device import payload as on_device
from gradcomp.ddp.device.flight import DeviceFlight
from gradcomp.ddp.payload import FLUSH
from gradcomp.ddp.plan import Piece, Plan

SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, -3e38])
FINITE = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, -3e38]), st.floats(-(2.0**100), 2.0**100, width=32))
ANY = st.one_of(SPECIAL, st.floats(width=32))


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float32)


def padded(indices, values, capacity, numel):
    """What the CPU found, in so many places."""
    spare = capacity - indices.size
    return np.append(indices, np.full(spare, numel)), np.append(values, np.zeros(spare, np.float32)).astype(np.float32)


def every_other(data, mask):
    mask.view(-1)[::2] = True
    data.zero_()


class OfTheName:
    """A rule that is told names, as those of sparsified data are."""

    def __init__(self):
        self.state = {}

    def update_mask(self, name, data, **config):
        self.state[name]["mask"].copy_(data.abs() > len(name))


RULES = [
    gradcomp.Threshold(0.5),
    gradcomp.Threshold(3.3e38),
    gradcomp.TopK(0.1),
    gradcomp.TopK(1.0),
    gradcomp.Dense(),
    every_other,
    OfTheName(),
]


@given(st.lists(ANY, min_size=1, max_size=80), st.sampled_from(RULES), st.floats(0, 1))
def test_selection(numbers, rule, share):
    acc = tensor(numbers)
    numel = acc.numel()
    found = selection.select(rule, "w", scan.Accumulation(acc.clone()), acc)
    capacity = rule.count(numel) if isinstance(rule, gradcomp.TopK) else round(share * numel)
    expected = padded(*scan.keep_largest(found.indices, found.values, capacity), capacity, numel)
    before = acc.clone()
    picked = device.pick(device.choose(rule, "w", acc, acc), acc, capacity, fits=isinstance(rule, gradcomp.TopK))
    assert np.array_equal(picked.indices.numpy(), expected[0])
    assert picked.values.numpy().tobytes() == expected[1].tobytes()
    assert (int(picked.wanted), bool(picked.finite)) == (found.indices.size, bool(np.isfinite(numbers).all()))
    assert acc.numpy().tobytes() == before.numpy().tobytes()


SUBSETS = st.integers(1, 300).flatmap(lambda numel: st.tuples(st.just(numel), st.sets(st.integers(0, numel - 1), max_size=numel)))


@given(SUBSETS, st.integers(0, 40))
def test_indices(case, spare):
    numel, chosen = case
    indices = np.array(sorted(chosen), np.int64)
    count = min(numel, indices.size + spare)
    room = torch.zeros(count, dtype=torch.int64)
    room[: indices.size] = torch.from_numpy(indices)
    sent = torch.tensor(indices.size)
    written = device.encode_indices(room, sent, numel)
    assert written.numpy().tobytes() == codec.encode_indices(indices, numel, count).tobytes()
    read, intact = device.decode_indices(written, sent, numel, count)
    assert bool(intact)
    assert np.array_equal(read.numpy(), np.append(indices, np.full(count - indices.size, numel)))


@pytest.mark.parametrize("numel", [2**40, 2**33 + 5])
def test_huge_index_spaces(numel):
    indices = torch.tensor([0, 1, 2**20, 2**32, numel - 2, numel - 1])
    written = device.encode_indices(indices, torch.tensor(6), numel)
    assert written.numpy().tobytes() == codec.encode_indices(indices.numpy(), numel, 6).tobytes()
    assert torch.equal(device.decode_indices(written, torch.tensor(6), numel, 6)[0], indices)


@given(st.binary(min_size=1, max_size=60), st.integers(1, 400), st.integers(0, 60), st.integers(-3, 70))
@example(b"\x00", 24, 6, 7)  # more than there is room for
def test_damaged_indices_never_point_outside(data, numel, count, sent):
    count = min(count, numel)
    size = codec.index_bytes(numel, count)
    data = np.frombuffer(data.ljust(size, b"\x5a")[:size], np.uint8).copy()
    read, intact = device.decode_indices(torch.from_numpy(data), torch.tensor(sent), numel, count)
    assert bool(((read >= 0) & (read <= numel)).all())
    try:
        expected = codec.decode_indices(data, numel, count, sent) if sent >= 0 else None
    except gradcomp.PayloadError:
        expected = None
    assert bool(intact) == (expected is not None)
    if expected is not None:
        assert np.array_equal(read[:sent].numpy(), expected)


@given(st.lists(FINITE, max_size=70), st.integers(0, 9), st.sampled_from(sorted(FORMATS)))
def test_values(numbers, spare, name):
    form, exact = FORMATS[name], np.array(numbers, np.float32)
    sent = torch.tensor(exact.size)
    room = tensor([*numbers, *[0.0] * spare])
    scale = scale_of(exact, form)
    found = device.scale_of(room, sent, form)
    assert float(found) == pytest.approx(scale, rel=1e-6)  # a mean is summed in another order
    scales = torch.full_like(room, scale) if form.scaled else None
    written = device.encode_values(room, form, scales)
    expected = encode_values(exact, form, scale)
    assert written.numpy().tobytes() == expected.tobytes().ljust(form.size(room.numel()), b"\0")
    read = device.decode_values(written, form, room.numel(), scales)
    assert read[: exact.size].numpy().tobytes() == decode_values(expected, form, exact.size, scale).tobytes()


def test_bits_of_several_rows():
    bits = torch.rand(3, 21, generator=torch.Generator().manual_seed(0)) > 0.5
    packed = device.pack_bits(bits)
    assert packed.numpy().tobytes() == np.packbits(bits.numpy(), axis=1, bitorder="little").tobytes()
    assert torch.equal(device.unpack_bits(packed, 21).bool(), bits)


# Payloads


def piece(name, start, numel, rule, travel, capacity, dtype=torch.float32, tracked=True):
    place = {"start": start, "numel": numel, "shape": (numel,), "stride": (1,)}
    return Piece(name=name, rule=rule, dtype=dtype, travel=travel, capacity=capacity, tracked=tracked, **place)


def example(values="bf16", dtype=torch.float32, flush=False):
    """A bucket in which everything occurs."""
    pieces = [
        piece("a", 0, 100, gradcomp.TopK(0.1), "sparse", 10, dtype),
        piece("b", 100, 7, gradcomp.Dense(), "ride", 7, dtype),
        piece("c", 107, 500, gradcomp.Dense(), "ring", 0, dtype, tracked=False),
        piece("d", 607, 300, gradcomp.Threshold(0.9), "sparse", 64, dtype),
        piece("e", 907, 50, gradcomp.Threshold(0.1), "ring", 0, dtype),
    ]
    return Plan(pieces, values, flush=flush, report=False)


class Alone:
    """As much of an exchange as a flight asks for."""

    rank, world_size = 0, 2


def chosen_by_both(plan, buffer, report):
    """What both paths choose of a bucket without residuals."""
    ours, theirs = [], []
    true = torch.ones((), dtype=torch.bool)
    for part in plan.pieces:
        acc, bit = part.part(buffer), true if report else ~true
        picked = found = None
        if part in plan.counted:
            picked = device.pick(device.choose(part.rule, part.name, acc, acc), acc, part.capacity)
            found = selection.select(part.rule, part.name, scan.Accumulation(acc), acc)
        kept = scan.keep_largest(found.indices, found.values, part.capacity) if part.travel == "sparse" else payload.NOTHING[:2]
        ridden = acc if part.travel == "ride" else None
        ours.append(on_device.Chosen(picked, ridden, bit, true if picked is None else picked.finite, ~bit))
        values = kept[1] if ridden is None else ridden.numpy()
        wanted, finite = (0, True) if found is None else (found.indices.size, found.finite)
        theirs.append(payload.Chosen(kept[0], values, wanted, bool(bit), finite, not bit))
    return ours, theirs


@given(st.integers(0, 999), st.sampled_from(sorted(FORMATS)), st.booleans(), st.sampled_from([0.0, 0.01, 1.0, 1e4]), st.booleans())
def test_payloads_are_the_same_bytes(seed, values, report, size, whole):
    plan = example(values)
    buffer = torch.randn(957, generator=torch.Generator().manual_seed(seed)) * size
    if whole or values == "sign":
        buffer = buffer.round()  # sums are then exact in any order
    ours, theirs = chosen_by_both(plan, buffer, report)
    packed, expected = on_device.pack(plan, 7, FLUSH, ours, buffer), payload.pack(plan, 7, FLUSH, theirs)
    assert packed.numpy().tobytes() == expected.tobytes()
    received = on_device.unpack(plan, 7, torch.stack([packed, packed]), 957)
    arrival = payload.unpack(plan, 7, 0, expected)
    assert bool(received.intact)
    assert received.zero[1].tolist() == arrival.zero.tolist()
    assert received.not_finite[1].tolist() == arrival.not_finite.tolist()
    at = {part.piece.name: part for part in arrival.released}
    places = np.concatenate([at[name].indices + plan.pieces[order].start for name, order in (("a", 0), ("d", 3))])
    used = received.places[1] < 957
    assert np.array_equal(received.places[1][used].numpy(), places)
    assert received.values[1][used].numpy().tobytes() == np.concatenate([at["a"].values, at["d"].values]).tobytes()
    assert not bool(received.values[1][~used].any())
    assert received.rides[0][1].numpy().tobytes() == at["b"].values.tobytes()


@given(st.data())
def test_damaged_payloads_are_noticed_and_point_nowhere(data):
    plan = example(data.draw(st.sampled_from(sorted(FORMATS))))
    ours, _ = chosen_by_both(plan, torch.randn(957, generator=torch.Generator().manual_seed(1)), report=False)
    packed = on_device.pack(plan, 7, 0, ours, torch.empty(0))
    at = data.draw(st.integers(0, packed.numel() - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    received = on_device.unpack(plan, 7, packed[None], 957)
    assert bool(((received.places[0] >= 0) & (received.places[0] <= 957)).all())
    try:
        payload.unpack(plan, 7, 0, packed.numpy())
        right = True
    except gradcomp.GradcompError:
        right = False
    assert bool(received.intact) == right


# Nothing waits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("values", sorted(FORMATS))
def test_the_host_waits_for_nothing(values, momentum, flush, dtype):
    """With tensors that have no values, whatever would need one raises."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        plan, buffer = example(values, dtype, flush), torch.randn(957).to(dtype)
        feedback = Feedback(momentum)
        for part in plan.pieces:
            feedback._residuals[part.name] = torch.zeros(part.numel)
            if momentum:
                feedback._velocities[part.name] = torch.zeros(part.numel)
        scale = torch.ones(())
        with pytest.raises(DataDependentOutputException):
            bool(buffer.any())
        zero = {part.name: ~part.part(buffer).any() for part in plan.pieces}
        for part in plan.pieces:
            feedback.push(part.name, part.part(buffer), scale)
        sums = {part.name: feedback.total(part.name, part.part(buffer), scale.reciprocal()) for part in plan.pieces}
        picked = {}
        for part in plan.counted:
            mask = device.choose(part.rule, part.name, sums[part.name], part.shaped(buffer))
            picked[part.name] = device.pick(mask, sums[part.name], part.capacity)
        moving = dict.fromkeys(sums, momentum > 0)
        flight = DeviceFlight(plan, 3, Alone(), buffer, feedback, scale=scale, unscale=scale.reciprocal(), moving=moving, zero=zero)
        packed = flight.load_payload(0, sums, picked)
        assert packed.numel() == plan.payload_bytes
        ring = flight.load_ring(sums, frozenset())
        flight.receive_payloads(torch.stack([packed, packed]))
        flight.receive_ring(ring)
        assert [tensor.numel() for tensor in flight.seen] == [3, 2 * plan.header_bytes]
        flight.land(flight.bad)
        assert flight.result is buffer
