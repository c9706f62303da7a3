"""The density falls as its schedule says, through everything that depends on it."""

import pytest
import torch
from nets import Mixed, given_ddp, loss_of, mixed_ddp, register, tokens
from ranks import run_ranks
from reference import Ranks, top_k_indices

import gradcomp
from gradcomp.core.schedule import Linear

STEPS = 6


def densities(rank, options):
    model, handle = given_ddp({"a": torch.zeros(100, 100), "b": torch.zeros(5)}, None, values="bf16", **options)
    seen, sent = [], 0
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        model({"a": torch.randn(100, 100, generator=generator), "b": torch.ones(5)}).backward()
        now = handle.traffic.density * handle.traffic.elements
        seen.append(round(now - sent) - 5)
        sent = now
    return seen


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"overrides": {"a": gradcomp.TopK(0.01)}, "warmup_steps": 4}, [2500, 1118, 500, 224, 100, 100]),
        ({"overrides": {"a": gradcomp.TopK(0.01)}, "warmup_steps": 2, "warmup_density": 0.04}, [400, 200, 100, 100, 100, 100]),
        ({"overrides": {"a": gradcomp.TopK(Linear(start=0.5, end=0.1, steps=4))}}, [5000, 4000, 3000, 2000, 1000, 1000]),
        ({"overrides": {"a": gradcomp.TopK(Linear(start=1.0, end=0.1, steps=3))}}, [10000, 7000, 4000, 1000, 1000, 1000]),
        ({"overrides": {"a": gradcomp.TopK(0.01)}}, [100] * 6),
    ],
)
def test_the_density_follows_its_schedule(options, expected):
    assert run_ranks(2, densities, options) == [expected] * 2


def against_oracle(rank):
    torch.manual_seed(0)
    probe, model = Mixed(), mixed_ddp()
    handle = register(model, overrides={"*": gradcomp.TopK(0.02)}, values="sign", fallback="never", warmup_steps=3)
    history = []
    for step in range(STEPS):
        probe.zero_grad()
        loss_of(probe, tokens(rank, step)).backward()
        model.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
        named = list(model.module.named_parameters())
        local = {name: p.grad.clone() for name, p in probe.named_parameters()}
        history.append((local, {name: p.grad.clone() for name, p in named}, {name: handle.residual(name) for name, _ in named}))
    return history


@pytest.mark.usefixtures("either_device")
def test_a_warm_up_loses_nothing():
    results = run_ranks(2, against_oracle)
    shapes = {name: grad.shape for name, grad in results[0][0][0].items()}
    for step in range(STEPS):
        rule = gradcomp.TopK(0.25 * (0.02 / 0.25) ** (step / 3) if step < 3 else 0.02)
        if step == 0:
            oracle = Ranks(shapes, None, "sign", 2)
        oracle.choose = lambda name, acc, rule=rule: top_k_indices(acc, rule.count(acc.numel()))
        expected = oracle.step([history[step][0] for history in results])
        for rank, history in enumerate(results):
            for name in shapes:
                assert torch.equal(history[step][1][name], expected[name])
                assert torch.equal(history[step][2][name], oracle.residual[rank][name])


def resumed(rank):
    runs = []
    for interrupted in (False, True):
        model = mixed_ddp()
        handle = register(model, gradcomp.TopK(0.01), warmup_steps=5)
        for step in range(STEPS):
            if interrupted and step == 3:
                state, weights = handle.state_dict(), model.module.state_dict()
                model = mixed_ddp()
                model.module.load_state_dict(weights)
                handle = register(model, gradcomp.TopK(0.01), warmup_steps=5)
                handle.load_state_dict(state)
            model.zero_grad()
            loss_of(model, tokens(rank, step)).backward()
        runs.append({name: (p.grad, handle.residual(name)) for name, p in model.module.named_parameters()})
    return all(torch.equal(x, y) for name in runs[0] for x, y in zip(runs[0][name], runs[1][name]))


@pytest.mark.usefixtures("either_device")
def test_a_warm_up_resumes_where_it_was():
    assert run_ranks(2, resumed) == [True, True]


def test_a_warm_up_of_nothing_is_said():
    with pytest.warns(UserWarning, match="warmup_steps=3 has nothing to warm up"):
        gradcomp.SparseState(Mixed(), gradcomp.Threshold(0.1), warmup_steps=3)
    gradcomp.SparseState(Mixed(), gradcomp.TopK(0.1), warmup_steps=3)


@pytest.mark.parametrize(
    "options", [{"warmup_density": "x"}, {"warmup_steps": -1}, {"warmup_steps": 1.5}, {"warmup_density": 0.0}, {"warmup_density": 1.5}]
)
def test_bad_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        gradcomp.SparseState(Mixed(), **options)
