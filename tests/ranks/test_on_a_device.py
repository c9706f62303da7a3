"""What is different where gradients are on a device: the host learns two steps later. On the CPU, over the path of CUDA tensors."""

import gc
import pickle
import warnings
import weakref

import pytest
import torch
from nets import given_ddp, loss_of, mixed_ddp, recorded, reduced, register, tokens
from ranks import run_ranks

import gradcomp


def train(rank, rule, values, options):
    model, handle, history = recorded(rank, 6, rule, values, optimizers=0.0, **options)
    traffic = handle.traffic
    bytes_of = (traffic.steps, traffic.dense_bytes, traffic.payload_bytes, traffic.sent_bytes, traffic.received_bytes, traffic.density)
    return history, handle.state_dict(), handle.densities, bytes_of, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"warmup_steps": 4}])
@pytest.mark.parametrize(
    ("rule", "values", "world_size"),
    [
        (gradcomp.TopK(0.05), "bf16", 2),
        (gradcomp.TopK(0.02), "int8", 4),
        (gradcomp.Threshold(0.01), "fp16", 3),
        (gradcomp.Threshold(0.002), "fp32", 1),
        (gradcomp.Dense(), "sign", 2),
    ],
)
def test_a_run_is_the_same_on_both_paths(rule, values, world_size, options):
    if "warmup_steps" in options and not isinstance(rule, gradcomp.TopK):
        options = {"warmup_steps": 0}
    host = run_ranks(world_size, train, rule, values, {"check": False, **options})
    device = run_ranks(world_size, train, rule, values, options, on_device=True)
    for (history, state, *counted, weights), (other, other_state, *also_counted, other_weights) in zip(host, device):
        assert counted == also_counted
        for key in ("step", "capacity", "announce", "flush_at", "remove_at", "removed"):
            assert state[key] == other_state[key], key
        for kind in ("residual", "velocity"):
            assert state[kind].keys() == other_state[kind].keys()
            assert all(torch.equal(state[kind][name], other_state[kind][name]) for name in state[kind])
        for before, after in zip(history, other):
            assert all(torch.equal(before["reduced"][name], after["reduced"][name]) for name in before["reduced"])
        assert all(map(torch.equal, weights, other_weights))


def signs(rank):
    """Sums of magnitudes are in another order: exact here, where they are small integers."""
    model, handle = given_ddp({"a": torch.zeros(40, 40), "b": torch.zeros(30, 50)}, gradcomp.TopK(0.03), "sign")
    seen = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        grads = {name: torch.randint(-512, 512, p.shape, generator=generator).float() for name, p in model.module.named_parameters()}
        seen.append(reduced(model, grads))
    return seen, handle.residual("a"), handle.residual("b")


def test_sign_values_are_the_same_on_both_paths():
    for (seen, *residuals), (other, *others) in zip(run_ranks(2, signs), run_ranks(2, signs, on_device=True)):
        assert all(map(torch.equal, residuals, others))
        assert all(torch.equal(grads[name], also[name]) for grads, also in zip(seen, other) for name in grads)


def raising(rank, name, early):
    parameters = {"a": torch.zeros(40, 40), "b": torch.zeros(7), "d": torch.zeros(9000)}
    overrides = {"b": gradcomp.Dense(), "d": gradcomp.Dense(), "*": gradcomp.TopK(0.05)}
    ddp = {"bucket_cap_mb": 0.005}
    model, handle = given_ddp(parameters, None, "bf16", overrides=overrides, ddp=ddp, on_nonfinite="raise", fallback="never")
    for step in range(5):
        grads = {key: torch.full(like.shape, 1.0 + rank) for key, like in parameters.items()}
        if step == 1 and rank == 1:
            grads[name].view(-1)[3] = float("nan")
        if step == 3:
            with pytest.raises(gradcomp.NonFiniteError, match=rf"step 1: .*{name}"):
                reduced(model, grads)
            return type(handle.last_error).__name__, handle.traffic.steps, handle.traffic.bad_steps
        found = reduced(model, grads)
        assert all(bool(grad.isnan().all()) == (step == 1) for grad in found.values())
        if early and rank == 0:
            assert handle.traffic.bad_steps == int(step >= 1)
    return None


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", ["a", "b", "d"])
def test_an_error_comes_two_steps_later_on_every_rank(name, early):
    assert run_ranks(2, raising, name, early, on_device=True) == [("NonFiniteError", 3, 1)] * 2


