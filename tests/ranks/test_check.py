"""check=True finds what goes wrong: each test breaks something, on one rank, and reads the error."""

import numpy as np
import pytest
import soak
import torch
from nets import given_ddp, reduced
from ranks import run_ranks

import gradcomp
from gradcomp.core.feedback import Feedback
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.flight import Flight


def broken_keep(self, name, grad, indices, released, unscale=1.0):
    """Loses the first element that was not sent."""
    right_keep(self, name, grad, indices, released, unscale)
    if name == "w":
        self._residuals[name][int(np.flatnonzero(self._residuals[name].numpy())[0])] = 0


def keeps_less(self, name, grad, indices, released, unscale=1.0):
    """Forgets that the wire rounded."""
    right_keep(self, name, grad, indices, released, unscale)
    if name == "w" and indices is not None:
        self._residuals[name].numpy()[indices] = 0


def broken_fill(self):
    right_fill(self)
    if len(self.plan.sparse):
        self.plan.sparse[0].part(self._buffer)[-1] += 1


right_keep, right_fill, right_spoil = Feedback.keep, Flight.fill, Flight.spoil


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
    Feedback.keep = broken_keep


def forgets_rounding(model, handle):
    Feedback.keep = keeps_less


def fills_wrongly(model, handle):
    Flight.fill = broken_fill


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
