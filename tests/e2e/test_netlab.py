"""A real slow network on this machine, and whether the bytes we count are those that the kernel sends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NETLAB = ROOT / "scripts" / "netlab"

# One worker runs these one after another: they load the whole machine.
pytestmark = pytest.mark.xdist_group("netlab")


def netlab(name, *arguments, check=True, timeout=200):
    environment = {**os.environ, "NETLAB": name, "OMP_NUM_THREADS": "1"}
    return subprocess.run([NETLAB, *arguments], env=environment, capture_output=True, text=True, check=check, timeout=timeout)


@pytest.fixture
def lab():
    """A lab's name, taken down afterwards; skips, saying why, where namespaces cannot be made."""
    if os.getuid() != 0:
        pytest.skip("netlab needs root to make network namespaces")
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("netlab needs ip and tc, of the package iproute2")
    name = f"test_{os.getpid()}"
    probe = netlab(name, "up", "1", "100mbit", check=False)
    netlab(name, "down", check=False)
    if probe.returncode:
        pytest.skip(f"this kernel cannot shape links: {probe.stderr.strip()}")
    yield name
    netlab(name, "down")


def names(lab):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"netlab-{lab}-")]


def test_hosts_know_their_rank_and_nothing_is_left_behind(lab):
    netlab(lab, "up", "3", "unshaped")
    assert len(names(lab)) == 4
    out = netlab(lab, "run", "3", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT").stdout
    assert sorted(out.splitlines()) == [f"{rank} of 3 at 10.77.0.1:29500" for rank in range(3)]
    assert int(netlab(lab, "bytes", "0").stdout) >= 0
    netlab(lab, "down")
    assert names(lab) == []
    assert not list(Path("/etc/netns").glob(f"netlab-{lab}-*"))


def test_a_failing_host_ends_the_others(lab):
    netlab(lab, "up", "2", "100mbit")
    run = netlab(lab, "run", "2", "--", "sh", "-c", '[ "$RANK" = 0 ] && exit 3; sleep 100', check=False, timeout=30)
    assert run.returncode == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "many", "1gbit"], "N must be a number of hosts"),
        (["up", "0", "1gbit"], "N must be a number of hosts"),
        (["up", "08x", "1gbit"], "N must be a number of hosts"),
        (["up", "2511", "1gbit"], "N must be a number of hosts"),
        (["up", "2", "fast"], "could not set up 2 hosts at fast; nothing is left behind"),
        (["run", "2", "--", "true"], "no 2 hosts"),
        (["dance"], "scripts/netlab up 4 100mbit"),
    ],
)
def test_what_netlab_cannot_do_it_says(lab, arguments, words):
    run = netlab(lab, *arguments, check=False)
    assert run.returncode != 0
    assert words in run.stderr
    assert names(lab) == []


def test_labs_do_not_touch_each_other(lab):
    other = f"{lab}.b"
    try:
        netlab(lab, "up", "02", "unshaped")
        netlab(other, "up", "1", "unshaped")
        netlab(lab, "down")
        assert names(lab) == []
        assert len(names(other)) == 2
    finally:
        netlab(other, "down")
    for odd in ("a b", "a-b", "a*", "a\nb", "a/b"):
        run = netlab(odd, "up", "1", "unshaped", check=False)
        assert run.returncode == 1
        assert "NETLAB must be made of" in run.stderr


def test_an_interrupted_set_up_leaves_nothing(lab):
    started = subprocess.Popen([NETLAB, "up", "60", "unshaped"], env={**os.environ, "NETLAB": lab}, stderr=subprocess.DEVNULL)
    while len(names(lab)) < 5:
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGTERM)
    assert started.wait(timeout=60) != 0
    assert names(lab) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_without_root_it_refuses_politely():
    run = subprocess.run([str(NETLAB), "up", "2", "1gbit"], capture_output=True, text=True, check=False, user=65534, cwd="/")
    if run.returncode in (126, 127) or "Permission denied" in run.stderr:
        pytest.skip("the checkout cannot be read by others")
    assert run.returncode == 1
    assert "needs root" in run.stderr


@pytest.mark.parametrize(("kind", "hosts"), [("gather", 2), ("gather", 3), ("ring", 3), ("mixture", 2), ("mixture", 3)])
def test_counted_bytes_are_the_kernels(lab, kind, hosts):
    netlab(lab, "up", str(hosts), "1gbit")
    run = netlab(lab, "run", str(hosts), "--", sys.executable, str(ROOT / "tests" / "e2e" / "truth_job.py"), kind, check=False)
    assert run.returncode == 0, run.stderr
    records = [json.loads(line) for line in run.stdout.splitlines()]
    assert sorted(record["rank"] for record in records) == list(range(hosts))
    for record in records:
        assert record["counted"] >= 20 * 1_000_000, "twenty steps of at least 1 MB"
        assert record["sparse"] == {"gather": 8, "ring": 0, "mixture": 6}[kind]
        assert 1 <= record["kernel"] / record["counted"] < 1.05
