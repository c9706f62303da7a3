"""The handle: flush, remove, state_dict and load_state_dict, traffic."""

import copy
import io
import warnings

import pytest
import torch
from nets import Mixed, given_ddp, loss_of, mixed_ddp, reduced, register, tokens
from ranks import run_ranks

import gradcomp
from gradcomp.core import codec

RULES = {"topk": gradcomp.TopK(0.05), "threshold": gradcomp.Threshold(0.02)}


def dyadic(rank, step, dtype=torch.float32):
    """Gradients that are small multiples of 1/64, so that sums are exact; the last parameter is unused on even steps."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes = {"a": (40, 40), "b": (7,), "c": (50, 50), "d": (9000,)}
    draws = {name: torch.randint(-512, 513, shape, generator=generator).double() / 64 for name, shape in shapes.items()}
    if step % 2 == 0:
        draws["c"] = torch.zeros(50, 50, dtype=torch.float64)
    return {name: draw.to(dtype) for name, draw in draws.items()}


def conserve(rank, rule, values, dtype, action, steps, world_size, at=3):
    """Sum of reduced gradients + mean residual == sum of mean dense gradients, exactly; residuals after each step."""
    shapes = {name: torch.zeros_like(grad) for name, grad in dyadic(0, 0, dtype).items()}
    overrides = {"b": gradcomp.Dense(), "d": gradcomp.Dense(), "*": rule}
    model, handle = given_ddp(shapes, rule, values, overrides=overrides, ddp={"bucket_cap_mb": 0.02}, fallback="never")
    totals = {name: torch.zeros(grad.shape, dtype=torch.float64) for name, grad in shapes.items()}
    pending = []
    for step in range(steps):
        if step == at and action and rank == world_size - 1:
            getattr(handle, action)()
        for name, grad in reduced(model, dyadic(rank, step, dtype)).items():
            totals[name] += grad.double()
        pending.append(sum(int(handle.residual(name).count_nonzero()) for name in shapes))
    return totals, {name: handle.residual(name) for name in shapes}, pending, handle.traffic


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("action", ["", "flush", "remove"])
@pytest.mark.parametrize(
    ("rule", "values"), [("topk", "fp32"), ("topk", "bf16"), ("threshold", "bf16"), ("threshold", "fp16"), ("topk", "int8")]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_nothing_is_lost_over_a_run(world_size, rule, values, action):
    steps = 8
    chosen = RULES["topk"] if rule == "topk" else gradcomp.Threshold(4.0)
    results = run_ranks(world_size, conserve, chosen, values, torch.float32, action, steps, world_size)
    for name, total in results[0][0].items():
        exact = sum(dyadic(rank, step)[name].double() for rank in range(world_size) for step in range(steps)) / world_size
        left = sum(residuals[name].double() for _, residuals, _, _ in results) / world_size
        if values in ("int8", "sign"):  # what is decoded is no multiple of 1/64, so that sums round
            torch.testing.assert_close(total + left, exact, rtol=0, atol=1e-5)
        else:
            assert torch.equal(total + left, exact), name
    for _, _, pending, traffic in results:
        assert all(pending[:5])
        if action:
            # Announced in step 3, done in step 5, in which every parameter has a gradient: nothing is pending.
            assert pending[5] == 0
        if action == "flush":
            assert pending[6] > 0
        if action == "remove":
            assert pending[5:] == [0] * 3
            assert traffic.sparse_parameters == 0


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("action", ["flush", "remove"])
def test_a_flush_keeps_what_ddp_may_throw_away(action, values):
    """The flush falls on step 4, in which the gradient of c is zero on all ranks: its residual must not go, nor be delivered."""
    results = run_ranks(2, conserve, RULES["topk"], values, torch.float32, action, 8, 2, 2)
    for name, total in results[0][0].items():
        exact = sum(dyadic(rank, step)[name].double() for rank in range(2) for step in range(8)) / 2
        left = sum(residuals[name].double() for _, residuals, _, _ in results) / 2
        assert torch.equal(total + left, exact), name
    for _, _, pending, _ in results:
        assert 0 < pending[4] <= 2500, "of c alone"
        assert pending[4] < pending[3]
        if action == "remove":  # goes on until c had a gradient, in step 5
            assert pending[5:] == [0, 0, 0]
        else:
            assert pending[5] > pending[4], "one flush, and it is over"


@pytest.mark.usefixtures("either_device")
def test_a_flush_of_half_precision_leaves_nothing():
    for _, _, pending, traffic in run_ranks(2, conserve, RULES["topk"], "bf16", torch.bfloat16, "flush", 7, 2):
        assert pending[5] == 0
        assert traffic.bad_steps == 0


def flushed_fp64(rank, action):
    model, handle = given_ddp({"a": torch.zeros(40, 40, dtype=torch.float64), "v": torch.zeros(3)}, gradcomp.TopK(0.05), "bf16")
    getattr(handle, action)()
    total, local = torch.zeros(40, 40, dtype=torch.float64), torch.zeros(40, 40, dtype=torch.float64)
    for step in range(5):
        grad = dyadic(rank, 2 * step + 1)["a"].double()
        total += reduced(model, {"a": grad, "v": torch.ones(3)})["a"]
        local += grad
    return total, local, handle.residual("a").double(), handle.state_dict()["removed"]


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("action", ["flush", "remove"])
def test_fp64_gradients_flush(action):
    results = run_ranks(2, flushed_fp64, action)
    pending = sum(residual for _, _, residual, _ in results) / 2
    assert torch.equal(results[0][0] + pending, sum(local for _, local, _, _ in results) / 2)
    assert [removed for *_, removed in results] == [action == "remove"] * 2
    assert bool(pending.count_nonzero()) == (action == "flush")


def growing_half(rank, dtype):
    model, handle = given_ddp({"a": torch.zeros(100, 100, dtype=dtype), "v": torch.zeros(3)}, gradcomp.Threshold(1e5), "fp32")
    grad = torch.full((100, 100), 40000.0, dtype=dtype)
    total = 0.0
    for step in range(12):
        if step == 8:
            handle.remove()
            grad = torch.full((100, 100), 1.0, dtype=dtype)
        total += reduced(model, {"a": grad, "v": torch.ones(3)})["a"][0, 0].item()
    return total, handle.residual("a")[0, 0].item(), handle.traffic.bad_steps, handle.state_dict()["removed"]


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("world_size", [3, 4])
def test_half_precision_residuals_beyond_the_range_drain(world_size):
    """Through the ring too, where W roundings of a W-th could add up to infinity; and a removal waits for the last of it."""
    for total, residual, bad_steps, removed in run_ranks(world_size, growing_half, torch.float16):
        assert bad_steps == 0
        assert removed
        assert residual == 0
        assert total == pytest.approx(8 * 40000 + 4, rel=0.01)


def unused_for_ever(rank):
    parameters = {"a": torch.zeros(30, 30, dtype=torch.bfloat16), "c": torch.zeros(30, 30, dtype=torch.bfloat16)}
    model, handle = given_ddp(parameters, gradcomp.TopK(0.1), "bf16", ddp={"find_unused_parameters": True})
    handle.remove()
    for _ in range(4):
        reduced(model, {"a": torch.full((30, 30), 1.0 + rank, dtype=torch.bfloat16)})
    return handle.state_dict()["removed"]


@pytest.mark.usefixtures("either_device")
def test_a_removal_does_not_wait_for_a_parameter_that_owes_nothing():
    assert run_ranks(2, unused_for_ever) == [True, True]


def removed_in_a_dense_phase(rank):
    model, handle = given_ddp({"a": torch.zeros(40, 40)}, gradcomp.TopK(0.01), "fp32", warmup_steps=3, warmup_density=1.0)
    if rank == 0:
        handle.remove()
    for step in range(6):
        reduced(model, {"a": dyadic(rank, step)["a"]})
    return handle.state_dict()["removed"]


@pytest.mark.usefixtures("either_device")
@pytest.mark.filterwarnings("ignore:gradcomp. warmup_steps")
def test_an_announcement_waits_for_a_header():
    assert run_ranks(2, removed_in_a_dense_phase) == [True, True]


def loaded_over(rank):
    ours = {"a": torch.zeros(40, 40), "v": torch.zeros(3)}
    model, handle = given_ddp(
        ours, None, "fp32", overrides={"a": gradcomp.TopK(0.25), "v": gradcomp.Dense()}, ddp={"find_unused_parameters": True}
    )
    fresh = handle.state_dict()
    first = reduced(model, {"a": dyadic(rank, 1)["a"], "v": torch.ones(3)})["a"]
    handle.load_state_dict(fresh)
    again = reduced(model, {"a": dyadic(rank, 1)["a"], "v": torch.ones(3)})["a"]
    assert torch.equal(first, again), "a state from before the first step brings that step back"
    saved = handle.state_dict()
    with pytest.raises(gradcomp.DesyncError, match="parameters with a residual"):
        handle.load_state_dict({**saved, "residual": {} if rank == 1 else saved["residual"]})
    # Capacities of another rule do not size this one.
    handle.load_state_dict({**saved, "capacity": {"a": [7, 9]}})
    reduced(model, {"a": dyadic(rank, 3)["a"], "v": torch.ones(3)})
    return handle.densities["a"]


@pytest.mark.usefixtures("either_device")
def test_loading_over_a_running_hook():
    assert run_ranks(2, loaded_over) == [0.25, 0.25]


def straight_or_resumed(rank, rule, resumed):
    model = mixed_ddp()
    handle = register(model, overrides={"*.weight": RULES[rule]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(8):
        if step == 4 and resumed:
            file = io.BytesIO()
            torch.save({"hook": handle.state_dict(), "net": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            assert {"format", "rank", "world_size", "step", "residual"} <= saved["hook"].keys()
            assert saved["hook"]["step"] == 4
            assert saved["hook"]["rank"] == rank
            model = mixed_ddp()
            handle = register(model, overrides={"*.weight": RULES[rule]})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            handle.load_state_dict(saved["hook"])
            model.module.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
        optimizer.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], {name: handle.residual(name) for name, _ in model.module.named_parameters()}


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("rule", sorted(RULES))
def test_6_resume_is_exact(rule):
    straight, resumed = run_ranks(2, straight_or_resumed, rule, False), run_ranks(2, straight_or_resumed, rule, True)
    for (weights, residuals), (others, other_residuals) in zip(straight, resumed):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, others))
        assert all(torch.equal(residuals[name], other_residuals[name]) for name in residuals)
    assert not torch.equal(straight[0][1]["head.weight"], straight[1][1]["head.weight"]), "each rank has its own residual"


def refused(rank):
    model = mixed_ddp()
    handle = register(model)
    loss_of(model, tokens(rank, 0)).backward()
    good = handle.state_dict()
    before = handle.residual("head.weight")
    good["residual"]["head.weight"].add_(1)
    assert torch.equal(handle.residual("head.weight"), before), "a state is a copy"
    wrong = [
        ({**good, "format": 99}, "another version"),
        ({key: good[key] for key in good if key != "capacity"}, "capacity"),
        ({**good, "world_size": 3}, "world_size"),
        ({**good, "rank": 1 - rank}, "'rank'"),
        ({**good, "residual": {"nobody": torch.zeros(1)}}, "nobody"),
        ({**good, "residual": {"head.weight": torch.zeros(3)}}, r"shape \(30, 96\), got \(3,\)"),
        ({**good, "residual": {"head.weight": torch.full((30, 96), float("nan"))}}, "finite"),
    ]
    wrong += [
        (None, "state must be a mapping"),
        ({**good, "residual": None}, "'residual'"),
        ({**good, "residual": {"head.weight": torch.zeros(30, 96).half()}}, "fp32"),
        ({**good, "residual": {"head.weight": [1.0]}}, "fp32"),
        ({**good, "step": "7"}, "'step'"),
        ({**good, "announce": 255}, "'announce'"),
        ({**good, "flush_at": "x"}, "'flush_at'"),
        ({**good, "remove_at": -1}, "'remove_at'"),
        ({**good, "removed": "no"}, "'removed'"),
        ({**good, "capacity": {"head.weight": [1, 10**9]}}, "'capacity'"),
        ({**good, "capacity": {"head.weight": 5}}, "'capacity'"),
    ]
    for state, words in wrong:
        with pytest.raises(ValueError, match=words):
            handle.load_state_dict(state)
        assert torch.equal(handle.residual("head.weight"), before), "nothing is half loaded"
    with pytest.raises(ValueError, match="'nobody'"):
        handle.residual("nobody")
    handle.load_state_dict(good)
    assert torch.equal(handle.residual("head.weight"), before + 1)
    with pytest.raises(gradcomp.DesyncError, match=r"rank 1 disagrees with rank 0 on step: 11 against 1"):
        handle.load_state_dict({**good, "step": 1 + 10 * rank})
    assert handle.state_dict()["step"] == 1, "nothing is loaded when ranks disagree"
    # One rank alone is given a wrong state: both raise, neither waits for the other.
    with pytest.raises((gradcomp.DesyncError, ValueError), match=r"rank 1 disagrees .* refused" if rank == 0 else r"state\['rank'\]"):
        handle.load_state_dict({**good, "rank": 0})
    model.zero_grad()
    loss_of(model, tokens(rank, 1)).backward()
    return handle.traffic.steps == 2


def test_a_state_that_does_not_fit_is_refused_whole():
    assert run_ranks(2, refused) == [True, True]


def strided(rank):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Conv2d(16, 8, 3)).to(memory_format=torch.channels_last)
    model = torch.nn.parallel.DistributedDataParallel(net)
    handle = register(model, overrides={"*": gradcomp.TopK(0.01)}, values="fp32")
    x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(rank))
    local = torch.autograd.grad(net(x).square().sum(), net.parameters())
    model(x).square().sum().backward()
    names = [name for name, _ in net.named_parameters()]
    saved = handle.state_dict()
    handle.load_state_dict(saved)
    return {name: (grad, handle.residual(name), p.grad) for name, grad, p in zip(names, local, net.parameters())}


@pytest.mark.usefixtures("either_device")
def test_residuals_have_the_shape_of_channels_last_parameters():
    for name, (grad, residual, mean) in (ours := run_ranks(2, strided))[0].items():
        sent = grad - residual
        assert 0 < sent.count_nonzero() < grad.numel()
        other = ours[1][name]
        torch.testing.assert_close((sent + other[0] - other[1]) / 2, mean)


def turned(rank):
    """The network changes its memory order after the state was made, before it is wrapped."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
    state = gradcomp.SparseState(net, overrides={"*": gradcomp.TopK(0.1)}, values="fp32")
    net.to(memory_format=torch.channels_last)
    model = torch.nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(state, gradcomp.sparse_hook)
    left = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in net.named_parameters()}
    for step in range(4):
        x = torch.randint(-2, 3, (1, 3, 7, 7), generator=torch.Generator().manual_seed(10 * step + rank)).float()
        for name, grad in zip(left, torch.autograd.grad(net(x).sum(), list(net.parameters()))):
            left[name] += grad.double()
        model.zero_grad()
        model(x).sum().backward()
        for name, p in net.named_parameters():
            left[name] -= p.grad.double()
    residuals = {name: state.residual(name).double() for name in left}
    net.to(memory_format=torch.contiguous_format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns too
        with pytest.raises(gradcomp.GradcompError, match="change dtype and memory format before the model is wrapped"):
            model(x).sum().backward()
    return left, residuals


@pytest.mark.usefixtures("either_device")
def test_residuals_follow_a_change_of_memory_order():
    results = run_ranks(2, turned)
    for name in results[0][0]:
        pending = sum(residuals[name] for _, residuals in results)
        assert pending.count_nonzero() > 0
        torch.testing.assert_close(pending, sum(left[name] for left, _ in results), rtol=1e-4, atol=1e-4)


def half_default(rank):
    torch.set_default_dtype(torch.float16)
    parameters = {"w": torch.zeros(4, dtype=torch.float32), "v": torch.zeros(3)}
    model, handle = given_ddp(parameters, gradcomp.TopK(0.25), "fp32", fallback="never")
    grad = torch.tensor([8.0, 1.0001, 1e-3, 1e-9], dtype=torch.float32)
    sums = sum(reduced(model, {"w": grad, "v": torch.ones(3)})["w"].double() for _ in range(3))
    assert handle.residual("w").dtype == torch.float32
    handle.load_state_dict(handle.state_dict())
    return (sums + handle.residual("w").double() - 3 * grad.double()).abs().max().item()


@pytest.mark.usefixtures("either_device")
def test_the_default_dtype_does_not_leak_into_residuals():
    assert max(run_ranks(2, half_default)) < 1e-6


def cast_after(rank):
    torch.manual_seed(0)
    net = Mixed()
    state = gradcomp.SparseState(net, overrides={"*": gradcomp.Dense()}, values="fp32")
    net.double()
    hooked = torch.nn.parallel.DistributedDataParallel(net)
    hooked.register_comm_hook(state, gradcomp.sparse_hook)
    plain = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    for model in (hooked, plain):
        loss_of(model, tokens(rank, 0)).backward()
    return all(torch.equal(ours.grad, theirs.grad) for ours, theirs in zip(hooked.parameters(), plain.parameters()))


@pytest.mark.usefixtures("either_device")
def test_a_network_cast_after_its_state_was_made_loses_nothing():
    assert run_ranks(2, cast_after) == [True, True]


def hand_count(rank, world_size):
    torch.manual_seed(0)
    model = mixed_ddp(bucket_cap_mb=25)
    handle = register(model, gradcomp.TopK(0.01), values="bf16", check=False)
    for step in range(3):
        model.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
    return handle.traffic


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_counted_bytes_equal_a_hand_count(world_size):
    sizes = {name: p.numel() for name, p in Mixed().named_parameters()}
    sparse = {
        name: max(1, int(0.01 * n + 0.5))
        for name, n in sizes.items()
        if name in ("embed.weight", "conv.weight", "hidden.weight", "head.weight")
    }
    universe, kept = sum(sizes[name] for name in sparse), sum(sparse.values())
    riding = sum(sizes.values()) - universe
    payload = 8 + 3 * 2 + 8 * 4 + codec.index_bytes(universe, kept) + 2 * (kept + riding)
    for traffic in run_ranks(world_size, hand_count, world_size):
        assert traffic.steps == 3
        assert traffic.payload_bytes == 3 * payload
        assert traffic.dense_bytes == 3 * (2 * (world_size - 1) * 4 * sum(sizes.values()) // world_size)
        assert traffic.sent_bytes == traffic.received_bytes == (world_size - 1) * (3 * payload + 2 * 16)  # two layouts, two digests
        assert traffic.ratio == (1.0 if world_size == 1 else traffic.dense_bytes / traffic.sent_bytes)
        assert traffic.elements == 3 * sum(sizes.values())
        assert min(traffic.select_s, traffic.encode_s, traffic.decode_s, traffic.exchange_s) > 0
        assert traffic.density == (kept + riding) / sum(sizes.values())
        assert ("one rank: nothing has to be sent" in str(traffic)) == (world_size == 1)
        with pytest.raises(AttributeError):
            traffic.steps = 4
