"""The scripts as a user runs them: torchrun, real processes, and the record read back."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "12", "--d-model", "64", "--layers", "1", "--batch", "4", "--context", "32"]
TRAFFIC = {
    "steps", "dense_bytes", "payload_bytes", "sent_bytes", "received_bytes", "ratio", "density",
    "select_s", "encode_s", "exchange_s", "decode_s",
}  # fmt: skip


def torchrun(ranks, *arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(ranks),
        "scripts/train.py",
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads(run.stdout.splitlines()[-1])


def test_topk_end_to_end(tmp_path):
    out, record = torchrun(2, *SMALL, "--rule", "topk", "--density", "0.01", "--report", str(tmp_path), "--name", "topk")
    assert record.keys() >= TRAFFIC | {"config", "versions", "world_size", "loss", "val_loss", "step_s"}
    assert record["config"]["density"] == 0.01
    assert record["versions"].keys() == {"gradcomp", "torch", "python"}
    assert (record["world_size"], record["steps"], record["bytes_are"]) == (2, 12, "counted")
    assert record["val_loss"] < math.log(256) - 0.3, "it learns"
    assert 60 < record["ratio"] < 150
    assert 0.009 < record["density"] < 0.03
    assert record["ratio"] == record["dense_bytes"] / record["sent_bytes"]
    assert "against bf16" in out
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
    saved = json.loads((tmp_path / "topk.json").read_text())
    assert saved["val_loss"] == record["val_loss"]
    assert [point["step"] for point in saved["curve"]] == list(range(1, 13))
    shown = subprocess.run([sys.executable, "scripts/report.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"{record['ratio']:.1f}x" in shown.stdout
    assert f"{record['val_loss']:.3f}" in shown.stdout


def test_dense_rule_trains_like_plain_ddp():
    _, plain = torchrun(2, *SMALL, "--hook", "none")
    _, dense = torchrun(2, *SMALL, "--rule", "dense", "--values", "fp32")
    assert dense["val_loss"] == plain["val_loss"]
    assert dense["loss"] == plain["loss"]
    assert dense["dense_bytes"] == plain["dense_bytes"] == plain["sent_bytes"]


def test_threshold_on_the_users_own_text(tmp_path):
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("abcdefgh " * 500)
    _, record = torchrun(2, *SMALL, "--rule", "threshold", "--threshold", "0.01", "--optimizer", "sgd", "--data", str(tmp_path))
    assert record["val_loss"] < 4
    assert record["ratio"] > 1


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_the_hooks_beside_ours(hook):
    _, record = torchrun(2, *SMALL, "--hook", hook)
    assert math.isfinite(record["val_loss"])
    assert record["bytes_are"] == "computed"
    assert record["ratio"] == pytest.approx(2) if hook != "powersgd" else record["ratio"] > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--density", "1.5"], "TopK.density"),
        (["--rule", "threshold", "--threshold", "-1"], "Threshold.tau"),
        (["--values", "fp8"], "values must be one of"),
        (["--threshold", "0.1"], "--threshold has no meaning with --hook gradcomp --rule topk"),
        (["--hook", "none", "--analyze"], "--analyze has no meaning with --hook none"),
        (["--hook", "fp16", "--warmup-steps", "3"], "--warmup-steps has no meaning with --hook fp16"),
        (["--clip", "-1"], "--clip must be at least 0, got -1"),
        (["--clip", "nan"], "--clip must be at least 0, got nan"),
        (["--lr", "0"], "--lr must be above 0, got 0"),
        (["--hook", "none", "--values", "int8"], "--values has no meaning with --hook none"),
        (["--name", "a/b"], "--name must be made of"),
        (["--report", "README.md"], "--report must be a folder"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--hook", "powersgd", "--checkpoint", "x"], "--checkpoint has no meaning with --hook powersgd"),
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--d-model", "33"], "--d-model must be a multiple of 32, got 33"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda needs a CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_a_wrong_command_line_is_explained(arguments, words):
    run = subprocess.run([sys.executable, "scripts/train.py", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert words in run.stderr
    assert "Traceback" not in run.stderr


def losses(folder):
    return [(point["step"], point["loss"]) for point in json.loads((folder / "run.json").read_text())["curve"]]


def workers_of(agent):
    """Process ids of the training script's ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it has gone meanwhile
            continue
        if parent == agent.pid:
            found.append(int(folder.name))
    return sorted(found)


