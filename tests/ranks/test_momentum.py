"""momentum=: DGC's momentum correction with momentum factor masking, taken in the hook instead of in the optimizer."""

import copy
import pickle
import warnings

import pytest
import torch
from nets import Given, Mixed, given_ddp, loss_of, mixed_ddp, recorded, reduced, register, tokens
from ranks import run_ranks
from reference import Ranks, threshold_indices, top_k_indices
from torch.nn.parallel import DistributedDataParallel

import gradcomp

TAU = 0.01


def train(rank, rule, values, steps):
    return recorded(rank, steps, rule, values, optimizers=0.0, momentum=0.5)[2]


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize(
    ("rule", "values", "world_size"),
    [("topk", "fp32", 2), ("topk", "sign", 4), ("topk", "bf16", 1), ("threshold", "bf16", 2), ("threshold", "int8", 4)],
)
def test_against_the_oracle_bit_for_bit(rule, values, world_size):
    chosen = gradcomp.TopK(0.05) if rule == "topk" else gradcomp.Threshold(TAU)
    histories = run_ranks(world_size, train, chosen, values, 5)
    shapes = {name: grad.shape for name, grad in histories[0][0]["local"].items()}

    def choose(name, acc):
        return top_k_indices(acc, gradcomp.TopK(0.05).count(acc.numel())) if rule == "topk" else threshold_indices(acc, TAU)

    oracle = Ranks(shapes, choose, values, world_size, sized=rule == "threshold", momentum=0.5)
    for step in range(5):
        expected = oracle.step([history[step]["local"] for history in histories])
        for rank, history in enumerate(histories):
            for name in shapes:
                assert torch.equal(history[step]["reduced"][name], expected[name]), (step, rank, name)
                assert torch.equal(history[step]["residual"][name], oracle.residual[rank][name]), (step, rank, name)
                assert torch.equal(history[step]["velocity"][name], oracle.velocity[rank][name]), (step, rank, name)


def beside_sgd(rank, rule, options, action):
    plain, hooked = mixed_ddp(**options), mixed_ddp(**options)
    handle = register(hooked, overrides={"*": rule}, values="fp32", momentum=0.9)
    pairs = [(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)), (hooked, torch.optim.SGD(hooked.parameters(), lr=0.1))]
    for step in range(12):
        if action and step == 2:
            getattr(handle, action)()
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(model, tokens(rank, step)).backward()
            optimizer.step()
    return [[p.detach() for p in model.parameters()] for model, _ in pairs]


@pytest.mark.parametrize("action", ["", "flush", "remove"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 25, "find_unused_parameters": True}])
@pytest.mark.parametrize(("rule", "world_size"), [(gradcomp.Dense(), 3), (gradcomp.TopK(density=1.0), 2)])
def test_all_of_it_sent_is_the_optimizers_own_momentum(rule, world_size, options, action):
    results = run_ranks(world_size, beside_sgd, rule, options, action)
    for plain, hooked in results:
        torch.testing.assert_close(hooked, plain, rtol=1e-4, atol=1e-6)
        assert all(torch.equal(ours, first) for ours, first in zip(hooked, results[0][1])), "replicas differ"


def one_coordinate(rank, momentum):
    """Parameter ``a``: its first element goes in the first step, its second never."""
    model, handle = given_ddp({"a": torch.zeros(2), "b": torch.zeros(3)}, gradcomp.Threshold(2.0), momentum=momentum)
    means = [reduced(model, {"a": torch.tensor([g, 0.25]), "b": torch.ones(3)})["a"].tolist() for g in (4.0, 1.0, 1.0)]
    return means, handle.residual("a").tolist(), handle.velocity("a").tolist()


@pytest.mark.usefixtures("either_device")
def test_by_hand():
    means, residual, velocity = run_ranks(2, one_coordinate, 0.5)[0]
    # First element: u = 4 goes, and u stops (factor masking). Then u = 1, 1.5 and the residual is 1, 2.5: above the threshold.
    assert means == [[4.0, 0.0], [0.0, 0.0], [2.5, 0.0]]
    # Second element: u = .25, .375, .4375, and the residual is their sum.
    assert (residual, velocity) == ([0.0, 1.0625], [0.0, 0.4375])


