"""DelayAwareAdamW against the obvious loop over one coordinate, and against torch's AdamW where nothing is late."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import delay_aware_adamw

from gradcomp.optim import DelayAwareAdamW

pytestmark = pytest.mark.usefixtures("either_way")


def sparse_gradients(steps, shape, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < density) for _ in range(steps)]


def run(optimizer, parameters, steps):
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()


@given(
    st.floats(0, 1), st.integers(1, 12), st.integers(0, 99), st.sampled_from([0.0, 0.1]), st.sampled_from([(0.9, 0.999), (0.0, 0.5)]),
    st.sampled_from([None, 1.0, 0.3, 2]),
)  # fmt: skip
def test_every_coordinate_against_the_oracle(density, max_delay, seed, weight_decay, betas, clip_threshold):
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    start = parameter.detach().flatten().tolist()
    settings = {"lr": 0.01, "betas": betas, "weight_decay": weight_decay, "max_delay": max_delay, "clip_threshold": clip_threshold}
    steps = sparse_gradients(15, (3, 4), density, seed)
    run(DelayAwareAdamW([parameter], **settings), [parameter], [[gradient] for gradient in steps])
    expected = torch.tensor(delay_aware_adamw(start, torch.stack(steps).flatten(1).tolist(), **settings))
    torch.testing.assert_close(parameter.detach().flatten(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0, "betas": (0.8, 0.99)}, {"maximize": True}, {"foreach": True}])
def test_not_delayed_is_adamw_bit_for_bit(options):
    ours, torchs = [[torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (30, 7)] for _ in range(2)]
    steps = [sparse_gradients(1, 30, 0.5, seed) + [torch.randn(7, generator=torch.Generator().manual_seed(seed))] for seed in range(9)]
    options = {"lr": 0.01, "betas": (0.9, 0.999)} | options
    run(DelayAwareAdamW(ours, delayed=False, **options), ours, steps)
    run(torch.optim.AdamW(torchs, **options), torchs, steps)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs))


# The last one's moments have nothing to correct after 41 steps.
@pytest.mark.parametrize("options", [{}, {"maximize": True, "weight_decay": 0.0}, {"betas": (0.5, 0.6)}])
def test_without_delays_it_is_adamw_to_rounding(options):
    ours, torchs = [[torch.nn.Parameter(torch.linspace(-1, 1, 30))] for _ in range(2)]
    steps = [sparse_gradients(1, 30, 1.0, seed) for seed in range(50)]
    options = {"lr": 0.01, "betas": (0.9, 0.999)} | options
    run(DelayAwareAdamW(ours, **options), ours, steps)
    run(torch.optim.AdamW(torchs, **options), torchs, steps)
    torch.testing.assert_close(ours[0], torchs[0], rtol=1e-5, atol=1e-6)


def test_a_steady_burst_goes_as_far_as_what_it_is_made_of():
    late, prompt = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    adam = torch.nn.Parameter(torch.zeros(1))
    whole = [[torch.ones(1)]] * 40
    bursts = [[torch.full((1,), 4.0 if step % 4 == 3 else 0.0)] for step in range(40)]
    run(DelayAwareAdamW([prompt], lr=0.01, weight_decay=0.0), [prompt], whole)
    run(DelayAwareAdamW([late], lr=0.01, weight_decay=0.0, clip_threshold=None), [late], bursts)
    run(torch.optim.AdamW([adam], lr=0.01, weight_decay=0.0), [adam], bursts)
    assert float(late.detach()) == pytest.approx(float(prompt.detach()), rel=1e-3)
    assert float(adam.detach()) > 0.8 * float(prompt.detach())  # towards -0.4: plain Adam falls short


@pytest.mark.parametrize("clip_threshold", [1.0, 0.25, None])
def test_first_arrivals_of_many_coordinates_move_a_parameter_no_further_than_the_threshold(clip_threshold):
    parameter = torch.nn.Parameter(torch.zeros(800))
    optimizer = DelayAwareAdamW([parameter], lr=0.5, weight_decay=0.0, clip_threshold=clip_threshold)
    arriving = torch.arange(800).view(8, 100)
    moved = []
    for step in range(8):  # an eighth of the coordinates a step, each with all that it has collected
        gradient = torch.zeros(800)
        gradient[arriving[step]] = float(step + 1)
        before = parameter.detach().clone()
        run(optimizer, [parameter], [[gradient]])
        moved.append(float((parameter.detach() - before).square().mean().sqrt() / 0.5))
    alone = [(step + 1) / 8**0.5 for step in range(8)]  # t = step + 1 steps of length 1, an eighth of the coordinates
    assert moved == pytest.approx([length if clip_threshold is None else min(length, clip_threshold) for length in alone], rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_no_other_coordinate(bad):
    spoilt, sound = torch.nn.Parameter(torch.zeros(100)), torch.nn.Parameter(torch.zeros(100))
    steps = [[torch.randn(100, generator=torch.Generator().manual_seed(seed))] for seed in range(4)]
    steps[0][0][5] = 0.0
    run(DelayAwareAdamW([sound], lr=0.1, clip_threshold=0.1), [sound], steps[:1])
    steps[0][0][5] = bad
    optimizer = DelayAwareAdamW([spoilt], lr=0.1, clip_threshold=0.1)
    run(optimizer, [spoilt], steps[:1])
    others = torch.arange(100) != 5
    torch.testing.assert_close(spoilt[others], sound[others])
    before = spoilt.detach().clone()
    run(optimizer, [spoilt], steps[1:2])  # what it has left in the moments does not lift the threshold later
    moved = (spoilt.detach() - before)[others].square().sum() / 100
    assert float(moved.sqrt()) == pytest.approx(0.01, rel=1e-3)


def test_no_eps_and_a_gradient_whose_square_is_nothing():
    parameter = torch.nn.Parameter(torch.zeros(3))
    run(DelayAwareAdamW([parameter], lr=0.1, eps=0.0, weight_decay=0.0), [parameter], [[torch.tensor([1.0, 1e-25, -1.0])]])
    assert parameter.tolist() == [pytest.approx(-0.1), -math.inf, pytest.approx(0.1)]


def test_what_was_pickled_before_there_was_a_threshold():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = DelayAwareAdamW([parameter])
    del optimizer.defaults["clip_threshold"], optimizer.param_groups[0]["clip_threshold"]
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.param_groups[0]["clip_threshold"] == 1.0
    [parameter] = again.param_groups[0]["params"]
    run(again, [parameter], [[torch.ones(3)]])
    again.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "clip_threshold": 1.0})
    assert float(parameter[0].detach()) < 1


def test_how_adamw_computed_is_not_loaded_and_amsgrad_is_refused_before_anything_changes():
    parameter = torch.nn.Parameter(torch.ones(3))
    other = torch.nn.Parameter(torch.ones(3))
    fused, amsgrad = torch.optim.AdamW([other], fused=True, lr=0.5), torch.optim.AdamW([other], amsgrad=True)
    for optimizer in (fused, amsgrad):
        run(optimizer, [other], [[torch.ones(3)]])
    delayed = DelayAwareAdamW([parameter], lr=0.1)
    with pytest.raises(ValueError, match="amsgrad is not for a delayed group"):
        delayed.load_state_dict(amsgrad.state_dict())
    assert not delayed.state
    assert delayed.param_groups[0]["lr"] == 0.1
    delayed.load_state_dict(fused.state_dict())
    assert delayed.param_groups[0]["lr"] == 0.5
    assert not delayed.param_groups[0]["fused"]
    run(delayed, [parameter], [[torch.ones(3)]])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        delayed.load_state_dict({"state": {}, "param_groups": []})


def test_groups_of_both_kinds():
    weight, bias = torch.nn.Parameter(torch.ones(40, 3)), torch.nn.Parameter(torch.ones(5))
    alone = torch.nn.Parameter(torch.ones(5))
    optimizer = DelayAwareAdamW([{"params": [weight]}, {"params": [bias], "delayed": False}], lr=0.1, betas=(0.9, 0.999))
    steps = [[late, torch.full((5,), 0.1 * step)] for step, late in enumerate(sparse_gradients(6, (40, 3), 0.3))]
    run(optimizer, [weight, bias], steps)
    run(torch.optim.AdamW([alone], lr=0.1), [alone], [[gradient] for _, gradient in steps])
    assert torch.equal(bias, alone)
    assert set(optimizer.state[bias]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[weight]) == {"step", "delay", "age", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[weight]["delay"].dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_saved_and_loaded_it_goes_on_as_if_nothing_had_been(dtype):
    def made():
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 60, dtype=dtype).view(6, 10))
        return parameter, DelayAwareAdamW([parameter], lr=0.05, max_delay=5)

    steps = [[gradient.to(dtype)] for gradient in sparse_gradients(20, (6, 10), 0.2)]
    straight, optimizer = made()
    run(optimizer, [straight], steps)

    first, optimizer = made()
    run(optimizer, [first], steps[:11])
    saved = copy.deepcopy(optimizer.state_dict())
    second, resumed = made()
    second.data.copy_(first.data)
    resumed.load_state_dict(saved)
    state = resumed.state[second]
    assert (state["delay"].dtype, state["age"].dtype) == (torch.uint8, torch.float32)
    run(resumed, [second], steps[11:])
    assert torch.equal(second, straight)
    run(optimizer, [first], steps[11:])  # what was saved is a copy: going on with the first changes nothing
    assert torch.equal(first, straight)


def test_it_goes_on_from_what_adamw_saved():
    torchs, ours = [[torch.nn.Parameter(torch.linspace(-1, 1, 30))] for _ in range(2)]
    steps = [sparse_gradients(1, 30, 1.0, seed) for seed in range(20)]
    adamw, delayed = torch.optim.AdamW(torchs, lr=0.01), DelayAwareAdamW(ours, lr=0.01)
    run(adamw, torchs, steps[:10])
    ours[0].data.copy_(torchs[0].data)
    saved = copy.deepcopy(adamw.state_dict())
    delayed.load_state_dict(saved)
    run(adamw, torchs, steps[10:])
    run(delayed, ours, steps[10:])
    torch.testing.assert_close(ours[0], torchs[0], rtol=1e-5, atol=1e-6)


def test_settings_that_adamw_did_not_save_stay_as_they_were():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = DelayAwareAdamW(
        [{"params": parameters[:1], "max_delay": 3, "clip_threshold": 0.7}, {"params": parameters[1:], "delayed": False}]
    )
    optimizer.load_state_dict(torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.5).state_dict())
    found = [tuple(group[name] for name in ("delayed", "max_delay", "clip_threshold", "lr")) for group in optimizer.param_groups]
    assert found == [(True, 3, 0.7, 0.5), (False, 8, 1.0, 0.5)]


def test_hooks_run_once_where_torch_has_wrapped_its_own_step_before():
    program = (
        "import torch\ntorch.optim.AdamW([torch.ones(1, requires_grad=True)])  # torch wraps AdamW's own step when one is made\n"
        "from gradcomp.optim import DelayAwareAdamW\n"
        "late, whole = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)\n"
        "late.grad, whole.grad, seen = torch.ones(3), torch.ones(3), []\n"
        "optimizer = DelayAwareAdamW([{'params': [late]}, {'params': [whole], 'delayed': False}])\n"
        "optimizer.register_step_post_hook(lambda *_: seen.append(1))\n"
        "optimizer.step()\nprint(seen, bool((late < 1).all()), bool((whole < 1).all()))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[1] True True"


def test_hooks_run_once_around_all_groups():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = DelayAwareAdamW([{"params": parameters[:1]}, {"params": parameters[1:], "delayed": False}], lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda self, *_: seen.append(len(self.param_groups)))
    optimizer.register_step_post_hook(lambda self, *_: seen.append([float(p.detach()[0]) for p in parameters]))
    run(optimizer, parameters, [[torch.ones(3), torch.ones(3)]])
    assert seen[0] == 2
    assert len(seen) == 2
    assert all(value < 0.95 for value in seen[1])


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "fused", "differentiable"])
def test_options_that_a_delayed_group_would_ignore_are_refused(option):
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=f"{option} is not for a delayed group"):
        DelayAwareAdamW([{"params": [parameter], option: True}])
    optimizer = DelayAwareAdamW([parameter])
    with pytest.raises(ValueError, match=f"{option} is not for a delayed group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], option: True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 4)])
def test_any_shape(shape):
    parameter = torch.nn.Parameter(torch.ones(shape))
    run(DelayAwareAdamW([parameter], lr=0.1, weight_decay=0.0), [parameter], [[torch.ones(shape)]])
    torch.testing.assert_close(parameter.detach(), torch.full(shape, 0.9))


def test_strides_do_not_matter():
    start = torch.linspace(-1, 1, 2 * 3 * 4 * 5).view(2, 3, 4, 5)
    plain, last = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone().to(memory_format=torch.channels_last))
    steps = sparse_gradients(10, start.shape, 0.3)
    run(DelayAwareAdamW([plain], lr=0.05), [plain], [[gradient] for gradient in steps])
    run(DelayAwareAdamW([last], lr=0.05), [last], [[gradient.to(memory_format=torch.channels_last)] for gradient in steps])
    torch.testing.assert_close(last.detach(), plain.detach(), rtol=1e-6, atol=1e-7)


def test_a_parameter_without_a_gradient_is_left_alone():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = DelayAwareAdamW([parameter], lr=0.1)
    run(optimizer, [parameter], [[None]])
    assert torch.equal(parameter, torch.ones(4))
    assert not optimizer.state


def test_closures_schedulers_and_later_groups():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = DelayAwareAdamW([parameter], lr=0.1, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = parameter.sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 4.0
    scheduler.step()
    optimizer.step(closure)
    torch.testing.assert_close(parameter.detach(), torch.full((4,), 0.85))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "max_delay": 3})
    assert [group["max_delay"] for group in optimizer.param_groups] == [8, 3]
    assert optimizer.param_groups[1]["delayed"] is True


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_delay", 0), ("max_delay", 255), ("max_delay", 1.5), ("max_delay", "8"), ("delayed", 1), ("clip_threshold", 0),
        ("clip_threshold", -1.0), ("clip_threshold", float("nan")), ("clip_threshold", "1"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(field, value):
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=f"{field} must be .*got {value!r}"):
        DelayAwareAdamW([parameter], **{field: value})
    with pytest.raises(ValueError, match=f"{field} must be"):
        DelayAwareAdamW([{"params": [parameter], field: value}])
    optimizer = DelayAwareAdamW([parameter])
    with pytest.raises(ValueError, match=f"{field} must be"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], field: value})


def test_what_cannot_be_delayed():
    with pytest.raises(ValueError, match="delayed must be False for a group of complex"):
        DelayAwareAdamW([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse tensors"):
        DelayAwareAdamW(table.parameters()).step()
