"""Steps that go wrong: what is not finite, ranks that disagree, settings that are wrong."""

from dataclasses import dataclass

import pytest
import torch
from nets import Given, given_ddp, mixed_ddp, reduced, register
from ranks import run_ranks
from torch import nn

import gradcomp

BAD = [float("nan"), float("inf"), -float("inf")]


def shapes():
    torch.manual_seed(0)
    return {"a": torch.zeros(40, 40), "b": torch.zeros(7), "c": torch.zeros(50, 50), "d": torch.zeros(9000)}


def grads(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(value.shape, generator=generator) for name, value in shapes().items()}


def run_with_faults(rank, rule, values, name, value, bad_steps, bad_rank):
    """Train with and without the bad steps; the two must agree in everything."""
    runs = []
    for faulty in (True, False):
        overrides = {"b": gradcomp.Dense(), "d": gradcomp.Dense(), "*": rule}
        model, handle = given_ddp(shapes(), rule, values, overrides=overrides, ddp={"bucket_cap_mb": 0.005}, fallback="never")
        seen = []
        for step in range(5):
            local = grads(rank, step)
            if step in bad_steps:
                if not faulty:
                    continue
                if rank == bad_rank:
                    local[name].view(-1)[3] = value
                before = {key: handle.residual(key) for key in local}
                spoiled = reduced(model, local)
                assert all(bool(grad.isnan().all()) for grad in spoiled.values()), "every gradient of a bad step is NaN on all ranks"
                assert all(torch.equal(handle.residual(key), before[key]) for key in local), "residuals are as before"
            else:
                seen.append(reduced(model, local))
        runs.append((seen, {key: handle.residual(key) for key in local}, handle.traffic))
    (with_faults, residuals, traffic), (without, expected, _) = runs
    for ours, theirs in zip(with_faults, without):
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), key
    assert all(torch.equal(residuals[key], expected[key]) for key in residuals)
    return traffic.bad_steps


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
@pytest.mark.parametrize("rule", ["topk", "function"])
def test_a_bad_step_poisons_nothing(name, value, rule):
    rule = gradcomp.TopK(0.05) if rule == "topk" else above_one
    for bad_steps in ([0], [2, 3]):
        assert run_ranks(2, run_with_faults, rule, "bf16", name, value, bad_steps, 1) == [len(bad_steps)] * 2


def above_one(data, mask):
    mask.copy_(data.abs() > 1)


def infinite_beside_large(rank):
    model, handle = given_ddp({"w": torch.zeros(2), "v": torch.zeros(3)}, gradcomp.Threshold(0.5), "fp32")
    reduced(model, {"w": torch.tensor([0.0, 1e-3 if rank else 0.0]), "v": torch.ones(3)})
    before = handle.residual("w")
    spoiled = reduced(model, {"w": torch.tensor([1.0, 1e6 if rank else float("inf")]), "v": torch.ones(3)})
    return before.tolist(), handle.residual("w").tolist(), all(bool(g.isnan().all()) for g in spoiled.values())


@pytest.mark.usefixtures("either_device")
def test_3_residuals_are_bit_identical_after_an_infinite_gradient():
    quiet, loud = run_ranks(2, infinite_beside_large)
    assert quiet == ([0, 0], [0, 0], True)
    assert loud[0] == loud[1] == [0, pytest.approx(1e-3)]
    assert loud[2]


def growing(rank, rule, values, fallback, action):
    parameters = {"w": torch.zeros(4, dtype=torch.float16), "v": torch.zeros(3)}
    model, handle = given_ddp(parameters, rule, values, fallback=fallback)
    local = torch.tensor([60000.0, 50000.0, 1, 1], dtype=torch.float16)
    total = torch.zeros(4, dtype=torch.float64)
    for step in range(10):
        if step == 3 and action:
            getattr(handle, action)()
        total += reduced(model, {"w": local, "v": torch.ones(3)})["w"].double()
    return total, handle.residual("w").double(), handle.traffic.bad_steps, 10 * local.double()


