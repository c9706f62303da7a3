"""momentum=: DGC's momentum correction with momentum factor masking, taken in the hook instead of in the optimizer."""

import copy
import pickle
import warnings

import pytest
import torch
from nets import Mixed, given_ddp, loss_of, mixed_ddp, reduced, register, tokens
from ranks import run_ranks
from reference import Ranks, threshold_indices, top_k_indices
from torch.nn.parallel import DistributedDataParallel

import gradcomp

TAU = 0.01


def train(rank, rule, values, steps):
    """Train while recording local gradients, reduced gradients, residuals and velocities of every step."""
    torch.manual_seed(0)
    probe, model = Mixed(), mixed_ddp()
    handle = register(model, overrides={"*": rule}, values=values, fallback="never", momentum=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in probe.named_parameters()]
    history = []
    for step in range(steps):
        probe.load_state_dict(model.module.state_dict())
        probe.zero_grad()
        loss_of(probe, tokens(rank, step)).backward()
        optimizer.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        local = {name: p.grad.clone() for name, p in probe.named_parameters()}
        mean = {name: p.grad.clone() for name, p in model.module.named_parameters()}
        history.append((local, mean, {name: handle.residual(name) for name in names}, {name: handle.velocity(name) for name in names}))
    return history


@pytest.mark.parametrize(
    ("rule", "values", "world_size"),
    [("topk", "fp32", 2), ("topk", "sign", 4), ("topk", "bf16", 1), ("threshold", "bf16", 2), ("threshold", "int8", 4)],
)
def test_against_the_oracle_bit_for_bit(rule, values, world_size):
    chosen = gradcomp.TopK(0.05) if rule == "topk" else gradcomp.Threshold(TAU)
    histories = run_ranks(world_size, train, chosen, values, 5)
    shapes = {name: grad.shape for name, grad in histories[0][0][0].items()}

    def choose(name, acc):
        return top_k_indices(acc, gradcomp.TopK(0.05).count(acc.numel())) if rule == "topk" else threshold_indices(acc, TAU)

    oracle = Ranks(shapes, choose, values, world_size, sized=rule == "threshold", momentum=0.5)
    for step in range(5):
        expected = oracle.step([history[step][0] for history in histories])
        for rank, history in enumerate(histories):
            _, mean, residuals, velocities = history[step]
            for name in shapes:
                assert torch.equal(mean[name], expected[name]), (step, rank, name)
                assert torch.equal(residuals[name], oracle.residual[rank][name]), (step, rank, name)
                assert torch.equal(velocities[name], oracle.velocity[rank][name]), (step, rank, name)


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


def test_by_hand():
    means, residual, velocity = run_ranks(2, one_coordinate, 0.5)[0]
    # First element: u = 4 goes, and u stops (factor masking). Then u = 1, 1.5 and the residual is 1, 2.5: above the threshold.
    assert means == [[4.0, 0.0], [0.0, 0.0], [2.5, 0.0]]
    # Second element: u = .25, .375, .4375, and the residual is their sum.
    assert (residual, velocity) == ([0.0, 1.0625], [0.0, 0.4375])


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


def test_a_bad_step_changes_no_velocity():
    for before, third, after, _ in run_ranks(2, disturbed, "nan"):
        assert all(bool(grad.isnan().all()) for grad in third.values())
        for name in before:
            assert all(torch.equal(old, new) for old, new in zip(before[name], after[name])), name
        assert bool(before["a"][1].any())


def test_what_no_rank_uses_rests():
    for before, third, after, _ in run_ranks(2, disturbed, "unused"):
        for name in ("b", "c"):
            assert all(torch.equal(old, new) for old, new in zip(before[name], after[name])), name
            assert not third[name].any()
        assert bool(before["b"][1].any())
        assert bool(before["c"][0].any())
        assert not torch.equal(before["a"][1], after["a"][1])


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
    with pytest.raises(ValueError, match=r"momentum must be 0 where gradients are in half precision, as .* torch\.bfloat16"):
        register(DistributedDataParallel(Mixed().bfloat16()), momentum=0.9)
    lookup = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(3, 2))
    model = DistributedDataParallel(lookup)
    register(model, momentum=0.9)
    with pytest.raises(gradcomp.GradcompError, match=r"momentum must be 0 where gradients are sparse tensors, as .* 0\.weight is"):
        model(torch.tensor([[1, 2]])).sum().backward()
    return True


def test_what_momentum_is_not_for():
    assert run_ranks(1, refused) == [True]