def small_and_dense(rank):
    model, handle = given_ddp({"a": torch.zeros(100)}, gradcomp.Dense(), momentum=0.5, check=False)
    for _ in range(3):
        reduced(model, {"a": torch.ones(100)})
    return handle.traffic.payload_bytes


def test_what_has_a_header_anyway_rides_beside_it():
    assert all(payload > 3 * 400 for payload in run_ranks(2, small_and_dense)), "a second collective for 100 elements"


def test_without_momentum_there_are_no_velocities():
    means, residual, velocity = run_ranks(2, one_coordinate, 0.0)[0]
    assert means == [[4.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert (residual, velocity) == ([2.0, 0.75], [0.0, 0.0])


def disturbed(rank, trouble):
    """Two good steps, then one with trouble, then what is held before and after it, and the third gradients."""
    shapes = {"a": torch.zeros(40, 40), "b": torch.zeros(7), "c": torch.zeros(50, 50)}
    generator = torch.Generator().manual_seed(rank)
    model, handle = given_ddp(
        shapes,
        None,
        overrides={"b": gradcomp.Dense(), "*": gradcomp.TopK(0.1)},
        fallback="never",
        momentum=0.5,
        ddp={"bucket_cap_mb": 0.005},
    )
    draws = [{name: torch.randn(like.shape, generator=generator) for name, like in shapes.items()} for _ in range(3)]
    for grads in draws[:2]:
        reduced(model, grads)
    before = {name: (handle.residual(name), handle.velocity(name)) for name in shapes}
    if trouble == "nan" and rank == 1:
        draws[2]["b"][3] = float("nan")
    if trouble == "unused":
        draws[2]["b"].zero_()
        draws[2]["c"].zero_()
    if trouble == "unused on one" and rank == 1:
        draws[2]["c"].zero_()
    third = reduced(model, draws[2])
    return before, third, {name: (handle.residual(name), handle.velocity(name)) for name in shapes}, draws[2]


@pytest.mark.usefixtures("either_device")
def test_a_bad_step_changes_no_velocity():
    for before, third, after, _ in run_ranks(2, disturbed, "nan"):
        assert all(bool(grad.isnan().all()) for grad in third.values())
        for name in before:
            assert all(torch.equal(old, new) for old, new in zip(before[name], after[name])), name
        assert bool(before["a"][1].any())


@pytest.mark.usefixtures("either_device")
def test_what_no_rank_uses_rests():
    for before, third, after, _ in run_ranks(2, disturbed, "unused"):
        for name in ("b", "c"):
            assert all(torch.equal(old, new) for old, new in zip(before[name], after[name])), name
            assert not third[name].any()
        assert bool(before["b"][1].any())
        assert bool(before["c"][0].any())
        assert not torch.equal(before["a"][1], after["a"][1])


@pytest.mark.usefixtures("either_device")
def test_what_one_rank_does_not_use_goes_on_there():
    before, _, after, _ = run_ranks(2, disturbed, "unused on one")[1]
    kept = after["c"][1] != 0  # all but what was sent
    assert 0.8 < float(kept.float().mean()) < 1
    assert torch.equal(after["c"][1][kept], 0.5 * before["c"][1][kept])


def scaled_run(rank, scales):
    shapes = {"a": torch.zeros(40, 40), "b": torch.zeros(7)}
    scaler = torch.amp.GradScaler("cpu", init_scale=float(scales[0]))
    options = {} if set(scales) == {1} else {"grad_scaler": scaler}
    overrides = {"b": gradcomp.Dense(), "*": gradcomp.TopK(0.1)}
    model, handle = given_ddp(shapes, None, overrides=overrides, fallback="never", momentum=0.5, values="bf16", **options)
    generator = torch.Generator().manual_seed(rank)
    means = []
    for scale in scales:
        grads = {name: torch.randn(like.shape, generator=generator) for name, like in shapes.items()}
        if options:
            scaler.scale(torch.ones(()))  # begins with init_scale
            scaler.update(float(scale))
        found = reduced(model, {name: grad * scale for name, grad in grads.items()})
        means.append({name: grad / scale for name, grad in found.items()})
    return means, {name: (handle.residual(name), handle.velocity(name)) for name in shapes}


@pytest.mark.usefixtures("either_device")
def test_velocities_are_in_unscaled_units():
    for (means, held), (scaled_means, scaled_held) in zip(run_ranks(2, scaled_run, [1] * 4), run_ranks(2, scaled_run, [4, 4, 2, 8])):
        for mean, scaled_mean in zip(means, scaled_means):
            assert all(torch.equal(mean[name], scaled_mean[name]) for name in mean)
        assert all(torch.equal(a, b) for name in held for a, b in zip(held[name], scaled_held[name]))


def go_on(model, steps, rank):
    return [
        {name: grad.clone() for name, grad in reduced_by(model, tokens(rank, step)).items()} for step in steps
    ]  # the weights stay: what differs comes from the hook


def reduced_by(model, batch):
    model.zero_grad()
    loss_of(model, batch).backward()
    return {name: p.grad for name, p in model.module.named_parameters()}


def resumed(rank, folder, how):
    options = {"values": "bf16", "momentum": 0.9, "fallback": "never"}
    straight = mixed_ddp()
    handle = register(straight, gradcomp.TopK(0.05), **options)
    go_on(straight, range(3), rank)
    again = mixed_ddp()
    if how == "pickle":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = pickle.loads(pickle.dumps(copy.deepcopy(handle)))
        state.attach(again.module)
        again.register_comm_hook(state, gradcomp.sparse_hook)
    else:
        new = register(again, gradcomp.TopK(0.05), **options)
        if how == "folder":
            gradcomp.save(handle, folder)
            gradcomp.load(new, folder)
        else:
            new.load_state_dict(handle.state_dict())
    expected, found = go_on(straight, range(3, 6), rank), go_on(again, range(3, 6), rank)
    return all(torch.equal(a[name], b[name]) for a, b in zip(expected, found) for name in a)


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("how", ["state_dict", "folder", "pickle"])
def test_resume_is_exact(tmp_path, how):
    assert run_ranks(2, resumed, tmp_path / "state", how) == [True, True]


def saved(rank, folder):
    model = mixed_ddp()
    handle = register(model, gradcomp.TopK(0.05), momentum=0.9, fallback="never")
    go_on(model, range(3), rank)
    gradcomp.save(handle, folder)
    return {name: handle.velocity(name) for name, _ in model.module.named_parameters()}


def loaded(rank, folder):
    model = mixed_ddp()
    handle = register(model, gradcomp.TopK(0.05), momentum=0.9, fallback="never")
    gradcomp.load(handle, folder)
    return {name: handle.velocity(name) for name, _ in model.module.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 4])
def test_another_world_size_keeps_the_mean_velocity(tmp_path, world_size):
    before, after = run_ranks(2, saved, tmp_path / "state"), run_ranks(world_size, loaded, tmp_path / "state")
    for name in before[0]:
        means = [sum(held[name].double() for held in ranks) / len(ranks) for ranks in (before, after)]
        assert torch.equal(means[0].float(), means[1].float()), name
        assert bool(means[0].any()), name


def without_momentum(rank, state):
    handle = register(mixed_ddp(), gradcomp.TopK(0.05))
    with pytest.raises(ValueError, match="momentum 0: register with the momentum"):
        handle.load_state_dict(state)
    return True


def state_of(rank):
    model = mixed_ddp()
    handle = register(model, gradcomp.TopK(0.05), momentum=0.9)
    go_on(model, range(2), rank)
    return handle.state_dict()


def test_a_velocity_is_not_dropped_without_a_word():
    [state] = run_ranks(1, state_of)
    assert run_ranks(1, without_momentum, state) == [True]


def disagree(rank):
    model = mixed_ddp()
    register(model, gradcomp.TopK(0.05), momentum=0.9 if rank else 0.5)
    with pytest.raises(gradcomp.DesyncError, match=r"momentum.*0\.[59].*0\.[59]"):
        loss_of(model, tokens(rank, 0)).backward()
    return True


def test_ranks_with_different_momentum():
    assert run_ranks(2, disagree) == [True, True]


def refused(rank):
    for momentum in (1.0, -0.1, float("nan"), "0.9"):
        with pytest.raises(ValueError, match="momentum"):
            gradcomp.SparseState(Mixed(), momentum=momentum)
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(ValueError, match=rf"momentum must be 0 where gradients are not fp32, and that of parameter .* is {dtype}"):
            register(DistributedDataParallel(Mixed().to(dtype)), momentum=0.9)
    lookup = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(3, 2))
    model = DistributedDataParallel(lookup)
    register(model, momentum=0.9)
    with pytest.raises(ValueError, match=r"momentum must be 0 where gradients are sparse tensors, and that of parameter 0\.weight is"):
        model(torch.tensor([[1, 2]])).sum().backward()
    half = Given(a=torch.zeros(40, 40, dtype=torch.bfloat16), b=torch.zeros(3))
    half.a.requires_grad_(False)
    state = gradcomp.SparseState(half, momentum=0.9)
    state.state_dict()  # resolves the group
    half.a.requires_grad_(True)  # ... and only then
    model = DistributedDataParallel(half)
    model.register_comm_hook(state, gradcomp.sparse_hook)
    with pytest.raises(ValueError, match="not fp32, and that of parameter a"):
        model({"a": torch.ones(40, 40), "b": torch.ones(3)}).backward()
    return True