def every_third(data, mask):
    """Selects only what several steps have added up to."""
    mask.copy_(data.abs() > 150_000)


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("action", ["", "flush", "remove"])
@pytest.mark.parametrize("values", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("rule", [every_third, gradcomp.TopK(0.25)])
def test_sums_beyond_half_precision_wait_instead_of_overflowing(rule, values, action):
    """What a step cannot hold stays in the residual: refused, it would be there again in the next step, and for ever."""
    for total, residual, bad_steps, exact in run_ranks(2, growing, rule, values, "never", action):
        assert bad_steps == 0
        assert bool(total.isfinite().all())
        torch.testing.assert_close(total + residual, exact, rtol=2e-3, atol=1)  # the buffer itself holds 11 bits


def reciprocal_of_zero(rank):
    model, handle = given_ddp({"w": torch.zeros(4), "v": torch.zeros(3)}, gradcomp.TopK(0.5), "fp32", fallback="never")
    seen = []
    for step in range(3):
        big = 3e38 if step < 2 else 0.0
        grads = reduced(model, {"w": torch.tensor([big, big, big, 1.0]), "v": torch.ones(3)})
        seen.append(bool(grads["v"].isnan().all()))
    return seen, bool(handle.residual("w").isfinite().all())


@pytest.mark.usefixtures("either_device")
def test_a_residual_that_would_overflow_fp32_makes_a_bad_step_and_no_warning():
    assert run_ranks(2, reciprocal_of_zero) == [([False, True, False], True)] * 2


def raising(rank, name):
    model, handle = given_ddp(
        shapes(), gradcomp.TopK(0.1), "bf16", overrides={"d": gradcomp.Dense(), "*": gradcomp.TopK(0.1)}, on_nonfinite="raise"
    )
    reduced(model, grads(rank, 0))
    before = handle.residual("a")
    local = grads(rank, 1)
    if rank == 1:
        local[name].view(-1)[2] = float("nan")
    with pytest.raises(RuntimeError, match=f"NonFiniteError.*rank 1.*{name}"):
        reduced(model, local)
    assert torch.equal(handle.residual("a"), before)
    after = reduced(model, grads(rank, 2))
    assert all(bool(grad.isfinite().all()) for grad in after.values()), "training can go on"
    return type(handle.last_error), str(handle.last_error)


@pytest.mark.parametrize("name", ["a", "b", "d"])
def test_raise_names_rank_and_parameter_on_every_rank(name):
    for kind, text in run_ranks(2, raising, name):
        assert kind is gradcomp.NonFiniteError
        assert f"rank 1: the gradient of {name}" in text


def disagreeing(rank, kwargs_of_rank, rule_of_rank):
    torch.manual_seed(0)
    model = mixed_ddp()
    handle = register(model, rule_of_rank[rank], **kwargs_of_rank[rank])
    try:
        model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    except gradcomp.DesyncError as error:
        return str(error), handle.traffic.payload_bytes, handle.last_error is error
    return None


def disagreeing_elsewhere(rank):
    """The ranks differ about parameters of the last bucket only; how small ones of the first travel depends on those too."""
    sizes = {"p0": (1365,), "p1": (1365,), "pad": (300000,), "p2": (1000,), "p3": (40, 40)}
    other = gradcomp.TopK(0.01) if rank == 1 else gradcomp.Dense()
    overrides = {"p0": other, "p1": other, "p2": gradcomp.Dense(), "p3": gradcomp.TopK(0.01), "pad": gradcomp.Dense()}
    parameters = {name: torch.zeros(size) for name, size in sizes.items()}
    ddp = {"bucket_cap_mb": 0.01, "find_unused_parameters": True}
    model, handle = given_ddp(parameters, None, "fp32", overrides=overrides, ddp=ddp)
    with pytest.raises(gradcomp.DesyncError, match=r"rank 1 disagrees with rank 0 on parameter p0: .*TopK"):
        reduced(model, {name: torch.ones(size) for name, size in sizes.items()})
    return handle.traffic.payload_bytes


def test_a_disagreement_about_a_later_bucket_is_found_in_the_first():
    assert run_ranks(4, disagreeing_elsewhere) == [0] * 4


@dataclass
class Unhashable:
    """A plain dataclass, which Python makes unhashable, holding a function, whose repr is an address."""

    function: object

    def mask_(self, data, mask):
        mask.copy_(self.function(data))


def with_unhashable(rank):
    model, handle = given_ddp(shapes(), Unhashable(lambda data: data > 1), "bf16", fallback="never")
    reduced(model, grads(rank, 0))
    return handle.traffic.steps


@pytest.mark.usefixtures("either_device")
def test_any_object_can_be_a_rule():
    assert run_ranks(2, with_unhashable) == [1, 1]


TOPK = gradcomp.TopK(0.01)


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize(
    ("rules", "options", "words"),
    [
        ([TOPK, TOPK, TOPK], [{"values": "bf16"}, {"values": "bf16"}, {"values": "fp32"}], ["rank 2", "values", "fp32 against bf16"]),
        ([TOPK, gradcomp.TopK(0.02), TOPK], [{}] * 3, ["rank 1", "on parameter embed.weight", "TopK(density=0.02)", "TopK(density=0.01)"]),
        ([TOPK, TOPK, TOPK], [{}, {"fallback": "never"}, {}], ["rank 1", "fallback", "never against dense"]),
        ([TOPK, TOPK, TOPK], [{}, {}, {"overrides": {"embed.*": gradcomp.Dense()}}], ["rank 2", "embed.weight", "Dense()"]),
    ],
)
def test_ranks_that_disagree_all_raise_before_a_payload_moves(rules, options, words):
    for text, payload_bytes, remembered in run_ranks(3, disagreeing, options, rules):
        assert all(word in text for word in words), text
        assert payload_bytes == 0
        assert remembered


def wrongly_registered(rank):
    model = mixed_ddp()
    errors = []
    attempts = [
        (lambda: register(model.module), "ddp_model must be"),
        (lambda: register(model, 0.01), "rule must be a rule"),
        (lambda: register(model, gradcomp.TopK), "got the class TopK"),
        (lambda: register(model, values="fp8"), "values must be one of"),
        (lambda: register(model, values=["bf16"]), "values must be one of"),
        (lambda: register(model, overrides={0: TOPK}), "got the key 0"),
        (lambda: register(model, lambda data: data > 0), "of data and mask"),
        (lambda: gradcomp.SparseState(TOPK), "module must be a torch.nn.Module"),
        (lambda: register(model, on_nonfinite="ignore"), "on_nonfinite must be one of"),
        (lambda: register(model, fallback="maybe"), "fallback must be one of"),
        (lambda: gradcomp.SparseState(nn.Module()), "must have parameters"),
        (lambda: register(model, grad_scaler=4.0), "grad_scaler must be a torch.amp.GradScaler or None, got a float"),
        (lambda: register(model, check="yes"), "check must be one of"),
        (lambda: gradcomp.SparseState(Given(w=torch.zeros(2, device="meta"))), "must be on the CPU"),
    ]
    for attempt, words in attempts:
        with pytest.raises(ValueError, match=words) as caught:
            attempt()
        errors.append(str(caught.value))
    register(model)
    with pytest.raises(gradcomp.GradcompError, match="already"):
        register(model)
    return len(errors)


def test_wrong_settings_are_refused_with_field_and_value():
    assert run_ranks(1, wrongly_registered) == [14]


def registered_on_none(rank):
    model = mixed_ddp()
    model.register_comm_hook(None, gradcomp.sparse_hook)
    with pytest.raises(ValueError, match=r"state must be a gradcomp\.SparseState"):
        model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    return True


def test_a_hook_without_a_state_says_what_is_missing():
    assert run_ranks(1, registered_on_none) == [True]


def desynchronised_payload(rank):
    """A payload that is not what it should be is found in a callback: the error arrives from backward() and is remembered."""
    model, handle = given_ddp(shapes(), TOPK, "bf16", fallback="never", check=False)
    for step in range(3):  # past the bucket rebuild, whose digest would find it first
        reduced(model, grads(rank, step))
    handle._agenda.number += rank  # as if one rank had skipped a step
    with pytest.raises(RuntimeError, match=r"DesyncError: rank \d sent step"):
        reduced(model, grads(rank, 1))
    return type(handle.last_error)


def test_a_rank_at_another_step_is_found():
    assert run_ranks(2, desynchronised_payload) == [gradcomp.DesyncError] * 2


def failing(rank):
    calls = []

    def rule(data, mask):
        calls.append(1)
        if len(calls) > 4:
            raise KeyError("no such thing")
        mask.fill_(True)

    model, handle = given_ddp(shapes(), rule, ddp={"bucket_cap_mb": 0.005}, fallback="never")
    reduced(model, grads(rank, 0))
    with pytest.raises(gradcomp.GradcompError, match=r"rule .*failing.*rule failed on parameter \w: KeyError\('no such thing'\)"):
        reduced(model, grads(rank, 1))
    return type(handle.last_error)


@pytest.mark.usefixtures("either_device")
def test_an_error_in_a_rule_reaches_the_user():
    assert run_ranks(2, failing) == [gradcomp.GradcompError] * 2
