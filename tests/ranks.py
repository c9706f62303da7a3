"""Real processes over gloo, cheaply: a fork server that has torch imported already, one file as the rendezvous.

``run_ranks(world_size, function, *args)`` calls ``function(rank, *args)`` on every rank, inside a process group, and returns the
results in rank order. The function must be importable (top level of a module). The first failing rank's traceback is what the test
fails with, and what a rank that died wrote to standard error; ranks that outlive the limit dump their stacks there and are killed.
"""

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from gradcomp.ddp import connection

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "gradcomp", "warm"])


def _ensure_server():
    """Start the fork server where it can import what it preloads: it is not given this process's ``sys.path``."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def run_ranks(world_size, function, *args, timeout_s=60, on_device=False, backend="gloo"):
    """Results of ``function(rank, *args)`` of every rank. The process group's own timeout is shorter than ``timeout_s``.

    ``on_device``: hooks take the path of CUDA tensors, with those on the CPU. ``GRADCOMP_ON_DEVICE=1`` does that to every test, to try
    what else it can do.
    """
    _ensure_server()
    on_device = on_device or os.environ.get("GRADCOMP_ON_DEVICE") == "1"
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            how = on_device, backend
            process = _context.Process(target=_rank, args=(rank, world_size, folder, theirs, timeout_s, how, function, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout_s + 10, folder)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _last_words(folder, rank):
    file = Path(folder, f"stderr-{rank}")
    return file.read_text(errors="replace")[-6000:] if file.exists() else ""


def _collect(pipes, processes, deadline, folder):
    results, waiting = {}, dict(enumerate(pipes))
    while waiting:
        ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            words = "\n".join(f"rank {rank}:\n{_last_words(folder, rank)}" for rank in sorted(waiting))
            raise AssertionError(f"ranks {sorted(waiting)} did not finish in time:\n{words}")
        failed = []
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                ok, value = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                processes[rank].join(5)
                # Without a word: the cause, not a victim.
                ok, value = False, (0.0, f"died with exit code {processes[rank].exitcode}\n{_last_words(folder, rank)}")
            if ok:
                results[rank] = value
            else:
                failed.append((*value, rank))
        if failed:
            # A rank that fails takes its peers with it: give them a moment, and report the one that failed first.
            for rank, pipe in waiting.items():
                if pipe.poll(0.5):
                    try:
                        ok, value = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        continue
                    if not ok:
                        failed.append((*value, rank))
            (_, text, rank), *others = sorted(failed)
            beside = "".join(f"\nafter it rank {other} failed:\n{theirs}" for _, theirs, other in others)
            raise AssertionError(f"rank {rank} failed:\n{text}{beside}")
    return [results[rank] for rank in range(len(pipes))]


def _rank(rank, world_size, folder, pipe, timeout_s, how, function, args):
    with open(f"{folder}/stderr-{rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable(file=sys.__stderr__)
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*barrier.*using the device under current context.*")
    torch.set_num_threads(1)
    on_device, backend = how
    if on_device:
        connection.HOSTS = frozenset()
    try:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s / 2))
        result = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps((True, result)))  # the connection's own pickler would share memory with a process that is ending
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, (time.time(), traceback.format_exc()))))
    pipe.close()
    os._exit(0)  # no teardown of threads that a failed collective may have left hanging