def flushing(rank, action):
    """Which steps flush, where the first that should is a bad one: by what is left of a residual afterwards."""
    model, handle = given_ddp({"a": torch.zeros(40, 40), "b": torch.zeros(7)}, gradcomp.TopK(0.05), "bf16", fallback="never")
    left = []
    for step in range(9):
        if step == 1 and rank == 1:
            getattr(handle, action)()
        grads = {"a": torch.randn(40, 40, generator=torch.Generator().manual_seed(10 * step + rank)), "b": torch.ones(7)}
        if step == 3 and rank == 0:
            grads["b"][0] = float("inf")
        reduced(model, grads)
        left.append(bool(handle.residual("a").any()))
        if rank == 0:
            handle.traffic  # noqa: B018  # one rank learns early: nothing may come of it
    return left


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("action", ["flush", "remove"])
def test_what_failed_is_tried_again_on_all_ranks_alike(action, on_device):
    # Asked for in step 1, so due in step 3, which is bad: again at once, or as soon as all ranks know of it.
    again = 5 if on_device and action == "flush" else 4
    for left in run_ranks(2, flushing, action, on_device=on_device):
        assert left.index(False) == again
        assert all(left[again + 1 :]) if action == "flush" else not any(left[again:])


def rebuilt(rank):
    """The ranks agree on a layout, when DDP has rebuilt its buckets, while one of them knows already that a flush was asked for."""
    model = mixed_ddp()
    handle = register(model, gradcomp.Threshold(0.01), fallback="never")
    handle.flush()
    for step in range(5):
        model.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
        if rank == 1:
            handle.traffic  # noqa: B018
    return handle.traffic.steps, sorted(handle.state_dict()["capacity"].items())


def test_ranks_that_know_more_agree_with_those_that_know_less():
    first, second = run_ranks(2, rebuilt, on_device=True)
    assert first == second
    assert first[0] == 5


def saved(rank, steps):
    handle = recorded(rank, steps, gradcomp.Threshold(0.01), "bf16", optimizers=0.0)[1]
    return handle.state_dict()


def resumed(rank, states, more):
    model = mixed_ddp()
    handle = register(model, overrides={"*": gradcomp.Threshold(0.01)}, values="bf16", fallback="never")
    handle.load_state_dict(states[rank])
    for step in range(more):
        model.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
    return {name: p.grad for name, p in model.module.named_parameters()}, handle.state_dict()


def test_a_state_goes_from_one_path_to_the_other():
    states = run_ranks(2, saved, 3)
    ends = [run_ranks(2, resumed, states, 4, on_device=on_device) for on_device in (False, True)]
    for (grads, state), (others, other) in zip(*ends):
        assert all(torch.equal(grads[name], others[name]) for name in grads)
        assert all(torch.equal(state["residual"][name], other["residual"][name]) for name in state["residual"])
        assert state["capacity"] == other["capacity"]


def loading(rank, at, back, reads):
    """Load a state over a hook that has run: an older one, or one that is ahead."""
    ahead = recorded(rank, 9, gradcomp.Threshold(0.01), "bf16", optimizers=0.0)[1].state_dict()
    model = mixed_ddp()
    handle = register(model, overrides={"*": gradcomp.Threshold(0.01)}, values="bf16", fallback="never", check=False)
    kept, left = None, []
    for step in range(16):
        if step == 3 and back:
            kept = handle.state_dict()
        if step == at:
            handle.load_state_dict(kept if back else ahead)
        if step == at + 1 and rank == 1:
            handle.flush()
        model.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
        left.append({name: handle.residual(name) for name, _ in model.module.named_parameters()})
        if reads and rank == 0:
            handle.traffic  # noqa: B018
    return left, handle.state_dict()["capacity"], handle.traffic.steps


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_a_state_loaded_over_a_running_hook_is_all_that_is_known(back, reads):
    ends = [run_ranks(2, loading, 8, back, reads, on_device=on_device) for on_device in (False, True)]
    for (left, *counted), (others, *also_counted) in zip(*ends):
        assert counted == also_counted
        for residuals, other in zip(left, others):
            assert all(torch.equal(residuals[name], other[name]) for name in residuals)
        assert not any(bool(residual.any()) for residual in left[11].values()), "the flush asked for after the load"


def copied(rank, reads):
    """Pickle a hook that has announced a flush, and go on with the copy."""
    model = mixed_ddp()
    handle = register(model, overrides={"*": gradcomp.Threshold(0.01)}, values="bf16", fallback="never", check=False)
    for step in range(4):
        if step == 3 and rank == 1:
            handle.flush()
        model.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
    if reads and rank == 0:
        handle.traffic  # noqa: B018
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = pickle.loads(pickle.dumps(handle))
    again = mixed_ddp()
    state.attach(again.module)
    again.register_comm_hook(state, gradcomp.sparse_hook)
    left = []
    for step in range(4, 8):
        again.zero_grad()
        loss_of(again, tokens(rank, step)).backward()
        left.append({name: state.residual(name) for name, _ in again.module.named_parameters()})
    return left


@pytest.mark.parametrize("reads", [False, True])
def test_a_copy_knows_what_was_announced(reads):
    for left, others in zip(run_ranks(2, copied, reads), run_ranks(2, copied, reads, on_device=True)):
        for residuals, other in zip(left, others):
            assert all(torch.equal(residuals[name], other[name]) for name in residuals)
        assert [any(bool(residual.any()) for residual in residuals.values()) for residuals in left] == [True, False, True, True]


