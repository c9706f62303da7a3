"""check=True finds what goes wrong: each test breaks something, on one rank, and reads the error."""

import warnings

import numpy as np
import pytest
import soak
import torch
from nets import given_ddp, reduced
from ranks import run_ranks

import gradcomp
from gradcomp.core.feedback import Feedback
from gradcomp.ddp import payload
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.flight import Flight


def loses_one(self, name, grad, parts, **how):
    """Loses the first element that was not sent."""
    right_complete(self, name, grad, parts, **how)
    if name == "w":
        self._residuals[name][int(np.flatnonzero(self._residuals[name].numpy())[0])] = 0


def keeps_less(self, name, grad, parts, **how):
    """Forgets that the wire rounded."""
    right_complete(self, name, grad, parts, **how)
    if name == "w":
        self._residuals[name].numpy()[parts[how["own"]][0]] = 0


def broken_land(self, feedback):
    right_land(self, feedback)
    if len(self.plan.sparse):
        self.plan.sparse[0].part(self._buffer)[-1] += 1


right_complete, right_land, right_spoil = Feedback.complete, Flight.land, Flight.spoil


def broken(rank, how):
    model, handle = given_ddp(
        {"w": torch.zeros(40, 40), "v": torch.zeros(5), "d": torch.zeros(9000)},
        None,
        "bf16",
        overrides={"w": gradcomp.TopK(0.05), "*": gradcomp.Dense()},
        ddp={"bucket_cap_mb": 0.01},
        fallback="never",
    )
    generator = torch.Generator().manual_seed(rank)
    grads = {"w": torch.randn(40, 40, generator=generator), "v": torch.ones(5), "d": torch.ones(9000)}
    reduced(model, grads)
    if rank == 1:
        how(model, handle)
    texts = []
    for _ in range(2):
        try:
            reduced(model, grads)
        except (RuntimeError, gradcomp.GradcompError) as error:
            texts.append(f"{type(error).__name__}: {error}")
            break
    return texts, type(handle.last_error).__name__


def loses(model, handle):
    Feedback.complete = loses_one


def forgets_rounding(model, handle):
    Feedback.complete = keeps_less


def fills_wrongly(model, handle):
    Flight.land = broken_land


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (loses, "AccountingError: the residual of w is wrong in 1 of 1600 elements"),
        (forgets_rounding, "AccountingError: the residual of w is wrong in"),
        (fills_wrongly, "AccountingError: the mean gradient of w is wrong in 1 of 1600 elements, by at most 1.0"),
    ],
)
def test_what_is_lost_or_delivered_wrongly_is_found_on_its_rank(how, words):
    with pytest.raises(AssertionError) as caught:  # the other rank goes on, and finds its peer gone
        run_ranks(2, broken_and_told, how, words, timeout_s=20)
    assert "found: True" in str(caught.value), str(caught.value)


def broken_and_told(rank, how, words):
    texts, kind = broken(rank, how)
    if rank == 1:
        raise AssertionError(f"found: {kind == 'AccountingError' and words in texts[0]} {texts}")


def changes_a_weight(model, handle):
    model.module.v.data[2] += 1e-6


def changes_the_ring(model, handle):
    """A network that gives one rank another sum."""
    ring = Exchange.ring

    def altered(self, tensor):
        def alter(future):
            tensor[0] += 1
            return tensor

        return ring(self, tensor).then(alter)

    Exchange.ring = altered


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (changes_a_weight, "rank 1 disagrees with rank 0 on the value of parameter v before step 1"),
        (changes_the_ring, "rank 1 disagrees with rank 0 on the reduced gradient of d in the last step"),
    ],
)
def test_replicas_that_differ_are_found_on_all_ranks(how, words):
    for texts, kind in run_ranks(2, broken, how):
        assert kind == "DesyncError"
        assert words in texts[0]


