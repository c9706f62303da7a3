"""Validation losses in the curve of scripts/train.py, the stop at a target, and the benchmark that is made of them."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_time_to_loss
import pytest
from test_netlab import lab  # noqa: F401

ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "12", "--d-model", "32", "--layers", "1", "--batch", "4", "--context", "32"]


def train(ranks, folder, *arguments):
    """Standard output and the record, curve included."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "scripts/train.py"]
    command += [*SMALL, *arguments, "--json", str(folder / "record.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    record = json.loads((folder / "record.json").read_text())
    assert json.loads(run.stdout.splitlines()[-1]) == {key: value for key, value in record.items() if key != "curve"}
    return run.stdout, record


def validated(record):
    return {point["step"]: point["val_loss"] for point in record["curve"] if "val_loss" in point}


def test_validation_losses_are_in_the_curve_and_change_nothing(tmp_path):
    _, without = train(2, tmp_path, "--hook", "none")
    assert validated(without) == {}
    _, record = train(2, tmp_path, "--hook", "none", "--validate-every", "5")
    assert list(validated(record)) == [5, 10, 12]
    assert validated(record)[12] == record["val_loss"] == without["val_loss"]
    assert validated(record)[5] > validated(record)[12], "it learns"
    assert [point["loss"] for point in record["curve"]] == [point["loss"] for point in without["curve"]]
    assert record["sent_bytes"] == without["sent_bytes"]


def test_a_target_ends_the_run_and_a_resumption_goes_on(tmp_path):
    checkpoints = ["--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "4", "--resume"]
    reached = [*checkpoints, "--validate-every", "4", "--target-loss", "100"]
    _, record = train(2, tmp_path, *reached)
    assert list(validated(record)) == [4]
    assert len(record["curve"]) == record["steps"] == 4
    out, record = train(2, tmp_path, *reached)
    assert "nothing was left to do" in out
    assert (record["resumed_at"], len(record["curve"])) == (4, 4)
    _, record = train(2, tmp_path, *checkpoints, "--validate-every", "3", "--target-loss", "0.001")
    assert list(validated(record)) == [4, 6, 9, 12]
    assert (record["resumed_at"], record["steps"]) == (4, 8)


def test_the_seconds_of_the_curve_leave_validation_out(tmp_path, monkeypatch):
    """By a clock that goes on by one at every look, and by 1000 in a validation."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import train as script

    now = 0

    def clock():
        nonlocal now
        now += 1
        return now

    def slow(*arguments):
        nonlocal now
        now += 1000
        return 2.5

    monkeypatch.setattr(script, "time", SimpleNamespace(perf_counter=clock, sleep=lambda seconds: None))
    monkeypatch.setattr(script, "validate", slow)
    monkeypatch.setattr(script.torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(script.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(script.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(script.dist, "barrier", lambda: None)
    monkeypatch.setattr(script, "DistributedDataParallel", lambda net, bucket_cap_mb: net)
    record = script.train(script.parse([*SMALL, "--hook", "none", "--validate-every", "5"]))
    assert now > 3000
    assert [point["seconds"] for point in record["curve"]] == list(range(1, 13))
    assert [point["step"] for point in record["curve"] if point.get("val_loss") == 2.5] == [5, 10, 12]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scripts/train.py", "--validate-every", "-1"], "--validate-every must be at least 0, got -1"),
        (["scripts/train.py", "--validate-every", "1", "--target-loss", "nan"], "--target-loss must be above 0, got nan"),
        (["scripts/train.py", "--target-loss", "2"], "--target-loss needs --validate-every"),
        (["benchmarks/bench_time_to_loss.py", "--hooks", "fp16"], "--target is needed where plain"),
        (["benchmarks/bench_time_to_loss.py", "--target", "-1"], "--target must be above 0, got -1"),
        (["benchmarks/bench_time_to_loss.py", "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["benchmarks/bench_time_to_loss.py", "--d-model", "33"], "--d-model must be a multiple of 32, got 33"),
        (["benchmarks/bench_time_to_loss.py", "--validate-every", "0"], "--target-loss needs --validate-every"),
        (["benchmarks/bench_time_to_loss.py", "--lr", "0"], "--lr must be above 0, got 0"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments, words):
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert words in run.stderr
    assert "Traceback" not in run.stderr


def run_of(*losses, every=5):
    """A training's record, with a validation loss every so many steps."""
    points = [{"step": step, "loss": 9.0, "seconds": step / 10, "sent_bytes": 100 * step} for step in range(1, every * len(losses) + 1)]
    for point, loss in zip(points[every - 1 :: every], losses):
        point["val_loss"] = loss
    return {"curve": points, "val_loss": losses[-1], "bytes_are": "counted"}


def test_the_best_rate():
    best = bench_time_to_loss.best
    assert best({0.1: run_of(5, 4, 3), 0.2: run_of(5, 3, 3.1), 0.3: run_of(9, 9, 1)}, 3) == 0.2, "the fewest steps, not the lowest end"
    assert best({0.1: run_of(5, 4), 0.2: run_of(5, 3.9), 0.3: run_of(5, math.nan)}, 2) == 0.2, "the lowest end where none gets there"
    assert best({0.3: run_of(math.nan, math.nan), 0.1: run_of(5, 4)}, 2) == 0.1, "whatever the order"
    assert bench_time_to_loss.target_of({0.1: run_of(4, 3), 0.2: run_of(1, 2), 0.3: run_of(math.nan)}) == pytest.approx(2.04)
    with pytest.raises(SystemExit, match="diverges at every rate"):
        bench_time_to_loss.target_of({0.1: run_of(math.nan)})


def test_what_is_not_reached_is_said():
    rows = {
        "plain": bench_time_to_loss.summary(run_of(5, 3), 0.1, 3),
        "quick": bench_time_to_loss.summary(run_of(3), 0.2, 3),
        "poor": bench_time_to_loss.summary(run_of(5, 4, math.nan), 0.4, 3),
    }
    bench_time_to_loss.against_plain(rows)
    assert [row["steps_to_target"] for row in rows.values()] == [10, 5, None]
    assert [row["plain_over_this"] for row in rows.values()] == [1, 2, None]
    assert [row["sent_bytes"] for row in rows.values()] == [1000, 500, 1500]
    assert rows["poor"]["val_loss"] is None
    _, _, plain, quick, poor = bench_time_to_loss.table("slow", rows, {"ranks": 4, "parameters": 1, "target": 3.0}).splitlines()
    assert plain.split() == ["plain", "0.1", "10", "1.0", "1.00x", "0.00", "(counted)", "3.000"]
    assert quick.split()[2:5] == ["5", "0.5", "2.00x"]
    assert poor.endswith("not reached in 15 steps, 1.5 s")
    alone = {"poor": rows["poor"], "quick": rows["quick"]}
    bench_time_to_loss.against_plain(alone)
    assert alone["quick"]["plain_over_this"] is None


@pytest.mark.xdist_group("netlab")
@pytest.mark.usefixtures("lab")
def test_the_benchmark(tmp_path):
    command = [sys.executable, "benchmarks/bench_time_to_loss.py", "--tiny", "--target", "5", "--out", str(tmp_path / "new" / "out")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    record = json.loads(run.stdout.splitlines()[-1])
    assert record.keys() == {"ranks", "parameters", "versions", "training", "target", "search", "links"}
    assert record["target"] == 5
    assert record["search"].keys() == record["links"]["unshaped"].keys() == {"plain", "topk-0.1-sign-delayed"}
    saved = json.loads((tmp_path / "new" / "out" / "record.json").read_text())
    for name, row in record["links"]["unshaped"].items():
        assert any(line.startswith(name) and f"{row['plain_over_this']:.2f}x" in line for line in run.stdout.splitlines())
        assert row["reached"]
        assert 0 < row["steps_to_target"] == row["steps"] < 16, "it stops there"
        assert row["steps_to_target"] == record["search"][name][f"{row['lr']:g}"]["steps_to_target"], "the link changes no loss"
        assert row["seconds_to_target"] > 0
        assert row["sent_bytes"] > 0
        assert row["val_loss"] <= 5
        curve = saved["curves"]["unshaped"][name]
        assert [point["step"] for point in curve] == list(range(4, row["steps"] + 1, 4))
        assert curve[-1]["val_loss"] == row["val_loss"]
    assert record["links"]["unshaped"]["plain"]["plain_over_this"] == 1
    assert saved == record | {"curves": saved["curves"]}
    assert (tmp_path / "new" / "out" / "curves.png").read_bytes()[:4] == b"\x89PNG"
