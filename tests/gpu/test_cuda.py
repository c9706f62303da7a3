"""On a GPU: the same bytes and bits as on the CPU, and no wait of the host. Two ranks share one device, over gloo."""

import warnings

import pytest
import torch
from nets import Given
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.core import device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = {"a": (300, 200), "b": (70,), "c": (500, 50), "d": (9000,)}
CHOICES = [
    (gradcomp.TopK(0.05), "bf16", {}),
    (gradcomp.TopK(0.02), "int8", {"momentum": 0.5}),
    (gradcomp.TopK(0.05), "sign", {"fallback": "never"}),
    (gradcomp.Threshold(1.0), "fp16", {"fallback": "never"}),
    (gradcomp.Dense(), "fp32", {}),
]


def train(rank, where, rule, values, options, dtype):
    """Gradients that are given, so the same on every device; what is reduced of them, and what stays."""
    parameters = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    model = DistributedDataParallel(Given(**parameters).to(where), bucket_cap_mb=0.1)
    handle = gradcomp.register(model, overrides={"b": gradcomp.Dense(), "*": rule}, values=values, **options)
    seen = []
    for step in range(8):
        if step == 2:
            handle.flush()
        generator = torch.Generator().manual_seed(100 * step + rank)
        # Small integers: their sums are exact in any order.
        grads = {name: torch.randint(-9, 10, shape, generator=generator).to(where, dtype) for name, shape in SHAPES.items()}
        if step == 6 and rank == 0:
            grads["c"][0, 0] = float("nan")
        model.zero_grad()
        model(grads).backward()
        seen.append({name: p.grad.cpu() for name, p in model.module.named_parameters()})
    traffic = handle.traffic
    return seen, handle.state_dict(), (traffic.sent_bytes, traffic.payload_bytes, traffic.density, traffic.bad_steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("rule", "values", "options"), CHOICES)
def test_a_run_is_the_same_as_on_the_cpu(rule, values, options, world_size, dtype):
    if dtype != torch.float32:
        options = {key: value for key, value in options.items() if key != "momentum"}
    host = run_ranks(world_size, train, "cpu", rule, values, options, dtype)
    cuda = run_ranks(world_size, train, "cuda", rule, values, options, dtype)
    for (seen, state, traffic), (also_seen, also_state, also_traffic) in zip(host, cuda):
        assert traffic == also_traffic
        for grads, others in zip(seen, also_seen):
            assert all(torch.equal(grads[name], others[name]) or grads[name].isnan().all() for name in grads)
            assert all(torch.equal(grads[name].isnan(), others[name].isnan()) for name in grads)
        assert all(torch.equal(state["residual"][name], also_state["residual"][name]) for name in state["residual"])
        assert state["capacity"] == also_state["capacity"]


def without_waiting(rank, rule, values, options):
    """Backward passes that are issued while the device is busy with something else; whether each had to wait for it."""
    warnings.filterwarnings("ignore", message=".*debug mode is a prototype.*")
    scaler = torch.amp.GradScaler("cuda") if options.pop("scaled") else None
    model = DistributedDataParallel(Given(**{name: torch.zeros(shape) for name, shape in SHAPES.items()}).cuda(), bucket_cap_mb=0.1)
    handle = gradcomp.register(model, rule, values=values, grad_scaler=scaler, **options)
    grads = {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}
    waited = []
    for step in range(9):
        if step == 5:
            handle.flush()
        if step == 4:  # layouts are agreed on, and capacities have a history
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        loss = model(grads)
        if step >= 4:
            torch.cuda._sleep(10**9)
        (loss if scaler is None else scaler.scale(loss)).backward()
        done = torch.cuda.Event()
        done.record()
        waited.append(done.query())
    torch.cuda.set_sync_debug_mode("default")
    return any(waited[4:]), handle.traffic.steps


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("rule", "values", "options"), CHOICES)
def test_the_host_does_not_wait(rule, values, options, scaled):
    values = "bf16" if scaled and values == "fp16" else values  # of which it warns
    assert run_ranks(1, without_waiting, rule, values, {**options, "scaled": scaled}, backend="nccl") == [(False, 9)]


@pytest.mark.parametrize("numel", [10, 100_000, 5_000_000])
def test_selection_and_codec_are_those_of_the_cpu(numel):
    acc = torch.randperm(numel, generator=torch.Generator().manual_seed(0)).float() - numel / 2
    count = max(1, numel // 100)
    results = []
    for where in ("cpu", "cuda"):
        here = acc.to(where)
        picked = device.pick(device.choose(gradcomp.TopK(0.01), "w", here, here), here, count, fits=True)
        written = device.encode_indices(picked.indices, picked.wanted, numel)
        read, intact = device.decode_indices(written, picked.wanted, numel, count)
        assert bool(intact)
        assert torch.equal(read, picked.indices)
        results.append([tensor.cpu() for tensor in (picked.indices, picked.values, written)])
    assert all(map(torch.equal, *results))