def test_what_momentum_is_not_for():
    assert run_ranks(1, refused) == [True]


def draw(rank, step, shapes):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randint(-64, 65, shape, generator=generator) / 64.0 for name, shape in shapes.items()}


SHAPES = {"a": (40, 40), "b": (200, 100), "c": (7,)}


def conserving(rank, action, options, quiet):
    """Totals of what was given (with its momentum), of what was applied, what is left, and when the hook was removed."""
    overrides = {"b": gradcomp.Dense(), "c": gradcomp.Dense(), "*": gradcomp.TopK(0.1)}
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    model, handle = given_ddp(zeros, None, overrides=overrides, fallback="never", momentum=0.5, ddp=options)
    given, applied = ({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in range(2))
    left, removed_at = [], None
    for step in range(10):
        if action and step == 3 and rank == 0:
            getattr(handle, action)()
        if action == "remove" and step == 7:
            handle.flush()  # of what is removed by then: nothing comes of it
        grads = draw(rank, step, SHAPES)
        if quiet is not None and step >= quiet[1] and rank in quiet[0]:
            grads["a"].zero_()
            if step == 4:
                grads["b"].zero_()
        before = {name: handle.velocity(name) for name in SHAPES}
        silent = {name for name in SHAPES if quiet is not None and quiet[0] == (0, 1) and not grads[name].any()}
        for name, mean in reduced(model, grads).items():
            applied[name] += mean.double()
            if name not in silent:
                given[name] += (grads[name] + 0.5 * before[name]).double()
        left.append({name: handle.residual(name) for name in SHAPES})
        if handle.state_dict()["removed"] and removed_at is None:
            removed_at = step
    assert removed_at is None or handle.state_dict()["flush_at"] == []
    return given, applied, left, removed_at


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("quiet", [None, ((1,), 2), ((0, 1), 0), ((0, 1), 2)])  # the ranks that have no gradient of "a", and from when on
@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0.02}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("action", ["", "flush", "remove"])
def test_nothing_is_lost_and_removal_ends(action, options, quiet):
    results = run_ranks(2, conserving, action, options, quiet)
    for name in SHAPES:
        given = sum(given[name] for given, _, _, _ in results) / 2
        left = sum(left[-1][name].double() for _, _, left, _ in results) / 2
        torch.testing.assert_close(results[0][1][name] + left, given, rtol=1e-6, atol=1e-6)
    for _, applied, left, removed_at in results:
        assert all(torch.equal(applied[name], results[0][1][name]) for name in SHAPES), "replicas differ"
        assert bool(left[2]["a"].any()) == (quiet != ((0, 1), 0)), "there is something to flush"
        stays = quiet == ((0, 1), 2)  # DDP may throw away what nobody has a gradient of
        if action:
            assert bool(left[5]["a"].any()) == stays, "flushed two steps later"
        if not action or stays:
            assert bool(left[-1]["a"].any()) == (quiet != ((0, 1), 0))
        if action == "remove":
            assert not left[-1]["a"].any() or stays
        assert (removed_at is not None) == (action == "remove" and not stays)


