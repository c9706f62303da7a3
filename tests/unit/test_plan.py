import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradcomp
from gradcomp.core import codec, scan
from gradcomp.core.policy import Policy
from gradcomp.core.values import FORMATS
from gradcomp.ddp.agenda import Agenda
from gradcomp.ddp.payload import FLUSH, NOTHING, Chosen, pack, unpack
from gradcomp.ddp.plan import ALLOWANCE, Piece, Plan, Routing, capacity_for
from gradcomp.ddp.state import parameter_name
from gradcomp.ddp.traffic import gather_bytes, ring_bytes

F32 = torch.float32


def routing(parameters=(), values="bf16", fallback="dense", world_size=4):
    return Routing(list(parameters), values=values, fallback=fallback, world_size=world_size)


@pytest.mark.parametrize(
    ("numel", "wanted", "capacity"), [(10, 0, 10), (1000, 0, 64), (1000, 51, 64), (1000, 52, 128), (10**6, 10**4, 12544), (100, 99, 100)]
)
def test_capacity(numel, wanted, capacity):
    assert capacity_for(numel, wanted) == capacity


@pytest.mark.parametrize(
    ("density", "values", "world_size", "travel"),
    [
        (0.01, "bf16", 2, "sparse"),
        (0.01, "bf16", 64, "sparse"),
        (0.1, "bf16", 64, "ring"),  # 16.7 n bytes gathered against 7.9 n around the ring
        (0.1, "bf16", 16, "sparse"),
        (0.6, "bf16", 4, "sparse"),
        (0.6, "fp32", 4, "ring"),
        (1.0, "bf16", 2, "ring"),
    ],
)
def test_whichever_costs_fewer_bytes(density, values, world_size, travel):
    rule, numel = gradcomp.TopK(density), 1_000_000
    routes = routing([("w", rule, numel, F32)], values, world_size=world_size)
    assert routes.route("w", rule, numel, F32, None)[0] == travel
    if travel == "ring" and density < 1:
        assert routing(values=values, fallback="never", world_size=world_size).route("w", rule, numel, F32, None)[0] == "sparse"


