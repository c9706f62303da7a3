"""Public failures of communication hooks, by their numbers in the list of cases; each is a kind, so other inputs too."""

import contextlib
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from nets import Given, Mixed, given_ddp, loss_of, mixed_ddp, reduced, register, tokens
from ranks import run_ranks
from reference import Ranks, top_k_indices
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

T = torch.tensor


# 1: residuals belong to parameters, not to places in buckets


def follow(rank, ddp, rows):
    model, _ = given_ddp({"a": torch.zeros(1), "b": torch.zeros(1)}, gradcomp.Threshold(0.5), ddp=ddp)
    seen = []
    for a, b in rows:
        grads = reduced(model, {"a": T([a]), "b": T([b])})
        seen.append((grads["a"].item(), grads["b"].item()))
    return seen


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("ddp", [{}, {"bucket_cap_mb": 1e-6}, {"static_graph": True}, {"bucket_cap_mb": 1e-6, "static_graph": True}])
def test_1_residuals_follow_their_parameters(ddp):
    for seen in run_ranks(2, follow, ddp, [(0.4, 0.0), (0.0, 0.2), (0.2, 0.0), (0.0, 0.4)]):
        assert seen[:2] == [(0, 0), (0, 0)]
        assert seen[2] == (pytest.approx(0.6), 0)
        assert seen[3] == (0, pytest.approx(0.6))


def rebuilt(rank, ddp):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(24, 24) for _ in range(5)])
    model = DistributedDataParallel(net, **ddp)
    handle = register(model, overrides={"*": gradcomp.TopK(0.02)}, values="fp32")
    sums = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for step in range(6):
        model.zero_grad()
        x = torch.randint(-3, 4, (2, 24), generator=torch.Generator().manual_seed(10 * step + rank)).float()
        model(x).sum().backward()
        for name, p in net.named_parameters():
            sums[name] += p.grad
    local = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for step in range(6):
        x = torch.randint(-3, 4, (2, 24), generator=torch.Generator().manual_seed(10 * step + rank)).float()
        for name, grad in zip(local, torch.autograd.grad(net(x).sum(), net.parameters())):
            local[name] += grad
    return sums, {name: handle.residual(name) for name in sums}, local, handle.traffic.steps


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize(
    "ddp", [{"bucket_cap_mb": 0.003}, {"bucket_cap_mb": 0.003, "static_graph": True}, {"gradient_as_bucket_view": True}]
)
def test_1_nothing_is_lost_through_a_rebuild(ddp):
    results = run_ranks(2, rebuilt, ddp)
    for name in results[0][0]:
        pending = sum(residuals[name] for _, residuals, _, _ in results) / 2
        exact = sum(local[name] for _, _, local, _ in results) / 2
        assert pending.count_nonzero() > 0
        torch.testing.assert_close(results[0][0][name] + pending, exact, rtol=1e-5, atol=1e-5)


# 4, 5, 11, 13, 14: the mean is the mean


def mean_of(rank, rows, rule, dtype, values, fallback):
    size = max(len(row) for step in rows for row in step)
    model, handle = given_ddp({"w": torch.zeros(size, dtype=dtype), "v": torch.zeros(3)}, rule, values, fallback=fallback)
    seen = []
    for step in rows:
        grads = reduced(model, {"w": T(step[rank], dtype=dtype), "v": torch.zeros(3)})
        seen.append((grads["w"].tolist(), handle.residual("w").tolist(), grads["w"].dtype))
    return seen, handle.traffic