def test_an_elastic_restart_continues_the_same_loss_curve(tmp_path):
    """A worker is killed in the middle of the run; torchrun restarts the job, which resumes from the last checkpoint."""
    steps = ["--steps", "60", "--checkpoint-every", "5", "--rule", "topk", "--density", "0.05", "--name", "run"]
    small = [*SMALL[2:], *steps]
    torchrun(2, *small, "--report", str(tmp_path / "straight"))
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1"]
    command += ["scripts/train.py", *small, "--report", str(tmp_path / "killed"), "--checkpoint", str(folder), "--resume"]
    # Without it a restarted worker may read the addresses of the ones before it (pytorch/pytorch#135712).
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (tmp_path / "log").open("w") as log:
        agent = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not list(folder.glob("step-*/model.pt")) and time.monotonic() < deadline:
            time.sleep(0.01)
        victim = workers_of(agent)[-1]
        os.kill(victim, signal.SIGKILL)
        agent.wait(timeout=200)
    finally:
        agent.kill()
        agent.wait()
    text = (tmp_path / "log").read_text()
    assert agent.returncode == 0, text
    record = json.loads((tmp_path / "killed" / "run.json").read_text())
    assert record["resumed_at"] >= 5, text
    assert record["resumed_at"] % 5 == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert len(losses(tmp_path / "killed")) == 60


def test_another_world_size_resumes(tmp_path):
    folder = str(tmp_path / "checkpoints")
    small = [*SMALL[2:], "--checkpoint", folder, "--checkpoint-every", "6", "--resume"]
    torchrun(2, *small, "--steps", "12", "--checkpoint-every", "6")
    shutil.rmtree(f"{folder}/step-{12:08d}")
    _, record = torchrun(1, *small, "--steps", "12")
    assert (record["resumed_at"], record["world_size"]) == (6, 1)
    out, record = torchrun(1, *small, "--steps", "12")
    assert record["resumed_at"] == 12
    assert "nothing was left to do" in out


def test_a_resumption_with_other_arguments_is_refused(tmp_path):
    small = ["--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "2", "--resume"]
    torchrun(1, *SMALL[2:], *small, "--steps", "2")
    other = ["--steps", "2", "--d-model", "32", "--layers", "1", "--batch", "4", "--context", "32", "--values", "fp32"]
    run = subprocess.run([sys.executable, "scripts/train.py", *other, *small], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "was made with --values bf16, --d-model 64: give the same" in run.stderr
    assert "Traceback" not in run.stderr


def test_embeddings_are_pruned_quantized_saved_and_read_back(tmp_path):
    command = [sys.executable, "scripts/prune_embeddings.py", "--out", str(tmp_path), "--steps", "60", "--buckets", "4000", "--dim", "16"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    record = json.loads(run.stdout.splitlines()[-1])
    assert record["accuracy"] > 3 / record["documents"], "it learns"
    dense, *sparse = record["levels"]
    assert dense["ratio"] > 3.3
    assert abs(dense["accuracy"] - record["accuracy"]) < 0.02
    assert [row["level"] for row in sparse] == [0.5, 0.8, 0.95]
    for row in sparse:
        assert abs(row["zeros"] - row["level"]) < 0.02
        assert row["bytes"] == sum(file.stat().st_size for file in (tmp_path / f"level-{row['level']:g}").iterdir())
    assert [row["ratio"] for row in sparse] == sorted(row["ratio"] for row in sparse)
    assert sparse[-1]["ratio"] > 12
    assert (tmp_path / "masks.png").read_bytes()[:4] == b"\x89PNG"
    wrong = subprocess.run([*command, "--levels", "1.5"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "--levels must be in [0, 1), got 1.5" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["bench_select.py", "--elements", "100000", "--repeats", "1"], {"select_over_floor", "topk_over_select", "extra_mib"}),
        (["sparsify.py", "--elements", "100000", "--repeats", "1"], {"threshold_over_floor", "2:4_over_floor"}),
        (["memory.py", "--bucket-mib", "1"], {"extra_mib", "bound_mib"}),
        (["soak.py", "--steps", "5"], {"difference", "replicas_equal"}),
    ],
)
def test_benchmarks_end_in_a_record(arguments, keys):
    run = subprocess.run(
        [sys.executable, f"benchmarks/{arguments[0]}", *arguments[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    record = json.loads(run.stdout[run.stdout.index("{") :])
    assert keys <= record.keys()
    assert all(math.isfinite(record[key]) for key in keys)
