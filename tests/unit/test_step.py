"""A step is all or nothing, whichever thread finishes it and in whatever order."""

import threading

import pytest
import torch

from gradcomp.ddp.step import Step


class FakeFlight:
    def __init__(self, number):
        self.result = torch.tensor([float(number)])


def started(complete=lambda step: None):
    failures = []
    return Step(3, flags=0, flush=False, complete=complete, failed=failures.append), failures


def test_no_bucket_is_delivered_before_the_last_has_arrived():
    completed = []
    step, failures = started(completed.append)
    sources = [torch.futures.Future() for _ in range(3)]
    received = []
    delivered = []
    for number, source in enumerate(sources):
        step.watch(source, received.append)
        delivered.append(step.board(FakeFlight(number), is_last=number == 2))
    for number in (2, 0):
        sources[number].set_result(number)
    assert not any(future.done() for future in delivered)
    assert not completed
    sources[1].set_result(1)
    assert [future.wait().item() for future in delivered] == [0, 1, 2]
    assert received == [2, 0, 1]
    assert completed == [step]
    assert failures == []


def test_a_step_whose_buckets_arrived_early_waits_for_the_last_to_be_issued():
    completed = []
    step, _ = started(completed.append)
    source = torch.futures.Future()
    source.set_result(0)
    step.watch(source, lambda value: None)
    first = step.board(FakeFlight(0), is_last=False)
    assert not first.done()
    assert not completed
    last = step.board(FakeFlight(1), is_last=True)
    assert (first.wait().item(), last.wait().item(), len(completed)) == (0, 1, 1)


@pytest.mark.parametrize("where", ["receive", "complete", "fail"])
def test_an_error_reaches_every_bucket(where):
    def raising(value):
        raise KeyError("broken")

    step, failures = started(raising if where == "complete" else lambda step: None)
    sources = [torch.futures.Future() for _ in range(2)]
    delivered = []
    for number, source in enumerate(sources):
        step.watch(source, raising if where == "receive" and number == 0 else lambda value: None)
        delivered.append(step.board(FakeFlight(number), is_last=number == 1))
    if where == "fail":
        step.fail(KeyError("broken"))
    for source in sources:
        source.set_result(0)
    for future in delivered:
        with pytest.raises(RuntimeError, match="KeyError: 'broken'"):
            future.wait()
    assert [type(error) for error in failures] == [KeyError]


def test_arrivals_of_many_threads_complete_a_step_once():
    for _ in range(30):
        completed = []
        step, _ = started(completed.append)
        sources = [torch.futures.Future() for _ in range(8)]
        for source in sources:
            step.watch(source, lambda value: None)
        delivered = step.board(FakeFlight(5), is_last=True)
        threads = [threading.Thread(target=source.set_result, args=(0,)) for source in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert delivered.wait().item() == 5
        assert len(completed) == 1
