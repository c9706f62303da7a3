"""From construction to the end: copies, what cannot be hooked, ranks that die, memory that is given back."""

import copy
import gc
import io
import os
import pickle
import re
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from nets import Mixed, given_ddp, loss_of, mixed_ddp, reduced, register, tokens
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

WARNING = "the copy of a DDP model has no hook: register again"


# 18, 19: copies


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


def through_torch_save(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch_save}


def copied_model(rank, way, form):
    torch.manual_seed(0)
    model = DistributedDataParallel(Mixed(), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    if form == "register":
        handle = register(model, gradcomp.TopK(0.05))
    else:
        handle = gradcomp.SparseState(model.module, gradcomp.TopK(0.05))
        model.register_comm_hook(handle, gradcomp.sparse_hook)
    loss_of(model, tokens(rank, 0)).backward()
    model.zero_grad()
    with pytest.warns(UserWarning, match=WARNING):
        twin = WAYS[way](model)
    assert twin._get_ddp_logging_data().get("comm_hook", "") == ""
    # The documented way: register again, and give the new handle the old one's state.
    again = register(twin, gradcomp.TopK(0.05))
    again.load_state_dict(handle.state_dict())
    for each in (model, twin):
        loss_of(each, tokens(rank, 1)).backward()
    same = all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters()))
    return same, torch.equal(handle.residual("head.weight"), again.residual("head.weight")), again.traffic.ratio > 5


@pytest.mark.parametrize("form", ["register", "plain"])
@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("world_size", [2, 3])
def test_18_the_copy_of_a_model_says_that_it_has_no_hook(world_size, way, form):
    assert run_ranks(world_size, copied_model, way, form) == [(True, True, True)] * world_size


def copied_state(rank, way):
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    net = Mixed()
    model = DistributedDataParallel(net, process_group=group)
    state = gradcomp.SparseState(net, gradcomp.TopK(0.05), values="fp16", on_nonfinite="raise", group=group)
    model.register_comm_hook(state, gradcomp.sparse_hook)
    state.flush()
    for step in range(2):
        loss_of(model, tokens(rank, step)).backward()
    with pytest.warns(UserWarning, match=WARNING):
        twin = WAYS[way](state)
    assert "fp16" in repr(twin)
    other = copy.deepcopy(net)
    for wrong, words in ((nn.Linear(3, 3), "only one of the two has"), (state, "must be a torch.nn.Module")):
        with pytest.raises(ValueError, match=words):
            twin.attach(wrong)
    with pytest.raises(gradcomp.GradcompError, match="copy and has no network"):
        twin.state_dict()
    second = DistributedDataParallel(other, process_group=group)
    twin.attach(second)
    with pytest.raises(gradcomp.GradcompError, match="has its network already"):
        twin.attach(other)
    second.register_comm_hook(twin, gradcomp.sparse_hook)
    for each in (model, second):
        each.zero_grad()
        loss_of(each, tokens(rank, 2)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), second.parameters()))
    pending = [int(each.residual("head.weight").count_nonzero()) for each in (state, twin)]
    return pending, twin.traffic.steps, twin.state_dict()["step"]


@pytest.mark.parametrize("way", sorted(WAYS))
def test_19_a_copied_state_is_given_its_network_and_group_back(way):
    # The flush that was announced before the copy comes after it, on both.
    assert run_ranks(2, copied_state, way) == [([0, 0], 1, 3)] * 2


def test_a_state_outside_a_process_group_copies_too():
    state = gradcomp.SparseState(nn.Linear(40, 40), gradcomp.Threshold(0.5), grad_scaler=torch.amp.GradScaler("cpu"))
    with pytest.warns(UserWarning, match=WARNING):
        twin = copy.deepcopy(state)
    with pytest.raises(ValueError, match="grad_scaler must be given: the state's residuals are in unscaled units"):
        twin.attach(nn.Linear(40, 40))
    twin.attach(nn.Linear(40, 40), grad_scaler=torch.amp.GradScaler("cpu"))
    assert twin.residual("weight").shape == (40, 40)
    state._feedback.ensure("weight", 1600)
    with pytest.warns(UserWarning, match=WARNING):
        twin = copy.deepcopy(state)
    with pytest.raises(gradcomp.GradcompError, match="copy and has no network"):
        twin.state_dict()
    with pytest.raises(ValueError, match=r"parameter weight of module must have its residual's shape \(40, 40\), got \(30, 40\)"):
        twin.attach(nn.Linear(40, 30))


# 27: what cannot be hooked


def sharded(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def net():
        return nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 4))

    one = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"got FullyShardedDataParallel: a sharded model.*wrap the network in DistributedDataParallel"):
        gradcomp.register(one)
    for module in (one, nn.Sequential(one)):
        with pytest.raises(ValueError, match=r"module must not be sharded.*wrap it in DistributedDataParallel"):
            gradcomp.SparseState(module)
    bare = net()
    state = gradcomp.SparseState(bare)
    late = FullyShardedDataParallel(bare, device_id=torch.device("cpu"))
    late.register_comm_hook(state, gradcomp.sparse_hook)
    loss = late(torch.ones(2, 40)).sum()
    with pytest.raises(ValueError, match=r"got 2 argument\(s\), the first a Tensor: FullyShardedDataParallel"):
        loss.backward()
    two = net()
    fully_shard(two)
    with pytest.raises(ValueError, match=r"parameter 0\.weight must be a plain tensor, got a DTensor"):
        gradcomp.SparseState(two)
    with pytest.raises(ValueError, match=r"got FSDPSequential: a sharded model"):
        gradcomp.register(two)
    return True


