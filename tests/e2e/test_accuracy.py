"""The accuracy studies run, end to end, on a small scale."""

import json
import math

import bench_accuracy
import pytest
import torch

from gradcomp.optim import DelayAwareAdamW


def job(method, **others):
    return {
        "task": "cnn-digits", "method": method, "rate": 0.003, "seed": 0, "steps": 40, "workers": 2, "max_delay": 8, "clip": 1.0, **others,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "bits"),
    [
        ("adamw:dense", (32, 32)),
        ("adamw:fp16", (16, 16)),
        ("adamw:powersgd-2", (1, 6)),
        ("sgd:topk-0.1-bf16", (1.5, 4)),
        ("delayed:topk-0.1-sign", (0.5, 1.5)),
    ],
)
def test_every_kind_of_method_learns(method, bits):
    done = bench_accuracy.run(job(method, rate=0.1 if method.startswith("sgd") else 0.003))
    assert 100 / 10 < done["result"] <= 100
    assert bits[0] <= done["bits"] <= bits[1]
    assert math.isclose(done["sent_bits"], done["bits"], rel_tol=0.05)  # of two workers
    assert bench_accuracy.run(job(method, rate=0.1 if method.startswith("sgd") else 0.003))["result"] == done["result"], "a seed decides"


def test_a_warm_up_costs_bits():
    cold, warm = (bench_accuracy.run(job(f"sgd:topk-0.02-bf16{suffix}", steps=20))["bits"] for suffix in ("", "-warm"))
    assert warm > 1.05 * cold


def test_delayed_spares_what_is_sent_whole():
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(4, 4))
    optimizer = bench_accuracy.optimizer_of("delayed", net, 0.01, 5)
    assert isinstance(optimizer, DelayAwareAdamW)
    late, whole = optimizer.param_groups
    assert [tuple(p.shape) for p in late["params"]] == [(64, 64)]
    assert (late["delayed"], late["max_delay"], whole["delayed"]) == (True, 5, False)
    assert len(whole["params"]) == 3


def test_a_study_keeps_its_runs_and_ends_in_a_record(tmp_path, capsys, monkeypatch):
    ran = []

    def run(asked):
        ran.append(asked)
        return {**asked, "result": 90.0 + asked["seed"] + 100 * asked["rate"], "bits": 1.0, "sent_bits": 3.0, "seconds": 0.0}

    class Pool:
        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731
        imap_unordered = staticmethod(map)

    monkeypatch.setattr(bench_accuracy, "run", run)
    monkeypatch.setattr(
        bench_accuracy.multiprocessing, "get_context", lambda kind: type("Context", (), {"Pool": staticmethod(lambda n: Pool())})
    )
    arguments = ["cnn-digits", "--steps", "5", "--seeds", "2", "--rates", "0.001", "0.01", "--out", str(tmp_path)]
    arguments += ["--methods", "adamw:dense", "delayed:topk-0.1-sign"]
    bench_accuracy.main(arguments)
    assert len(ran) == 8  # two rates and two seeds, for each method
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["rate"] for row in record["rows"]] == [0.01, 0.01]
    assert all(math.isclose(row["mean"], 92.5) and row["at_edge"] for row in record["rows"])
    assert (tmp_path / "cnn-digits-5.png").stat().st_size > 5_000
    bench_accuracy.main(arguments)
    assert len(ran) == 8  # they were kept
