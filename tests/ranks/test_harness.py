"""The harness itself: a test that relies on it must be able to fail."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def summed(rank, amount):
    total = torch.tensor(float(rank + amount))
    dist.all_reduce(total)
    return total.item()


def one_fails(rank):
    if rank == 1:
        raise KeyError("the culprit")
    dist.barrier()


def one_dies(rank):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def one_hangs(rank):
    if rank == 1:
        time.sleep(60)
    return rank


def test_results_come_in_rank_order():
    assert run_ranks(3, summed, 10) == [33.0] * 3


def test_the_first_failing_rank_is_the_one_reported():
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed:.*one_fails.*the culprit"):
        run_ranks(2, one_fails)


def test_a_rank_that_dies_is_reported():
    with pytest.raises(AssertionError, match="rank 1 failed:\ndied with exit code 7"):
        run_ranks(2, one_dies)


def test_a_rank_that_hangs_is_killed():
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(2, one_hangs, timeout_s=4)
    assert time.monotonic() - start < 30