def test_the_costs_of_case_29():
    numel = 1_000_000
    share = codec.index_bytes(numel, numel // 10) + 2 * (numel // 10)
    assert gather_bytes(64, share) / numel == pytest.approx(16.7, abs=0.1)
    assert ring_bytes(64, 4 * numel) / numel == pytest.approx(7.9, abs=0.1)


@given(
    st.lists(
        st.tuples(st.integers(1, 20_000), st.sampled_from([gradcomp.Dense(), gradcomp.Threshold(1.0), gradcomp.TopK(0.3)])), max_size=30
    ),
    st.sampled_from(sorted(FORMATS)),
    st.integers(1, 64),
)
def test_small_parameters_cost_at_most_the_allowance(parameters, values, world_size):
    listed = [(f"p{i}", rule, numel, F32) for i, (numel, rule) in enumerate(parameters)]
    routes = routing(listed, values, world_size=world_size)
    excess = 0
    for name, rule, numel, dtype in listed:
        travel, capacity = routes.route(name, rule, numel, dtype, None)
        if travel != "ring":
            indices = codec.index_bytes(numel, capacity) if travel == "sparse" else 0
            form = FORMATS[values if travel == "sparse" else FORMATS[values].riding]
            sent = gather_bytes(world_size, indices + form.size(capacity))
            excess += max(0, sent - ring_bytes(world_size, 4 * numel))
    assert excess <= ALLOWANCE


def piece(name, start, numel, rule, travel, capacity, tracked=True):
    return Piece(
        name=name,
        rule=rule,
        start=start,
        numel=numel,
        dtype=F32,
        shape=(numel,),
        stride=(1,),
        travel=travel,
        capacity=capacity,
        tracked=tracked,
    )


def example(values="bf16"):
    pieces = [
        piece("a", 0, 100, gradcomp.TopK(0.1), "sparse", 10),
        piece("b", 100, 7, gradcomp.Dense(), "ride", 7),
        piece("c", 107, 500, gradcomp.Dense(), "ring", 0, tracked=False),
        piece("d", 607, 300, gradcomp.Threshold(0.1), "sparse", 64),
        piece("e", 907, 50, gradcomp.Threshold(0.1), "ring", 0),
    ]
    return Plan(pieces, values, flush=False, report=False)


def choose(numel, indices, values, **rest):
    return Chosen(
        np.array(indices, np.int64),
        np.array(values, np.float32),
        rest.get("wanted", len(indices)),
        rest.get("zero", False),
        rest.get("finite", True),
    )


def test_a_payload_by_hand():
    plan = example()
    # header 8, two bitmaps of 5 bits, counts of a, d and e; 74 indices below 400; 74 sparse and 7 riding values of 2 bytes
    assert plan.payload_bytes == 8 + 2 + 3 * 8 + codec.index_bytes(400, 74) + 2 * (74 + 7)
    chosen = [
        choose(100, [3, 99], [1.0, -2.0]),
        choose(7, [], [1, 2, 3, 4, 5, 6, 7]),
        NOTHING,
        choose(300, [0, 5, 299], [0.5, 0.25, 8.0], wanted=77, zero=True),
        choose(50, [], [], wanted=49, finite=False),
    ]
    data = pack(plan, 41, FLUSH, chosen)
    assert data.size == plan.payload_bytes
    arrival = unpack(plan, 41, 1, data)
    assert (arrival.rank, arrival.flags) == (1, FLUSH)
    assert arrival.zero.tolist() == [False, False, False, True, False]
    assert arrival.not_finite.tolist() == [False, False, False, False, True]
    assert arrival.wanted == {"a": 2, "d": 77, "e": 49}
    got = {part.piece.name: (None if part.indices is None else part.indices.tolist(), part.values.tolist()) for part in arrival.released}
    assert got == {"a": ([3, 99], [1, -2]), "d": ([0, 5, 299], [0.5, 0.25, 8]), "b": (None, [1, 2, 3, 4, 5, 6, 7])}


def test_scales_travel_in_the_header():
    for values, decoded in (("sign", [[1.5, -1.5], [-4.0, 4.0]]), ("int8", [[1.0, -2.0], [-8.0, 0.0]])):
        plan = example(values)
        # as bf16, but for a scale for a and for d, and 1 or 8 bits a sparse value
        assert plan.payload_bytes == 8 + 2 + 3 * 8 + 2 * 4 + codec.index_bytes(400, 74) + (74 if values == "int8" else 10) + 2 * 7
        chosen = [choose(100, [3, 99], [1.0, -2.0]), choose(7, [], range(7)), NOTHING, choose(300, [0, 5], [-8.0, 0.0]), NOTHING]
        arrival = unpack(plan, 1, 0, pack(plan, 1, 0, chosen))
        for part, expected in zip(arrival.released, decoded):
            np.testing.assert_allclose(part.values, expected, atol=8 / 254)
        assert arrival.released[2].values.tolist() == list(range(7))


def test_foreign_and_damaged_payloads_are_refused():
    plan = example()
    chosen = [choose(100, [3], [1.0]), choose(7, [], [0] * 7), NOTHING, choose(300, [0], [1.0]), NOTHING]
    data = pack(plan, 3, 0, chosen)
    with pytest.raises(gradcomp.DesyncError, match=r"rank 1 sent step 3 .* where step 4"):
        unpack(plan, 4, 1, data)
    other = data.copy()
    other[0] = 9
    with pytest.raises(gradcomp.PayloadError, match="version 9"):
        unpack(plan, 3, 1, other)
    other = data.copy()
    other[10], other[18] = 2, 0  # counts of a and d: the right sum, wrongly split
    with pytest.raises(gradcomp.PayloadError, match="announced 2 elements of a and sent 1"):
        unpack(plan, 3, 1, other)
    with pytest.raises(gradcomp.PayloadError, match="where the plan says"):
        pack(plan, 3, 0, [choose(100, [3], [1.0]), choose(7, [], [0] * 6), *chosen[2:]])


def test_a_bucket_without_anything_to_gather_has_no_payload():
    plan = Plan([piece("c", 0, 500, gradcomp.Dense(), "ring", 0, tracked=False)], "bf16", flush=False, report=False)
    assert (plan.header, plan.payload_bytes) == (False, 0)
    assert Plan(plan.pieces, "bf16", flush=False, report=True).payload_bytes == 8 + 2


def test_announcements_take_effect_two_steps_later():
    agenda = Agenda()
    arrivals = [
        unpack(
            example(),
            0,
            0,
            pack(example(), 0, FLUSH, [choose(100, [], []), choose(7, [], [0] * 7), NOTHING, choose(300, [], [], wanted=100), NOTHING]),
        )
    ]
    agenda.start("d", 300, 10)
    agenda.start("e", 50, 0)
    flown = [(example(), arrivals)]
    agenda.advance(flown, announced=0, bad=False)
    assert (agenda.number, agenda.flushing, agenda.capacity("d")) == (1, False, 64)
    agenda.advance([], announced=0, bad=False)
    agenda.advance(flown, announced=0, bad=True)  # step 2, the flush, is a bad one: it is tried again
    assert agenda.flushing
    agenda.advance([], announced=0, bad=False)
    assert not agenda.flushing


def test_capacities_lag_two_steps():
    agenda = Agenda()
    agenda.start("d", 300, 10)
    agenda.start("e", 50, 0)
    seen = []
    for wanted in (100, 0, 200, 0):
        seen.append(agenda.capacity("d"))
        chosen = [choose(100, [], []), choose(7, [], [0] * 7), NOTHING, choose(300, [], [], wanted=wanted), NOTHING]
        agenda.advance([(example(), [unpack(example(), 0, 0, pack(example(), 0, 0, chosen))])], announced=0, bad=False)
    assert [*seen, agenda.capacity("d")] == [64, 64, 128, 64, 256]


def test_policy():
    policy = Policy(gradcomp.TopK(0.1), {"embed.*": gradcomp.Threshold(1.0), "*.bias": gradcomp.Dense(), "e*": gradcomp.TopK(0.5)})
    matrix, bias = torch.Size([64, 64]), torch.Size([64])
    assert policy.rule_for("embed.bias", bias) == gradcomp.Threshold(1.0)
    assert policy.rule_for("fc.bias", bias) == gradcomp.Dense()
    assert policy.rule_for("encoder", bias) == gradcomp.TopK(0.5)
    assert policy.rule_for("fc.weight", matrix) == gradcomp.TopK(0.1)
    assert policy.rule_for("norm.weight", torch.Size([4096])) == gradcomp.Dense()
    assert policy.rule_for("tiny.weight", torch.Size([31, 33])) == gradcomp.Dense()
    assert policy.rule_for("scalar", torch.Size([])) == gradcomp.Dense()
    with pytest.warns(UserWarning, match=r"'\*\.bias'.*no parameter"):
        policy.warn_unmatched(["embed.weight"])
    with pytest.raises(ValueError, match=r"overrides\['x'\]"):
        Policy(gradcomp.Dense(), {"x": 3})
    with pytest.raises(ValueError, match="overrides must map"):
        Policy(gradcomp.Dense(), [gradcomp.Dense()])


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("module.fc.weight", "fc.weight"),
        ("_orig_mod.module.w", "w"),
        ("a._orig_mod.w", "a.w"),
        ("modules.w", "modules.w"),
        ("a.module.w", "a.module.w"),
    ],
)
def test_names_without_wrappers(raw, name):
    assert parameter_name(raw) == name


def test_scan_module_chunk_is_a_whole_number_of_words():
    assert scan.CHUNK % 8 == 0
