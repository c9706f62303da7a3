"""Public failures of communication hooks, by their numbers in the list of cases; each is a kind, so other inputs too."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from nets import Mixed, given_ddp, loss_of, mixed_ddp, reduced, tokens
from ranks import run_ranks
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
    handle = gradcomp.register(model, overrides={"*": gradcomp.TopK(0.02)}, values="fp32")
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


def test_4_shared_indices_add_up():
    for seen, _ in run_ranks(2, mean_of, [[[2, 0.1], [4, 6]]], gradcomp.Threshold(0.5), torch.float32, "fp32", "never"):
        assert seen[0][0] == [3, 3]


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


def test_11_each_rank_selects_another_number():
    rows = [[[1.0] * (2 + 3 * rank) + [0.125] * (12 - 2 - 3 * rank) for rank in range(4)]]
    for seen, _ in run_ranks(4, mean_of, rows, gradcomp.Threshold(0.5), torch.float32, "fp32", "never"):
        expected = [sum(1.0 for rank in range(4) if i < 2 + 3 * rank) / 4 for i in range(12)]
        assert seen[0][0] == expected


@pytest.mark.parametrize(("world_size", "mean"), [(1, 1.0), (2, 1.5), (4, 2.5)])
def test_13_the_mean_at_density_one(world_size, mean):
    rows = [[[rank + 1.0] * 5 for rank in range(world_size)]] * 3
    for values in ("fp32", "bf16"):
        for seen, _ in run_ranks(world_size, mean_of, rows, gradcomp.TopK(1.0), torch.float32, values, "dense"):
            assert [step[0] for step in seen] == [[mean] * 5] * 3


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
    handle = gradcomp.register(model, overrides={"*.weight": gradcomp.TopK(0.02)})
    for step in range(20):
        model.zero_grad()
        model(torch.randn(3, 40, generator=torch.Generator().manual_seed(step + 100 * rank))).square().sum().backward()
    return handle.traffic.steps


def test_10_many_small_buckets_finish():
    assert run_ranks(4, many_buckets, timeout_s=60) == [20] * 4


# 12: every public hook in every documented way


def registered_by(rank, way):
    model = mixed_ddp()
    if way == "register":
        handle = gradcomp.register(model)
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


def test_16_a_tiny_bias_sends_at_least_one():
    rows = [[[0.25, 4.0, 0.5]] * 2]
    for seen, _ in run_ranks(2, mean_of, rows, gradcomp.TopK(0.001), torch.float32, "fp32", "never"):
        assert seen[0][0] == [0, 4, 0]
        assert seen[0][1] == [0.25, 0, 0.5]
    for seen, _ in run_ranks(2, mean_of, [[[3.0], [5.0]]], gradcomp.TopK(0.001), torch.float32, "fp32", "never"):
        assert seen[0][0][0] == 4


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
        handle = gradcomp.register(model, gradcomp.TopK(density), values="fp32")
    for step in range(3):
        model.zero_grad()
        model(torch.randn(3, 200, generator=torch.Generator().manual_seed(step + 100 * rank))).square().sum().backward()
    return handle.traffic, str(handle.traffic), [str(warning.message) for warning in said]


def test_30_compression_that_would_cost_more_is_not_used_and_said_aloud():
    for traffic, text, said in run_ranks(4, pay, 0.6):
        assert traffic.sparse_parameters == 0
        assert "no parameter travels sparse" in text
        assert "configured but inactive: at world size 4" in said[0]
        assert traffic.ratio > 0.99
    for traffic, text, said in run_ranks(4, pay, 0.05):
        assert traffic.sparse_parameters == 2
        assert "no parameter travels sparse" not in text
        assert not said
        assert traffic.ratio > 4


def unused(rank):
    handle = gradcomp.register(mixed_ddp())
    return str(handle.traffic), handle.traffic.ratio


def test_30_a_hook_that_has_not_run_says_so():
    for text, ratio in run_ranks(2, unused):
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