@pytest.mark.usefixtures("either_device")
def test_4_shared_indices_add_up():
    for seen, _ in run_ranks(2, mean_of, [[[2, 0.1], [4, 6]]], gradcomp.Threshold(0.5), torch.float32, "fp32", "never"):
        assert seen[0][0] == [3, 3]


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("fallback", ["dense", "never"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_5_nothing_selected_on_some_or_all_ranks(world_size, fallback):
    first = [[0.25, 0.125]] * world_size
    second = [[0.125, 0.25]] + [[1.0, 0.0]] * (world_size - 1)
    results = run_ranks(world_size, mean_of, [first, second], gradcomp.Threshold(0.5), torch.float32, "fp32", fallback)
    for rank, (seen, _) in enumerate(results):
        assert seen[0][:2] == ([0, 0], first[rank])
        assert seen[1][0] == [1.25 * (world_size - 1) / world_size, 0]
        assert seen[1][1] == ([0.375, 0.375] if rank == 0 else [0, 0.125])


@pytest.mark.usefixtures("either_device")
def test_11_each_rank_selects_another_number():
    rows = [[[1.0] * (2 + 3 * rank) + [0.125] * (12 - 2 - 3 * rank) for rank in range(4)]]
    for seen, _ in run_ranks(4, mean_of, rows, gradcomp.Threshold(0.5), torch.float32, "fp32", "never"):
        expected = [sum(1.0 for rank in range(4) if i < 2 + 3 * rank) / 4 for i in range(12)]
        assert seen[0][0] == expected


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize(("world_size", "mean"), [(1, 1.0), (2, 1.5), (4, 2.5)])
def test_13_the_mean_at_density_one(world_size, mean):
    rows = [[[rank + 1.0] * 5 for rank in range(world_size)]] * 3
    for values in ("fp32", "bf16"):
        for seen, _ in run_ranks(world_size, mean_of, rows, gradcomp.TopK(1.0), torch.float32, values, "dense"):
            assert [step[0] for step in seen] == [[mean] * 5] * 3


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("fallback", ["dense", "never"])
@pytest.mark.parametrize("rule", [gradcomp.TopK(1.0), gradcomp.Threshold(0.5), gradcomp.TopK(0.5)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_14_large_half_precision_gradients(world_size, rule, fallback):
    rows = [[[40000.0, 1.0]] * world_size] * 3
    for values in ("fp32", "fp16"):
        for seen, traffic in run_ranks(world_size, mean_of, rows, rule, torch.float16, values, fallback):
            assert all(step[0][0] == 40000 and step[2] == torch.float16 for step in seen)
            assert traffic.bad_steps == 0


# 10: many buckets


def many_buckets(rank):
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(40, 40) for _ in range(6)]), bucket_cap_mb=0.005)
    handle = register(model, overrides={"*.weight": gradcomp.TopK(0.02)})
    for step in range(20):
        model.zero_grad()
        model(torch.randn(3, 40, generator=torch.Generator().manual_seed(step + 100 * rank))).square().sum().backward()
    return handle.traffic.steps


@pytest.mark.usefixtures("either_device")
def test_10_many_small_buckets_finish():
    assert run_ranks(4, many_buckets, timeout_s=60) == [20] * 4


# 12: every public hook in every documented way


def registered_by(rank, way):
    model = mixed_ddp()
    if way == "register":
        handle = register(model)
    else:
        network = model if way == "wrapped" else model.module
        handle = gradcomp.SparseState(network, gradcomp.TopK(0.01), overrides={"*.bias": gradcomp.Dense()}, values="bf16")
        model.register_comm_hook(handle, gradcomp.sparse_hook)
    for step in range(3):
        model.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
    return (
        model._get_ddp_logging_data()["comm_hook"],
        handle.traffic.steps,
        handle.traffic.ratio,
        handle.residual("head.weight").count_nonzero().item(),
    )


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("way", ["register", "plain", "wrapped"])
def test_12_every_documented_registration(way):
    for name, steps, ratio, pending in run_ranks(2, registered_by, way):
        assert name == "sparse_hook"
        assert steps == 3
        assert ratio > 5
        assert pending > 0


def built_before(rank, folder):
    dist.destroy_process_group()
    torch.manual_seed(0)
    net = Mixed()
    state = gradcomp.SparseState(net, gradcomp.TopK(0.01))
    assert state.state_dict()["rank"] is None
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/again", 2), rank=rank, world_size=2, timeout=timedelta(seconds=30))
    model = DistributedDataParallel(net)
    model.register_comm_hook(state, gradcomp.sparse_hook)
    loss_of(model, tokens(rank, 0)).backward()
    return state.state_dict()["rank"], state.traffic.steps


def test_12_a_state_built_before_the_process_group(tmp_path):
    assert run_ranks(2, built_before, str(tmp_path)) == [(0, 1), (1, 1)]


# 16, 21, 29, 30: what is small, and what does not pay


@pytest.mark.usefixtures("either_device")
def test_16_a_tiny_bias_sends_at_least_one():
    rows = [[[0.25, 4.0, 0.5]] * 2]
    for seen, _ in run_ranks(2, mean_of, rows, gradcomp.TopK(0.001), torch.float32, "fp32", "never"):
        assert seen[0][0] == [0, 4, 0]
        assert seen[0][1] == [0.25, 0, 0.5]
    for seen, _ in run_ranks(2, mean_of, [[[3.0], [5.0]]], gradcomp.TopK(0.001), torch.float32, "fp32", "never"):
        assert seen[0][0][0] == 4


@pytest.mark.usefixtures("either_device")
def test_21_density_one_costs_what_plain_ddp_costs():
    rows = [[[float(rank)] * 5000 for rank in range(4)]] * 4
    for _, traffic in run_ranks(4, mean_of, rows, gradcomp.TopK(1.0), torch.float32, "bf16", "dense"):
        assert traffic.sent_bytes <= traffic.dense_bytes + 16 * 1024 * 4


def pay(rank, density):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 150))
    model = DistributedDataParallel(net)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        handle = register(model, gradcomp.TopK(density), values="fp32")
    for step in range(3):
        model.zero_grad()
        model(torch.randn(3, 200, generator=torch.Generator().manual_seed(step + 100 * rank))).square().sum().backward()
    return handle.traffic, str(handle.traffic), [str(warning.message) for warning in said]