def rescaled_on_one_rank(rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, _ = given_ddp({"w": torch.zeros(40, 40), "v": torch.zeros(5)}, gradcomp.TopK(0.1), grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    grads = {"w": torch.ones(40, 40), "v": torch.ones(5)}
    scaler.scale(model(grads)).backward()
    scaler.step(optimizer)
    scaler.update(2.0 if rank else None)
    with pytest.raises(gradcomp.DesyncError, match=r"rank 1 disagrees with rank 0 on the loss scale of step 1: 2\.0 against 4\.0"):
        scaler.scale(model(grads)).backward()
    return True


def test_a_loss_scale_that_one_rank_changes_is_found():
    assert run_ranks(2, rescaled_on_one_rank) == [True, True]


def touches_after_a_bad_step(rank):
    """A bad step must leave residuals alone; here one does not."""
    model, handle = given_ddp({"w": torch.zeros(40, 40), "v": torch.zeros(5)}, gradcomp.TopK(0.1), fallback="never")
    grads = {"w": torch.arange(1600.0).view(40, 40), "v": torch.ones(5)}
    reduced(model, grads)

    def spoil(self):
        right_spoil(self)
        handle._feedback.get("w")[3] += 1

    Flight.spoil = spoil
    grads["w"][0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="AccountingError: the residual of w is wrong in 1 of 1600 elements, by at most 1"):
        reduced(model, grads)
    return True


def test_a_residual_touched_by_a_bad_step_is_found():
    assert run_ranks(2, touches_after_a_bad_step) == [True, True]


def soaked(rank, seed, values):
    record = soak.soak(120, seed, values, check=True, quiet=True)
    return record["difference"], record["replicas_equal"], min(record[key] for key in ("bad", "skipped_inputs", "unused", "restarts"))


@pytest.mark.parametrize(("seed", "values"), [(1, "bf16"), (3, "fp32")])
def test_a_soak_under_random_faults_loses_nothing(seed, values):
    for difference, equal, least in run_ranks(4, soaked, seed, values, timeout_s=120):
        assert difference == 0
        assert equal
        assert least > 0, "every kind of fault has happened"


# What travels by an all-reduce, or rides without a residual, is checked too


def zeroes_its_ring(model, handle):
    ring = Exchange.ring
    Exchange.ring = lambda self, tensor: ring(self, tensor.zero_())


def doubles_sparse_gradients(model, handle):
    ring = Exchange.ring_coo
    Exchange.ring_coo = lambda self, tensor: ring(self, tensor.mul_(2))


def everything_dense(rank, how, options):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = torch.nn.Embedding(20, 30, sparse=True), torch.nn.Linear(30, 3000)

        def forward(self, ids):
            return self.head(self.table(ids)).square().sum()

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Net())
    handle = gradcomp.register(model, overrides={"*": gradcomp.Dense()}, check=True, **options)
    for step in range(4):
        if step == 2 and rank == 1 and how is not None:
            how(model, handle)
        model.zero_grad()
        try:
            model(torch.tensor([1, 2 + rank])).backward()
        except gradcomp.AccountingError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("options", [{"values": "fp32"}, {"values": "bf16"}])
@pytest.mark.parametrize(("how", "name"), [(None, ""), (zeroes_its_ring, "head."), (doubles_sparse_gradients, "table.weight")])
def test_what_an_all_reduce_loses_is_found_on_all_ranks(how, name, options):
    for text in run_ranks(2, everything_dense, how, options):
        assert bool(text) == bool(name), text
        if name:
            assert text.startswith(f"the reduced gradient of {name}")
            assert "in the last step is not the mean of what the ranks gave" in text


def rides_wrongly(rank):
    overrides = {"w": gradcomp.TopK(0.1), "*": gradcomp.Dense()}
    model, _ = given_ddp({"v": torch.zeros(50), "w": torch.zeros(40, 40)}, None, "fp32", overrides=overrides, fallback="never")
    grads = {"v": torch.ones(50), "w": torch.zeros(40, 40)}
    reduced(model, grads)
    kept = payload.encode_values
    payload.encode_values = lambda values, *rest: kept(values * 0, *rest)
    with pytest.raises(RuntimeError, match="AccountingError: what was sent of v is wrong in 50 of 50 elements"):
        reduced(model, grads)
    return True


def test_what_rides_wrongly_is_found():
    assert run_ranks(2, rides_wrongly) == [True, True]


def quiet_check(rank, scale, values, dtype, size):
    """No cry of wolf: odd scales, subnormal and huge gradients, half precision."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, handle = given_ddp(
            {"w": torch.zeros(40, 40, dtype=dtype), "s": torch.zeros((), dtype=dtype), "v": torch.zeros(9000, dtype=dtype)}, None, values,
            overrides={"w": gradcomp.TopK(0.3), "s": gradcomp.Threshold(0.0), "*": gradcomp.Dense()}, grad_scaler=scaler, fallback="never",
        )  # fmt: skip
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + rank)
        grads = {name: size * torch.randn(shape, generator=generator) for name, shape in (("w", (40, 40)), ("s", ()), ("v", (9000,)))}
        grads["w"][3:9] = 0
        model.zero_grad()
        scaler.scale(model({name: grad.to(dtype) for name, grad in grads.items()})).backward()
        if step == 2:
            handle.flush()
        scaler.update(scale * (1.5 if scale == 1000.0 else 2.0) ** (step % 3))
    return handle.traffic.steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("scale", "size"), [(1000.0, 1.0), (65536.0, 1e-38), (65536.0, 1e4), (2.0**-20, 1.0), (3.0, 1e-3)])
@pytest.mark.parametrize("values", ["bf16", "fp16", "int8", "fp32"])
def test_the_check_never_cries_wolf(values, scale, size, dtype):
    assert run_ranks(2, quiet_check, scale, values, dtype, size) == [5, 5]
