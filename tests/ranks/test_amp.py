"""Mixed precision: loss scales that change, steps that a GradScaler skips, autocast."""

import contextlib
import copy

import pytest
import torch
from nets import Mixed, given_ddp, loss_of, mixed_ddp, reduced, register, tokens
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

T = torch.tensor


def scaler_at(scale, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **{"growth_interval": 10**6, **options})


def step_of(model, scaler, optimizers, grads):
    """One training step on these unscaled local gradients; the reduced gradients as the optimizers see them, before they step."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(model(grads)).backward()
    seen = {}
    if any(p.dtype == torch.float16 for p in model.parameters()):  # which torch's scaler does not unscale
        return {name: p.grad / scaler.get_scale() for name, p in model.module.named_parameters()}
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for name, parameter in model.module.named_parameters():
        seen[name] = None if parameter.grad is None else parameter.grad.clone()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return seen


# 2: a step that is skipped is skipped everywhere, and nothing of it or before it is missing afterwards


def skipped(rank, bad, count, name):
    scaler = scaler_at(4.0)
    parameters = {"w": torch.zeros(3), "v": torch.zeros(2), "d": torch.zeros(9000)}
    overrides = {"d": gradcomp.Dense(), "*": gradcomp.Threshold(0.5)}
    model, handle = given_ddp(parameters, None, overrides=overrides, ddp={"bucket_cap_mb": 0.001}, fallback="never", grad_scaler=scaler)
    one, two = torch.optim.SGD([model.module.w], lr=1.0), torch.optim.SGD([model.module.v, model.module.d], lr=1.0)
    scales, before = [], {}
    for step in range(5):
        grads = {"w": T([1.0, 0.25, 0.0]), "v": T([0.125, 2.0]), "d": torch.ones(9000)}
        if step in range(2, 2 + count):
            if rank == 0:
                grads[name] = grads[name].clone()
                grads[name][1] = bad
            weights = [p.detach().clone() for p in model.parameters()]
            before = {key: handle.residual(key) for key in grads}
            step_of(model, scaler, (one, two), grads)
            assert all(torch.equal(p, was) for p, was in zip(model.parameters(), weights)), "both optimizers skip, on both ranks"
            assert all(torch.equal(handle.residual(key), before[key]) for key in grads)
        else:
            step_of(model, scaler, (one, two), grads)
        scales.append(scaler.get_scale())
    weights = {key: p.detach().clone() for key, p in model.module.named_parameters()}
    return scales, {key: weights[key] - handle.residual(key) for key in weights}, handle.traffic.bad_steps


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["w", "v", "d"])
@pytest.mark.parametrize("count", [1, 2])
def test_2_a_skipped_step_is_skipped_by_every_rank_and_optimizer(count, name, bad):
    for scales, applied, bad_steps in run_ranks(2, skipped, bad, count, name):
        assert scales == [4.0, 4.0, 2.0, 2.0 / count, 2.0 / count]
        assert bad_steps == count
        steps = 5 - count
        assert applied["w"].tolist() == [-steps, -0.25 * steps, 0], "what was applied and what is pending: every good step, whole"
        assert applied["v"].tolist() == [-0.125 * steps, -2 * steps]
        assert applied["d"].unique().tolist() == [-steps]


# 9: residuals are in unscaled units


def rescaled(rank, with_scaler):
    scaler = scaler_at(4.0)
    model, handle = given_ddp(
        {"w": torch.zeros(2), "v": torch.zeros(3)}, gradcomp.Threshold(0.3), grad_scaler=scaler if with_scaler else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    for _ in range(2):
        seen.append(step_of(model, scaler, (optimizer,), {"w": T([0.2, 0.0]), "v": torch.zeros(3)})["w"].tolist())
        scaler.update(2.0)
    return seen, handle.residual("w").tolist()


@pytest.mark.usefixtures("either_device")
def test_9_a_residual_keeps_its_worth_when_the_loss_scale_changes():
    for seen, left in run_ranks(2, rescaled, True):
        assert seen == [[0, 0], [pytest.approx(0.4), 0]]
        assert left == [0, 0]
    for seen, _ in run_ranks(2, rescaled, False):
        assert seen[0] == [pytest.approx(0.2), 0], "without grad_scaler= the threshold is in scaled units, as the docstring says"


def rule_on_a_tenth(data, mask):
    mask.copy_(data.abs() > 0.1)


AMP_RULES = {"topk": gradcomp.TopK(0.05), "threshold": gradcomp.Threshold(0.01), "function": rule_on_a_tenth}


def scaled_or_not(rank, rule, values, scales, dtype):
    """The same gradients with and without a loss scale; they must travel alike."""
    shapes = {"a": (40, 40), "b": (7,), "d": (9000,), "e": (30, 40)}
    overrides = {"b": gradcomp.Dense(), "d": gradcomp.Dense(), "*": AMP_RULES[rule]}
    runs = []
    for with_scaler in (False, True):
        scaler = scaler_at(1.0)
        zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        units = {"grad_scaler": scaler if with_scaler else None, "overrides": overrides, "fallback": "never"}
        with pytest.warns(UserWarning, match="'bf16' delivers more") if values == "fp16" and with_scaler else contextlib.nullcontext():
            model, handle = given_ddp(zeros, None, values, ddp={"bucket_cap_mb": 0.01}, **units)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        history = []
        for step, scale in enumerate(scales):
            if step == 2:
                handle.flush()
            generator = torch.Generator().manual_seed(10 * step + rank)
            grads = {name: (torch.randint(-512, 513, shape, generator=generator) / 1024).to(dtype) for name, shape in shapes.items()}
            if with_scaler:
                scaler.update(scale) if step else scaler.__init__("cpu", init_scale=scale, growth_interval=10**6)
                seen = step_of(model, scaler, (optimizer,), grads)
            else:
                seen = reduced(model, grads)
            history.append((seen, {name: handle.residual(name) for name in shapes}))
        runs.append(history)
    for step, ((plain, residuals), (unscaled, scaled_residuals)) in enumerate(zip(*runs)):
        for name in shapes:
            assert torch.equal(plain[name], unscaled[name]), (step, name)
            assert torch.equal(residuals[name], scaled_residuals[name]), (step, name)
    return sum(int(residual.count_nonzero()) for residual in runs[1][-1][1].values())


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("values", ["fp32", "bf16", "fp16", "int8", "sign"])
@pytest.mark.parametrize("rule", sorted(AMP_RULES))
def test_a_loss_scale_changes_nothing_but_the_units(rule, values):
    scales = [2.0, 2.0, 1.0, 4.0, 2.0**-3, 8.0] if values == "fp16" else [65536.0, 65536.0, 32768.0, 2.0**20, 2.0**-3, 8.0]
    assert all(pending > 0 for pending in run_ranks(2, scaled_or_not, rule, values, scales, torch.float32))


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_loss_scale_and_gradients_of_other_dtypes(dtype):
    assert all(pending > 0 for pending in run_ranks(2, scaled_or_not, "topk", "fp32", [4.0, 8.0, 2.0, 1.0, 16.0, 4.0], dtype))


def odd_scale(rank):
    """A scale that is no power of two rounds, and loses nothing else; ``check`` watches."""
    scaler = scaler_at(1000.0)
    model, handle = given_ddp({"w": torch.zeros(40, 40), "v": torch.zeros(3)}, gradcomp.TopK(0.05), "bf16", grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    total = torch.zeros(40, 40, dtype=torch.float64)
    local = torch.zeros(40, 40, dtype=torch.float64)
    for step in range(6):
        grad = torch.randn(40, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        total += step_of(model, scaler, (optimizer,), {"w": grad, "v": torch.ones(3)})["w"].double()
        local += grad.double()
        scaler.update(1000.0 / (step + 1))
    return total, local, handle.residual("w").double()


@pytest.mark.usefixtures("either_device")
def test_a_loss_scale_that_is_no_power_of_two_loses_only_roundings():
    results = run_ranks(2, odd_scale)
    exact = sum(local for _, local, _ in results) / 2
    pending = sum(residual for _, _, residual in results) / 2
    assert pending.abs().max() > 1
    torch.testing.assert_close(results[0][0] + pending, exact, rtol=0, atol=1e-5)


def growing_scale(rank):
    scaler = scaler_at(4.0, growth_interval=2)
    model, handle = given_ddp({"w": torch.zeros(8), "v": torch.zeros(3)}, gradcomp.TopK(0.25), "fp32", grad_scaler=scaler, fallback="never")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scales = []
    for step in range(8):
        grad = T([1.0, 0.5, 0.25, 0.125, 2.0, 4.0, 0.75, 0.375])
        if step == 5 and rank == 1:
            grad = grad * float("inf")
        step_of(model, scaler, (optimizer,), {"w": grad, "v": torch.ones(3)})
        scales.append(scaler.get_scale())
    return scales, -model.module.w.detach(), handle.residual("w")


@pytest.mark.usefixtures("either_device")
def test_growth_and_backoff_with_something_pending():
    results = run_ranks(2, growing_scale)
    pending = sum(residual for _, _, residual in results) / 2
    for scales, applied, _ in results:
        assert scales == [4, 8, 8, 16, 16, 8, 8, 16]
        assert torch.equal(applied + pending, 7 * T([1.0, 0.5, 0.25, 0.125, 2.0, 4.0, 0.75, 0.375]))
    assert pending.count_nonzero() > 0


# An overflow that only the sum or the cast produces saturates: refused, it would be there again in the next step, and for ever


def overflowing(rank, kind):
    dtype = torch.float16
    scaler = scaler_at(2.0**15 if kind == "scale" else 1.0)
    model, handle = given_ddp(
        {"w": torch.zeros(3, dtype=dtype), "v": torch.zeros(3)}, gradcomp.Threshold(1e5 if kind == "sum" else 3.0), "fp32",
        fallback="never", grad_scaler=scaler,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    local = T([1.5, 0.5, 0.25]) if kind == "scale" else T([60000.0, 40000.0, 1.0])
    total = torch.zeros(3, dtype=torch.float64)
    for _ in range(6):  # the mean is rounded to fp16, and unscaled in it
        total += step_of(model, scaler, (optimizer,), {"w": local.to(dtype), "v": torch.ones(3)})["w"].double()
    return total, handle.residual("w").double(), handle.traffic.bad_steps, scaler.get_scale(), 6 * local.double()


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("kind", ["sum", "scale"])
def test_what_overflows_only_together_saturates_and_waits(kind):
    for total, residual, bad_steps, scale, exact in run_ranks(2, overflowing, kind):
        assert bad_steps == 0
        assert scale in (1.0, 2.0**15), "no step was skipped"
        assert total.count_nonzero() > 0
        torch.testing.assert_close(total + residual, exact, rtol=2e-3, atol=1)


# Autocast


def autocast(rank, way):
    torch.manual_seed(0)
    model = mixed_ddp()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=way == "scaled")
    handle = register(model, overrides={"*": gradcomp.TopK(0.05)}, grad_scaler=scaler, fallback="never")
    probe, optimizer = Mixed(), torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in probe.named_parameters()]
    applied, local = (dict.fromkeys(names, 0.0) for _ in range(2))
    for step in range(4):
        probe.load_state_dict(model.module.state_dict())
        probe.zero_grad()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = loss_of(model, tokens(rank, step)), loss_of(probe, tokens(rank, step))
        scaler.scale(ours).backward()
        theirs.backward()
        scaler.unscale_(optimizer)
        for name, p in model.module.named_parameters():
            applied[name] = applied[name] + p.grad.double()
        for name, p in probe.named_parameters():
            local[name] = local[name] + p.grad.double()
        scaler.step(optimizer)
        scaler.update()
    return applied, local, {name: handle.residual(name).double() for name in names}


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("way", ["scaled", "disabled"])
def test_bf16_autocast_loses_nothing(way):
    results = run_ranks(2, autocast, way)
    for name in results[0][0]:
        exact = sum(local[name] for _, local, _ in results) / 2
        pending = sum(residual[name] for _, _, residual in results) / 2
        # A scaled loss rounds bf16 activations at other places only where they are subnormal.
        torch.testing.assert_close(results[0][0][name] + pending, exact, rtol=1e-5, atol=1e-6)


def different_scalers(rank):
    scaler = scaler_at(4.0 if rank else 2.0)
    model, _ = given_ddp({"w": torch.zeros(2), "v": torch.zeros(3)}, gradcomp.Threshold(0.3), grad_scaler=scaler, check=False)
    with pytest.raises(gradcomp.DesyncError, match=r"rank 1 disagrees with rank 0 on grad_scaler: scale 4\.0, .* against scale 2\.0"):
        scaler.scale(model({"w": torch.ones(2), "v": torch.ones(3)})).backward()
    return True


@pytest.mark.usefixtures("either_device")
def test_ranks_with_different_scalers_are_told():
    assert run_ranks(2, different_scalers) == [True, True]


def clipped_like_plain(rank):
    """Dense with a scaler, unscaled and clipped before the step, is plain DDP bit for bit."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30))
    models = [DistributedDataParallel(copy.deepcopy(net)) for _ in range(2)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    register(models[0], overrides={"*": gradcomp.Dense()}, values="fp32", grad_scaler=scalers[0])
    for step in range(6):
        x = torch.randn(3, 30, generator=torch.Generator().manual_seed(10 * step + rank))
        for model, scaler in zip(models, scalers):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            scaler.scale(model(x).square().sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return all(torch.equal(ours, theirs) for ours, theirs in zip(models[0].parameters(), models[1].parameters()))


@pytest.mark.usefixtures("either_device")
def test_dense_with_a_scaler_is_plain_ddp():
    assert run_ranks(2, clipped_like_plain) == [True, True]
