"""The accuracy studies run, end to end, on a small scale."""

import json
import math

import bench_accuracy
import bench_layers
import pytest
import torch
from simulator import Workers

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
        ("dgc:topk-0.1-bf16", (1.5, 4)),
        ("delayed:topk-0.1-sign", (0.5, 1.5)),
    ],
)
def test_every_kind_of_method_learns(method, bits):
    rate = {"sgd": 0.1, "dgc": 0.03}.get(method.split(":")[0], 0.003)
    done = bench_accuracy.run(job(method, rate=rate))
    assert 100 / 10 < done["result"] <= 100
    assert bits[0] <= done["bits"] <= bits[1]
    assert math.isclose(done["sent_bits"], done["bits"], rel_tol=0.05)  # of two workers
    assert bench_accuracy.run(job(method, rate=rate))["result"] == done["result"], "a seed decides"


def test_a_warm_up_costs_bits():
    cold, warm = (bench_accuracy.run(job(f"sgd:topk-0.02-bf16{suffix}", steps=20))["bits"] for suffix in ("", "-warm"))
    assert warm > 1.05 * cold


def test_corrected_momentum_is_the_hooks_and_not_the_optimizers():
    net = torch.nn.Linear(40, 40)
    assert bench_accuracy.optimizer_of("dgc", net, 0.1, 8).defaults["momentum"] == 0
    assert bench_accuracy.optimizer_of("sgd", net, 0.1, 8).defaults["momentum"] == 0.9
    assert bench_accuracy.optimizer_of("sgd-0.5", net, 0.1, 8).defaults["momentum"] == 0.5
    assert bench_accuracy.optimizer_of("dgc-0.5", net, 0.1, 8).defaults["momentum"] == 0
    with pytest.raises(ValueError, match=r"only sgd and dgc have a momentum, got adamw-0\.5"):
        bench_accuracy.optimizer_of("adamw-0.5", net, 0.1, 8)
    for exchange in ("dense", "fp16", "powersgd-1"):  # which would have no momentum at all
        with pytest.raises(ValueError, match=f"got dgc:{exchange}"):
            bench_accuracy.hook_of("dgc", exchange, 10)
    for kind, momentum in (("dgc", 0.9), ("dgc-0.5", 0.5), ("sgd", 0.0), ("sgd-0.5", 0.0)):
        workers = Workers(net, 2, bench_accuracy.hook_of(kind, "topk-0.1-fp32", 10))
        assert workers.handles[0].settings.momentum == momentum
        workers.step([torch.ones(1, 40)] * 2, lambda net, batch: net(batch).sum())
        assert bool(workers.handles[0].velocity("weight").any()) == bool(momentum)


def test_the_layer_table(monkeypatch):
    monkeypatch.setitem(bench_layers.LAYERS["convolution"], "task", "cnn-digits")  # whose data needs less installed
    job = {"layers": "convolution", "threshold": 1e-3, "values": "bf16", "steps": 3, "seed": 1}
    sparse, all_of_it, dense = (bench_layers.run(job | {"threshold": threshold}) for threshold in (1e-3, 1e-12, None))
    assert 0 < sparse["density"] < 0.5
    assert all_of_it["density"] > 0.7  # some gradients are zero by themselves
    assert 0.4 < all_of_it["saved"] < 0.5 < sparse["saved"] < 1  # bf16 values, and a bit an element for where they are
    assert (dense["density"], dense["saved"]) == (1.0, 0.0)
    assert bench_layers.run(job)["density"] == sparse["density"], "a seed decides"


def test_delayed_spares_what_is_sent_whole():
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(4, 4))
    optimizer = bench_accuracy.optimizer_of("delayed", net, 0.01, 5)
    assert isinstance(optimizer, DelayAwareAdamW)
    late, whole = optimizer.param_groups
    assert [tuple(p.shape) for p in late["params"]] == [(64, 64)]
    assert (late["delayed"], late["max_delay"], whole["delayed"]) == (True, 5, False)
    assert len(whole["params"]) == 3


def test_a_run_is_refused_by_other_code_than_that_of_its_study():
    with pytest.raises(RuntimeError, match="was changed while the study ran"):
        bench_accuracy.run({"code": f"{bench_accuracy.code()}?"})


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
    with monkeypatch.context() as changed:
        changed.setattr(bench_accuracy, "code", lambda: "other")
        bench_accuracy.main([*arguments, "--rates", "0.001"])
    assert len(ran) == 8 + 6  # but not for other code
    del ran[8:]
    capsys.readouterr()
    bench_accuracy.main([*arguments, "--total-bits", "3.5"])  # every run here takes one bit a step
    assert [job["steps"] for job in ran[8:]] == [bench_accuracy.PROBE] * 2 + [3] * 8
    assert [row["steps"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]] == [3, 3]
