"""``gradcomp bench``: what a user types, and what is in its record."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradcomp.cli import bench
from gradcomp.cli.main import main

ROOT = Path(__file__).parents[2]
SMALL = ["--parameters", "2e4", "--layers", "4", "--steps", "3", "--rounds", "2", "--warm-up", "3", "--bucket-mb", "0.02"]


def test_every_hook_is_measured(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "gradcomp", "bench", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["--density", "0.01", "0.1", "--json", str(tmp_path / "record.json")]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    record = json.loads(run.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "record.json").read_text()) == record
    hooks = record["hooks"]
    assert list(hooks) == [
        "noop", "plain", "fp16", "bf16", "powersgd-1", "powersgd-4", "twogathers-0.01", "twogathers-0.1", "gradcomp-0.01-bf16",
        "gradcomp-0.01-sign", "gradcomp-0.1-bf16", "gradcomp-0.1-sign",
    ]  # fmt: skip
    assert hooks["noop"]["over_noop_s"] == 0
    for name, row in hooks.items():
        assert row["step_s"] > 0
        assert row["cpu_s"] > 0
        assert f"\n{name} " in run.stdout
    # What the kernel counted is in the order that it must be in: 20,000 fp32 gradients, half of them, and few.
    assert hooks["plain"]["kernel_bytes"] > 80_000 > hooks["fp16"]["kernel_bytes"] > 40_000
    assert 20_000 > hooks["gradcomp-0.1-bf16"]["kernel_bytes"] > hooks["gradcomp-0.01-sign"]["kernel_bytes"] > 0
    ours = hooks["gradcomp-0.01-bf16"]
    assert 0 < ours["sent_bytes"] < 2_000 < hooks["twogathers-0.01"]["kernel_bytes"]
    assert ours["ratio"] > 40


@pytest.mark.parametrize(
    "name",
    ["dense", "powersgd", "powersgd-x", "powersgd-0", "gradcomp-0.1", "gradcomp-2-bf16", "gradcomp-0.1-fp8", "plain-1", "twogathers-2"],
)
def test_unknown_hooks_are_refused_before_anything_runs(name, capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--hooks", name])
    assert repr(name) in capsys.readouterr().err


@pytest.mark.parametrize("field", ["parameters", "layers", "batch", "steps", "rounds", "warm-up", "bucket-mb"])
@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_bad_numbers_are_refused(field, value, capsys):
    with pytest.raises(SystemExit):
        bench.parse([f"--{field}", value])
    assert f"--{field}" in capsys.readouterr().err


def test_without_torchrun_it_says_what_to_type(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc_per_node 2 -m gradcomp bench"):
        main(["bench"])


def test_the_command_line_helps(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    with pytest.raises(SystemExit) as stop:
        main(["brench"])
    assert stop.value.code == 2
    assert "gradcomp bench" in capsys.readouterr().err