def removing(rank):
    """Half-precision gradients near the end of the range, in the flush after the one that found everything sent."""
    model, handle = given_ddp({"w": torch.zeros(64, 32, dtype=torch.float16)}, gradcomp.TopK(0.1), "bf16", check=False)
    given = [torch.full((64, 32), 65000.0 if step == 3 else 100.0, dtype=torch.float16) for step in range(6)]
    handle.remove()
    means = [reduced(model, {"w": grads})["w"].double() for grads in given]
    return sum(means), handle.residual("w").double(), handle.state_dict()["removed"], sum(grads.double() for grads in given)


def test_a_removal_leaves_nothing_of_large_half_precision_gradients():
    for total, residual, removed, expected in run_ranks(2, removing, on_device=True):
        assert removed
        assert not bool(residual.any())
        assert torch.equal(total, expected)


def failing_last(rank):
    parameters = {"a": torch.zeros(40, 40), "b": torch.zeros(7)}
    model, handle = given_ddp(parameters, gradcomp.TopK(0.05), "bf16", on_nonfinite="raise")
    reduced(model, {"a": torch.full((40, 40), float("nan") if rank else 1.0), "b": torch.ones(7)})
    assert handle.last_error is None
    assert handle.traffic.bad_steps == 1
    return str(handle.last_error)


def test_an_error_of_the_last_step_is_there_to_be_asked_for():
    texts = run_ranks(2, failing_last, on_device=True)
    assert texts == ["step 0: rank 1: the gradient of a (with its residual) is not finite"] * 2


def scaled_by_nothing(rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    model = given_ddp({"w": torch.zeros(40, 40)}, gradcomp.TopK(0.1), grad_scaler=scaler)[0]
    scaler.scale(torch.ones(()))
    for step in range(4):
        if step == 1:
            scaler.update(0.0)
        if step == 3:
            with pytest.raises(gradcomp.GradcompError, match="step 1: the scale of grad_scaler must be above 0"):
                reduced(model, {"w": torch.ones(40, 40)})
            return True
        reduced(model, {"w": torch.ones(40, 40)})
    return False


def test_a_loss_scale_of_zero_is_refused_two_steps_later():
    assert run_ranks(2, scaled_by_nothing, on_device=True) == [True, True]


def gone(rank):
    gc.disable()
    model = mixed_ddp()
    handle = register(model, gradcomp.Threshold(0.01))
    for step in range(3):
        loss_of(model, tokens(rank, step)).backward()
    there = weakref.ref(handle)
    del model, handle
    return there() is None


def test_a_hook_does_not_hold_itself():
    assert run_ranks(2, gone, on_device=True) == [True, True]


def half_by_default(rank):
    torch.set_default_dtype(torch.bfloat16)
    model, handle = given_ddp({"w": torch.zeros(40, 40, dtype=torch.float32)}, gradcomp.TopK(0.1), momentum=0.5)
    for _ in range(3):
        reduced(model, {"w": torch.ones(40, 40, dtype=torch.float32)})
    return handle.residual("w").dtype, handle.velocity("w").dtype


def test_the_default_dtype_does_not_leak():
    assert run_ranks(1, half_by_default, on_device=True) == [(torch.float32, torch.float32)]


def resumed_in_a_removal(rank, stop):
    """What is sent by a run through a removal, saved and loaded before step ``stop``."""
    sent = []
    model, handle = given_ddp({"w": torch.zeros(40, 40)}, gradcomp.TopK(0.1), check=False)
    handle.remove()
    for step in range(8):
        if step == stop:
            state = handle.state_dict()
            model, handle = given_ddp({"w": torch.zeros(40, 40)}, gradcomp.TopK(0.1), check=False)
            handle.load_state_dict(state)
        before = handle.traffic.sent_bytes
        reduced(model, {"w": torch.randn(40, 40, generator=torch.Generator().manual_seed(10 * step + rank))})
        # A new hook agrees on its layout; in step 4, the first without residuals, the old one does too.
        sent.append(handle.traffic.sent_bytes - before - 16 * (step == stop != 4))
    return sent[1:]


def test_a_removal_under_way_is_resumed_where_it_was():
    straight, *others = (run_ranks(2, resumed_in_a_removal, stop, on_device=True) for stop in (None, 3, 4, 5))
    assert straight[0][-1] == 40 * 40 * 4 < straight[0][-4]
    for other in others:
        assert other == straight


def refused(rank):
    model = mixed_ddp()
    with pytest.raises(ValueError, match="check must be False"):
        gradcomp.register(model, check=True)
    table = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(50, 8, sparse=True))
    gradcomp.register(table)
    with pytest.raises(ValueError, match=r"gradient of weight must be dense on cpu"):
        table(torch.arange(3)).sum().backward()
    return True


def test_what_it_cannot_do_is_refused():
    assert run_ranks(1, refused, on_device=True) == [True]