def test_30_compression_that_would_cost_more_is_not_used_and_said_aloud():
    for traffic, text, said in run_ranks(4, pay, 0.6):
        assert traffic.sparse_parameters == 0
        assert "no parameter travelled sparse" in text
        assert "configured but inactive: at world size 4" in said[0]
        assert traffic.ratio > 0.99
    for traffic, text, said in run_ranks(4, pay, 0.05):
        assert traffic.sparse_parameters == 2
        assert "no parameter travelled sparse" not in text
        assert not said
        assert traffic.ratio > 4


def never_run(rank):
    handle = register(mixed_ddp())
    return str(handle.traffic), handle.traffic.ratio


def test_30_a_hook_that_has_not_run_says_so():
    for text, ratio in run_ranks(2, never_run):
        assert "has not run yet" in text
        assert ratio == 1.0


# 22, 24: sizes and types of what the hook returns


class FakeBucket:
    """As much of a GradBucket as the hook may use."""

    def __init__(self, model, dtype=None):
        self.listed = list(model.parameters())
        self.flat = torch.cat([torch.full((p.numel(),), 0.5, dtype=dtype or p.dtype) for p in self.listed])

    def index(self):
        return 0

    def is_last(self):
        return True

    def buffer(self):
        return self.flat

    def parameters(self):
        return self.listed

    def gradients(self):
        return [part.view(p.shape) for part, p in zip(self.flat.split([p.numel() for p in self.listed]), self.listed)]


def returned(rank, dtype):
    net = Mixed().to(dtype)
    state = gradcomp.SparseState(net, overrides={"*": gradcomp.TopK(0.1)})
    bucket = FakeBucket(net)
    size = bucket.flat.numel()
    future = gradcomp.sparse_hook(state, bucket)
    value = future.wait()
    return isinstance(future, torch._C.Future), isinstance(value, torch.Tensor), value.dtype == dtype, value.shape == (size,)


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_24_a_future_of_one_whole_tensor(dtype):
    assert run_ranks(2, returned, dtype) == [(True, True, True, True)] * 2


def big(rank):
    model, handle = given_ddp({"w": torch.zeros(2**24 + 1), "v": torch.zeros(2)}, gradcomp.TopK(1.2e-7), "bf16")
    grad = torch.zeros(2**24 + 1)
    grad[-1], grad[7], grad[9] = 3.0 + rank, 2.0, 0.5
    out = reduced(model, {"w": grad, "v": torch.ones(2)})["w"]
    return out[[7, 9, -1]].tolist(), int(out.count_nonzero()), handle.residual("w")[9].item()


def test_22_a_parameter_beyond_the_integers_of_fp32():
    assert run_ranks(2, big) == [([2.0, 0.0, 3.5], 2, 0.5)] * 2


def test_14_the_largest_of_ranks_at_different_places_is_no_overflow():
    rows = [[[60000.0, 0.0], [0.0, 60000.0]]] * 2
    for seen, traffic in run_ranks(2, mean_of, rows, gradcomp.Threshold(0.5), torch.float16, "fp32", "never"):
        assert seen[1][0] == [30000, 30000]
        assert traffic.bad_steps == 0


# Beyond the list: what attackers of the first version found