def test_27_sharded_models_are_refused_with_the_alternative():
    assert run_ranks(2, sharded) == [True, True]


def tensor_parallel(rank):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    net = nn.Linear(40, 40)
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="parameter weight must be a plain tensor, got a DTensor"):
        gradcomp.SparseState(net)
    return True


def test_27_dtensor_parameters_are_refused():
    assert run_ranks(2, tensor_parallel) == [True, True]


def ddp_mixed_precision(rank):
    from torch.distributed.fsdp import MixedPrecision

    model = DistributedDataParallel(nn.Linear(40, 40))
    model.mixed_precision = MixedPrecision(param_dtype=torch.bfloat16)  # as DDP(mixed_precision=) keeps it; that needs CUDA
    with pytest.raises(ValueError, match=r"must not use mixed_precision=.*use torch.autocast instead"):
        gradcomp.register(model)
    return True


def test_27_ddp_with_its_own_mixed_precision_is_refused():
    assert run_ranks(2, ddp_mixed_precision) == [True, True]


def zero(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about torch.jit
        from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
        from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 40))
    overlapping = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(RuntimeError, match="Overlapping DDP with ZeRO"):  # torch's own refusal, on gloo
        hook_with_zero_step(gradcomp.sparse_hook, model, overlapping)
    handle = register(model, gradcomp.TopK(0.1))
    plain = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    weights = model.module.weight.detach().clone()
    for step in range(3):
        model.zero_grad()
        model(torch.full((2, 40), rank + step + 1.0)).sum().backward()
        plain.step()
    return torch.equal(weights, model.module.weight), handle.traffic.steps, model.module.weight.detach().clone()


def test_zero_works_without_its_overlap():
    first, second = run_ranks(2, zero)
    assert first[:2] == second[:2] == (False, 3)
    assert torch.equal(first[2], second[2])


# A peer that dies


def survivor(rank, when):
    model, handle = given_ddp({"w": torch.zeros(40, 40), "d": torch.zeros(9000)}, gradcomp.TopK(0.05), ddp={"bucket_cap_mb": 0.001})
    grads = {"w": torch.ones(40, 40), "d": torch.ones(9000)}
    for _ in range(3):
        reduced(model, grads)
    dist.barrier()
    if rank == 1:
        if when == "between steps":
            os._exit(3)
        model.module.w.register_hook(lambda grad: os._exit(3))  # in the middle of a backward pass, d's bucket on its way
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)connection (closed|reset)|peer|timed out"):
        reduced(model, grads)
    print(f"SURVIVOR {time.monotonic() - started:.1f} s {handle.last_error is not None}", flush=True)
    raise AssertionError(f"survived: {isinstance(handle.last_error, RuntimeError)} {time.monotonic() - started < 12}")


@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_a_peer_that_dies_is_an_error_within_the_timeout(when):
    """The group's timeout is 10 s here. The harness reports the dead rank; what the survivor saw is in its own text."""
    with pytest.raises(AssertionError, match="died with exit code 3") as caught:
        run_ranks(2, survivor, when, timeout_s=20)
    assert re.search("survived: True True", str(caught.value)), str(caught.value)


# Nothing is kept alive


def leaking(rank):
    def build():
        model = mixed_ddp()
        handle = register(model, gradcomp.TopK(0.05), check=False)
        return model, handle

    model, handle = build()
    for step in range(4):
        model.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
    gc.collect()
    before = len(gc.get_objects())
    for step in range(40):
        model.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
    gc.collect()
    grown = len(gc.get_objects()) - before
    network, state = weakref.ref(model.module), weakref.ref(handle)
    del model, handle
    gc.collect()
    return grown, network(), state()


def test_steps_leave_nothing_behind_and_models_can_go():
    for grown, network, state in run_ranks(2, leaking):
        assert grown < 200, "fewer than five objects a step"
        assert network is None
        assert state is None


def turned_around(rank):
    """A copy that is attached to a network of another memory order."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3))
    model = DistributedDataParallel(net)
    state = gradcomp.SparseState(net, overrides={"*": gradcomp.TopK(0.1)})
    model.register_comm_hook(state, gradcomp.sparse_hook)
    model(torch.randn(1, 8, 9, 9)).square().sum().backward()
    with pytest.warns(UserWarning, match=WARNING):
        twin = copy.deepcopy(state)
    with pytest.warns(UserWarning, match=WARNING):
        again = copy.deepcopy(twin)
    again.attach(copy.deepcopy(net).to(memory_format=torch.channels_last))
    return all(torch.equal(again.residual(name), state.residual(name)) for name, _ in net.named_parameters())


def test_an_attached_copy_keeps_its_residuals_in_place():
    assert run_ranks(2, turned_around) == [True, True]


def scale_of_zero(rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=0.0)
    model, _ = given_ddp({"w": torch.zeros(40, 40)}, gradcomp.TopK(0.1), grad_scaler=scaler)
    loss = scaler.scale(model({"w": torch.ones(40, 40)}))
    with pytest.raises(gradcomp.GradcompError, match=r"scale of grad_scaler must be above 0, got 0\.0"):
        loss.backward()
    return True


def test_a_loss_scale_of_zero_is_refused():
    assert run_ranks(2, scale_of_zero) == [True, True]