def disturbed_modes(rank, options, complex_too):
    """Sparse rules in DDP's other modes, checked in every step: complex parameters, accumulation, an error that is raised."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40, bias=False))
    if complex_too:
        net.register_parameter("wave", torch.nn.Parameter(torch.ones(30, 30, dtype=torch.complex64)))
        net.register_forward_hook(lambda module, _, out: out + (module.wave.abs() ** 2).mean())
    model = DistributedDataParallel(net, bucket_cap_mb=0.004, **options)
    handle = register(model, gradcomp.TopK(0.1), momentum=0.9, fallback="never", on_nonfinite="raise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    raised = 0
    for step in range(8):
        optimizer.zero_grad()
        data = torch.randn(5, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 5:
            before = {name: handle.velocity(name) for name, _ in net.named_parameters()}
            with pytest.raises(RuntimeError, match="NonFiniteError"):
                model(data * (float("inf") if rank else 1.0)).pow(2).sum().backward()
            assert all(torch.equal(old, handle.velocity(name)) for name, old in before.items())
            raised += 1
            continue
        if step % 3 == 1:
            with model.no_sync():
                model(data.flip(0)).pow(2).sum().backward()
        model(data).pow(2).sum().backward()
        optimizer.step()
    state = handle.state_dict()
    handle.load_state_dict(state)  # of a hook that has run: on all ranks together
    model(data).sum().backward()
    return [p.detach() for p in net.parameters()], raised, len(state["velocity"])


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_in_ddps_other_modes(options):
    complex_too = not options
    (first, *others), (second, *_) = run_ranks(2, disturbed_modes, options, complex_too)
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(first, second)), "replicas differ"
    assert others == [1, 4 if complex_too else 3]


def frozen(rank):
    model, handle = given_ddp(
        {"a": torch.zeros(40, 40), "b": torch.zeros(40, 40)}, gradcomp.TopK(0.1), momentum=0.9, fallback="never",
        ddp={"gradient_as_bucket_view": True, "find_unused_parameters": True},
    )  # fmt: skip
    for step in range(20):
        grads = draw(rank, step, {"a": (40, 40), "b": (40, 40)})
        if step == 3:
            model.module.b.requires_grad_(False)  # and what lies in its bucket stays there
            held = handle.velocity("b")
        model.module.a.grad = None
        model(grads).backward()
    assert torch.equal(handle.velocity("b"), held)
    return float(model.module.b.grad.abs().max()), bool(model.module.a.grad.isfinite().all())


@pytest.mark.usefixtures("either_device")
def test_what_is_frozen_gets_no_momentum():
    for largest, finite in run_ranks(2, frozen):
        assert largest < 100
        assert finite


def old_state(rank, state):
    handle = register(mixed_ddp(), gradcomp.TopK(0.05))
    del state["velocity"]
    handle.load_state_dict(state)
    return handle.state_dict()["step"]


def test_a_state_from_before_there_was_momentum():
    [state] = run_ranks(1, state_of)
    state["velocity"] = {}
    assert run_ranks(1, old_state, state) == [2]


def wrong_momentum(rank):
    """A hook that takes more momentum than it should."""
    model = mixed_ddp()
    handle = register(model, gradcomp.TopK(0.05), momentum=0.5)
    own = handle._feedback.accumulate

    def more(name, grad, unscale=1.0, **options):
        acc = own(name, grad, unscale, **options)
        velocity = handle._feedback.velocity(name)
        return acc if velocity is None else own(name, grad.add_(0.1 * velocity), unscale, moving=False)

    handle._feedback.accumulate = more
    go_on(model, range(1), rank)
    with pytest.raises(RuntimeError, match=r"the momentum of .* is wrong"):
        go_on(model, range(1, 3), rank)
    return True


def test_check_sees_wrong_momentum():
    assert run_ranks(1, wrong_momentum) == [True]
