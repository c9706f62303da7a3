"""The benchmarks run, check what they measure, and end in a record; how fast anything is, is not tested."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import bench_codec
import bench_select
import numpy as np
import pytest
import torch

from gradcomp.core import codec, compiled, feedback, scan

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def threads():
    """Benchmarks set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def record_of(out):
    return json.loads(out.splitlines()[-1])


def positive(record, *keys):
    return all(math.isfinite(record[key]) and record[key] > 0 for key in keys)


def test_select(capsys):
    bench_select.main(["--tiny"])
    out = capsys.readouterr().out
    record = record_of(out)
    assert positive(record, "floor_s", "select_over_floor", "numpy_over_floor", "topk_over_select")
    assert record["elements"] == 100_000
    assert all(record[key] >= 0 for key in ("extra_mib", "topk_extra_mib"))
    for row in ("gradcomp ", "gradcomp, numpy", "torch.topk", "torch.kthvalue", "torch.quantile", "sampled threshold"):
        assert sum(line.startswith(f"  {row}") and "x floor" in line for line in out.splitlines()) == 2, f"{row}: of each density"


def test_select_says_that_quantile_fails(capsys, monkeypatch):
    def too_large(residual, gradient, k):
        raise RuntimeError("quantile() input tensor is too large\nand more")

    monkeypatch.setattr(bench_select, "with_quantile", too_large)
    bench_select.main(["--tiny", "--density", "0.01"])
    out = capsys.readouterr().out
    assert "  torch.quantile     fails: quantile() input tensor is too large\n" in out
    assert record_of(out)["density"] == 0.01


def test_select_passes_on_any_other_failure(monkeypatch):
    def broken(residual, gradient, k):
        raise RuntimeError("broken")

    monkeypatch.setattr(bench_select, "with_topk", broken)
    with pytest.raises(RuntimeError, match="broken"):
        bench_select.main(["--tiny"])


def test_without_kernels_nothing_is_compiled():
    modules = (compiled, scan, feedback, codec)
    before = [module.kernels for module in modules]
    with bench_select.without_kernels():
        assert all(module.kernels() is None for module in modules)
    assert [module.kernels for module in modules] == before


def test_codec(capsys):
    bench_codec.main(["--tiny"])
    out = capsys.readouterr().out
    record = record_of(out)
    assert positive(record, "codec_over_floor", "encode_over_floor", "decode_over_floor", "index_bits")
    assert (record["density"], record["kept"]) == (0.01, 1000)
    assert 0 <= record["bits_over_bound"] < 0.7
    assert record["decode_by_ranks"].keys() == {"1", "2", "4", "8"}
    assert positive(record["decode_by_ranks"], "1", "2", "4", "8")
    assert len(record["ways"]) == 8
    for name, way in record["ways"].items():
        assert positive(way, *way), name
        assert sum(line.startswith(f"  {name} ") for line in out.splitlines()) == 3, f"{name}: of each density"
    assert record["ways"]["int64 + fp32"]["bytes_kept"] == 12
    assert record["ways"]["bitmap + fp32"]["index_bits"] == 100


@pytest.mark.parametrize("indices", [[0], [0, 1, 2], [127, 128, 129, 300], [5, 5 + 2**7, 6 + 2**7 + 2**14, 2**22, 2**40], [2**62]])
def test_delta_bytes(indices):
    indices = np.array(indices)
    assert np.array_equal(bench_codec.from_varint(bench_codec.as_varint(indices)), indices)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(lambda indices, values: (indices[::-1], values), "indices"), (lambda indices, values: (indices, -values), "values")],
)
def test_a_codec_that_loses_something_is_found_out(monkeypatch, damage, words):
    right = bench_codec.bitmap_way(100_000)
    wrong = right._replace(decode=lambda payload, size: damage(*right.decode(payload, size)))
    monkeypatch.setattr(bench_codec, "bitmap_way", lambda numel: wrong)
    with pytest.raises(SystemExit, match=f"the {words} that were decoded are not those"):
        bench_codec.main(["--tiny", "--density", "0.01"])


def test_bound():
    assert bench_codec.bound(10, 3) == pytest.approx(math.log2(math.comb(10, 3)) / 3)


def test_trace(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "benchmarks/trace_step.py", "--tiny"]
    command += ["--out", str(tmp_path / "new" / "trace.json"), "--png"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    record = record_of(run.stdout)
    assert record["world_size"] == 2
    assert record["hook"] == "gradcomp-0.01-bf16"
    assert 0 <= record["overlap"] <= 1
    assert positive(record, "hook_over_select_encode", "step_s", "backward_s", "exchange_s")
    rows = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    lanes = {row["args"]["name"]: row["tid"] for row in rows if row["name"] == "thread_name"}
    assert lanes.keys() >= {"backward thread", "network", "callbacks"}
    events = [row for row in rows if row["ph"] == "X"]
    assert {row["tid"] for row in events} == set(lanes.values())
    of = {part: [row for row in events if row["name"] == part] for part in {row["name"] for row in events}}
    assert of.keys() >= {"step", "forward", "backward", "optimizer", "hook", "select", "encode", "gather", "decode", "complete"}
    (step,), (complete,) = of["step"], of["complete"]
    assert len(of["gather"]) == len(of["decode"]) == len(of["hook"]) == record["buckets"] >= 2
    for row in events:
        assert row["dur"] >= 0
        assert 0 <= row["ts"] <= step["dur"]
    for gather in of["gather"]:
        assert gather["cat"] == "network"
        assert gather["ts"] < step["ts"] + step["dur"]
        assert gather["ts"] + gather["dur"] <= complete["ts"], "nothing is completed before everything has arrived"
    assert (tmp_path / "new" / "trace.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tiny"], "launch it with torchrun"),
        (["--hooks", "plain", "fp16"], "--hooks must name one of gradcomp's hooks, got noop plain fp16"),
        (["--parameters", "0"], "--parameters must be at least 1"),
    ],
)
def test_trace_explains_a_wrong_command_line(arguments, words):
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "benchmarks/trace_step.py", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert words in run.stderr
    assert "Traceback" not in run.stderr