def empty_parameters(rank, rule):
    model, handle = given_ddp({"e": torch.zeros(3, 0), "w": torch.zeros(4), "s": torch.zeros(())}, rule, "bf16", fallback="never")
    grads = reduced(model, {"e": torch.zeros(3, 0), "w": torch.ones(4) * (rank + 1), "s": torch.ones(())})
    return grads["w"].tolist(), grads["e"].shape, grads["s"].item(), handle.residual("e").shape


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("rule", [gradcomp.TopK(1.0), gradcomp.TopK(0.999), gradcomp.Threshold(0.5), gradcomp.Dense()])
def test_parameters_without_elements(rule):
    assert run_ranks(2, empty_parameters, rule) == [([1.5] * 4, torch.Size([3, 0]), 1.0, torch.Size([3, 0]))] * 2


def on_subgroup(rank, way):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(Given(w=torch.zeros(2), v=torch.zeros(5000)), process_group=groups[rank // 2])
    options = {"overrides": {"w": gradcomp.Threshold(0.5), "v": gradcomp.Dense()}, "values": "fp32"}
    if way == "register":
        handle = register(model, **options)
    else:
        handle = gradcomp.SparseState(
            model if way == "wrapped" else model.module, group=None if way == "wrapped" else groups[rank // 2], **options
        )
        model.register_comm_hook(handle, gradcomp.sparse_hook)
    grads = reduced(model, {"w": torch.tensor([float(rank), 0.0]), "v": torch.full((5000,), float(rank))})
    return grads["w"].tolist(), grads["v"].unique().tolist(), handle.traffic.world_size


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("way", ["register", "wrapped", "group"])
def test_subgroups(way):
    results = run_ranks(4, on_subgroup, way)
    assert results[:2] == [([0.5, 0], [0.5], 2)] * 2  # w in the payload, v by the ring
    assert results[2:] == [([2.5, 0], [2.5], 2)] * 2


def unused(rank, fallback, action):
    """c has a gradient in steps 0 and 3 to 6 alone; whatever is pending of it must come out or stay, never vanish."""
    parameters = {"a": torch.zeros(2), "c": torch.zeros(2)}
    model, handle = given_ddp(parameters, gradcomp.TopK(0.5), "fp32", ddp={"find_unused_parameters": True}, fallback=fallback)
    total, local = torch.zeros(2), torch.zeros(2)
    pending = []
    for step in range(7):
        if step == 0 and action:
            getattr(handle, action)()
        grads = {"a": torch.tensor([1.0, 0.5])}
        if step == 0 or step >= 3:
            grads["c"] = torch.tensor([2.0, 0.75]) if step == 0 else torch.tensor([0.0, 0.25])
            local += grads["c"]
        out = reduced(model, grads)["c"]
        if step in (1, 2):
            assert out is None, "DDP throws the result for an unused parameter away"
        total += 0 if out is None else out
        pending.append(handle.residual("c").tolist())
        assert torch.equal(total + handle.residual("c"), local), step
    return pending, handle.state_dict()["removed"]


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("action", ["", "flush", "remove"])
@pytest.mark.parametrize("fallback", ["dense", "never"])
def test_7_unused_parameters_keep_their_residual(fallback, action):
    for pending, removed in run_ranks(2, unused, fallback, action):
        assert pending[0] == pending[1] == pending[2] == [0, 0.75]
        assert pending[3] == [0, 0]
        assert removed == (action == "remove")


def unused_here(rank):
    parameters = {"a": torch.zeros(2), "c": torch.zeros(2)}
    model, handle = given_ddp(parameters, gradcomp.TopK(0.5), "fp32", ddp={"find_unused_parameters": True}, fallback="never")
    seen = []
    for step in range(3):
        grads = {"a": torch.ones(2)}
        if rank == 0 or step == 2:
            grads["c"] = torch.tensor([2.0, 0.5])
        seen.append(reduced(model, grads)["c"].tolist())
    return seen, handle.residual("c").tolist()


@pytest.mark.usefixtures("either_device")
def test_7_a_parameter_unused_on_one_rank_receives_the_others():
    first, second = run_ranks(2, unused_here)
    assert first[0] == second[0] == [[1, 0], [1, 0], [2, 0]]
    assert (first[1], second[1]) == ([0, 1.5], [0, 0.5])


def accumulated(rank):
    torch.manual_seed(0)
    model = mixed_ddp()
    probe = Mixed()
    probe.load_state_dict(model.module.state_dict())
    handle = register(model, overrides={"*": gradcomp.TopK(0.05)}, values="bf16", fallback="never")
    history = []
    for step in range(3):
        for net in (model, probe):
            net.zero_grad()
        for micro in range(3):
            batch = tokens(rank, 10 * step + micro)
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                loss_of(model, batch).backward()
            loss_of(probe, batch).backward()
        named = list(model.module.named_parameters())
        local = {name: p.grad.clone() for name, p in probe.named_parameters()}
        history.append((local, {name: p.grad.clone() for name, p in named}, {name: handle.residual(name) for name, _ in named}))
    return history, handle.traffic.steps


@pytest.mark.usefixtures("either_device")
def test_accumulation_under_no_sync_is_one_step():
    results = run_ranks(2, accumulated)
    shapes = {name: grad.shape for name, grad in results[0][0][0][0].items()}
    rule = gradcomp.TopK(0.05)
    oracle = Ranks(shapes, lambda name, acc: top_k_indices(acc, rule.count(acc.numel())), "bf16", 2)
    for step in range(3):
        expected = oracle.step([history[step][0] for history, _ in results])
        for rank, (history, steps) in enumerate(results):
            assert steps == 3
            assert all(torch.equal(history[step][1][name], expected[name]) for name in shapes)
            assert all(torch.equal(history[step][2][name], oracle.residual[rank][name]) for name in shapes)


def mixed_dtypes(rank):
    dtypes = {"a": torch.float64, "b": torch.float32, "c": torch.bfloat16, "d": torch.float16}
    parameters = {name: torch.zeros(60, 30, dtype=dtype) for name, dtype in dtypes.items()}
    model, handle = given_ddp(parameters, gradcomp.TopK(0.1), "bf16")
    out, local = ({name: torch.zeros(60, 30, dtype=torch.float64) for name in dtypes} for _ in range(2))
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        grads = {name: (torch.randint(-64, 65, (60, 30), generator=generator) / 16).to(dtype) for name, dtype in dtypes.items()}
        mean = reduced(model, grads)
        assert {name: grad.dtype for name, grad in mean.items()} == dtypes
        for name in dtypes:
            out[name] += mean[name].double()
            local[name] += grads[name].double()
    return out, local, {name: handle.residual(name).double() for name in dtypes}


@pytest.mark.usefixtures("either_device")
def test_28_mixed_dtypes_keep_theirs_and_lose_nothing():
    results = run_ranks(2, mixed_dtypes)
    for name, out in results[0][0].items():
        exact = sum(local[name] for _, local, _ in results) / 2
        pending = sum(residuals[name] for _, _, residuals in results) / 2
        assert pending.count_nonzero() > 100
        rounding = 0.25 if name == "c" else 0  # a mean of bf16 values does not always fit the bf16 buffer
        torch.testing.assert_close(out + pending, exact, rtol=0, atol=rounding)


class PartlyFrozen(nn.Module):
    """A large frozen layer, a frozen complex parameter, and a small trainable layer."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(100, 100).requires_grad_(False)
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
        self.head = nn.Linear(100, 2)

    def forward(self, x):
        return self.head(self.frozen(x))


def frozen(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(PartlyFrozen())
    # Sparse is asked for, and would pay, for what is frozen alone: of what is trained every parameter is dense.
    rules = {"frozen.*": gradcomp.TopK(0.01), "head.weight": gradcomp.TopK(0.95)}
    handle = register(model, overrides=rules, values="bf16")
    model(torch.randn(2, 100, generator=torch.Generator().manual_seed(rank))).sum().backward()
    return handle.traffic.parameters, handle.traffic.elements, handle.residual("phase").shape


def test_frozen_parameters_are_no_obstacle():
    assert run_ranks(2, frozen) == [(2, 202, torch.Size([3, 2]))] * 2


def inactive(rank):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(600, 600).requires_grad_(False), nn.Linear(600, 600)))
    with pytest.warns(UserWarning, match="configured but inactive"):
        register(model, overrides={"0.weight": gradcomp.TopK(0.01), "1.weight": gradcomp.TopK(0.99)}, values="fp32")
    return True


def test_30_what_is_frozen_does_not_make_compression_active():
    assert run_ranks(2, inactive) == [True, True]
