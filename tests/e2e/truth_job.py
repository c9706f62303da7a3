"""One rank of the truth test: counted bytes and the kernel's, over the same steady steps, as one JSON line."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

STEPS = 20


def kernel_bytes():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def main(kind):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # 2.25 million parameters in several buckets: a step of at least 1 MB, whatever the kind.
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(750, 750) for _ in range(4)]), bucket_cap_mb=3)
    rules = {
        "gather": {"*": gradcomp.TopK(0.25)},
        "ring": {"*": gradcomp.Dense()},
        "mixture": {"1.*": gradcomp.Dense(), "3.*": gradcomp.TopK(0.9), "*": gradcomp.TopK(0.05)},
    }
    handle = gradcomp.register(model, overrides=rules[kind], values="fp32" if kind == "ring" else "bf16")
    torch.manual_seed(int(os.environ["RANK"]))

    def step():
        model.zero_grad()
        model(torch.randn(2, 750)).square().mean().backward()

    for _ in range(3):  # bucket rebuild and digests are behind us then
        step()
    dist.barrier()
    before, counted_before = kernel_bytes(), handle.traffic.sent_bytes
    for _ in range(STEPS):
        step()
    dist.barrier()
    counted, kernel = handle.traffic.sent_bytes - counted_before, kernel_bytes() - before
    record = {"rank": dist.get_rank(), "counted": counted, "kernel": kernel, "sparse": handle.traffic.sparse_parameters}
    dist.barrier()
    os.write(1, (json.dumps(record) + "\n").encode())  # one write: the hosts share a pipe
    dist.destroy_process_group()


main(sys.argv[1])
