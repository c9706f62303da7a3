import gc
import weakref
from dataclasses import replace

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
from gradcomp.ddp.network import Network
from gradcomp.ddp.payload import FLUSH, NOTHING, REMOVE, Chosen, pack, unpack
from gradcomp.ddp.plan import ALLOWANCE, Piece, Plan, Routing, capacity_for, without_needless_gather
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
    # header 8, three bitmaps of 5 bits, counts of a, d and e; 74 indices below 400; 74 sparse and 7 riding values of 2 bytes
    assert plan.payload_bytes == 8 + 3 + 3 * 8 + codec.index_bytes(400, 74) + 2 * (74 + 7)
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
        assert plan.payload_bytes == 8 + 3 + 3 * 8 + 2 * 4 + codec.index_bytes(400, 74) + (74 if values == "int8" else 10) + 2 * 7
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
    other[11], other[19] = 2, 0  # counts of a and d: the right sum, wrongly split
    with pytest.raises(gradcomp.PayloadError, match="announced 2 elements of a and sent 1"):
        unpack(plan, 3, 1, other)
    with pytest.raises(gradcomp.PayloadError, match="where the plan says"):
        pack(plan, 3, 0, [choose(100, [3], [1.0]), choose(7, [], [0] * 6), *chosen[2:]])


def test_an_empty_sparse_parameter_takes_no_room():
    plan = Plan(
        [piece("e", 0, 0, gradcomp.TopK(0.3), "sparse", 0), piece("b", 0, 2, gradcomp.Dense(), "ride", 2)],
        "bf16",
        flush=False,
        report=False,
    )
    arrival = unpack(plan, 0, 0, pack(plan, 0, 0, [choose(0, [], []), choose(2, [], [1, 2])]))
    assert [part.values.tolist() for part in arrival.released] == [[], [1, 2]]


def test_what_is_released_fits_the_gradients_dtype():
    half = replace(piece("a", 0, 4, gradcomp.TopK(0.5), "sparse", 2), dtype=torch.float16)
    for values in ("fp32", "bf16"):
        plan = Plan([half], values, flush=False, report=False)
        arrival = unpack(plan, 0, 0, pack(plan, 0, 0, [choose(4, [0, 3], [65504.0, -1e9])]))
        assert arrival.released[0].values.tolist() == [65504, -65504]


def test_exact_riders_alone_are_not_gathered():
    riders = [piece("b", 0, 7, gradcomp.Dense(), "ride", 7, tracked=False)]
    assert [p.travel for p in without_needless_gather(riders, "fp32")] == ["ring"]
    assert [p.travel for p in without_needless_gather(riders, "bf16")] == ["ride"]
    with_sparse = [*riders, piece("a", 7, 100, gradcomp.TopK(0.1), "sparse", 10)]
    assert [p.travel for p in without_needless_gather(with_sparse, "fp32")] == ["ride", "sparse"]


def test_fp64_never_rides():
    routes = routing([("w", gradcomp.Dense(), 10, torch.float64), ("v", gradcomp.Dense(), 10, F32)], "fp32")
    assert routes.route("w", gradcomp.Dense(), 10, torch.float64, None)[0] == "ring"
    assert routes.route("v", gradcomp.Dense(), 10, F32, None)[0] == "ride"


def test_a_bucket_without_anything_to_gather_has_no_payload():
    plan = Plan([piece("c", 0, 500, gradcomp.Dense(), "ring", 0, tracked=False)], "bf16", flush=False, report=False)
    assert (plan.header, plan.payload_bytes) == (False, 0)
    assert Plan(plan.pieces, "bf16", flush=False, report=True).payload_bytes == 8 + 3


class Flown:
    """As much of a flight as the agenda looks at."""

    def __init__(self, flags=0, wanted=0, rest=False):
        self.plan = example()
        chosen = [choose(100, [], [])._replace(rest=rest), choose(7, [], [0] * 7), NOTHING, choose(300, [], [], wanted=wanted), NOTHING]
        self.arrivals = [unpack(self.plan, 0, 0, pack(self.plan, 0, flags, chosen))]


def started():
    agenda = Agenda()
    agenda.start("d", 300, 10)
    agenda.start("e", 50, 0)
    return agenda


def test_announcements_take_effect_two_steps_later():
    agenda = started()
    agenda.advance([Flown(FLUSH, wanted=100)], announced=0, bad=False)  # step 0 asks for a flush in step 2
    assert (agenda.number, agenda.flushing, agenda.capacity("d")) == (1, False, 64)
    agenda.advance([Flown()], announced=0, bad=False)
    assert agenda.flushing
    agenda.advance([Flown()], announced=0, bad=True)  # step 2 is a bad one: tried again
    assert agenda.flushing
    agenda.advance([Flown()], announced=0, bad=False)
    assert not agenda.flushing
    agenda = started()
    for flags in (FLUSH, FLUSH, 0):
        agenda.advance([Flown(flags)], announced=0, bad=False)
    assert agenda.flushing, "a second request is not swallowed by the first"


def test_a_removal_waits_until_nothing_is_kept_back():
    agenda = started()
    for step, (flags, rest) in enumerate([(REMOVE, False), (0, False), (0, True), (0, True), (0, False)]):
        assert agenda.flushing == (step >= 2)
        assert not agenda.removed
        agenda.advance([Flown(flags, rest=rest)], announced=0, bad=False)
    assert agenda.removed
    assert not agenda.flushing
    loaded = Agenda()
    loaded.load_state_dict(agenda.state_dict())
    assert loaded.state_dict() == agenda.state_dict()


def test_what_is_announced_is_announced_once():
    agenda = started()
    agenda.announce = FLUSH | REMOVE
    agenda.advance([], announced=FLUSH, bad=False)
    assert agenda.announce == FLUSH | REMOVE, "a step that gathered no header told nobody"
    agenda.advance([Flown()], announced=FLUSH, bad=False)
    assert agenda.announce == REMOVE


def test_capacities_lag_two_steps_and_rest_in_bad_ones():
    agenda = started()
    seen = []
    for wanted, bad in ((100, False), (0, False), (200, False), (0, True), (0, False)):
        seen.append(agenda.capacity("d"))
        agenda.advance([Flown(wanted=wanted)], announced=0, bad=bad)
    assert [*seen, agenda.capacity("d")] == [64, 64, 128, 64, 256, 256]


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
    with pytest.warns(UserWarning, match=r"'\*\.bias'.*no parameter; .* 'embed\.weight'"):
        policy.warn_unmatched(["embed.weight"])
    with pytest.raises(ValueError, match=r"overrides\['x'\]"):
        Policy(gradcomp.Dense(), {"x": 3})
    with pytest.raises(ValueError, match="overrides must map"):
        Policy(gradcomp.Dense(), [gradcomp.Dense()])


def test_names_without_wrappers():
    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = torch.nn.Linear(2, 2)
            self.weight = torch.nn.Parameter(torch.zeros(2))

    assert set(Network(Inner()).shapes) == {"module.weight", "module.bias", "weight"}, "a part may be called module"
    compiled = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    assert set(Network(compiled).shapes) == {"0.weight", "0.bias"}
    assert set(Network(torch.compile(compiled, backend="eager")).shapes) == {"0.weight", "0.bias"}


def test_a_network_is_held_weakly():
    net = torch.nn.Linear(3, 3)
    state = gradcomp.SparseState(net)
    held = weakref.ref(net), weakref.ref(net.weight)
    del net
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert state.residual("weight").shape == (3, 3)


def test_scan_module_chunk_is_a_whole_number_of_words():
    assert scan.CHUNK % 8 == 0
