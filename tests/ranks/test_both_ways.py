"""A run with numba's kernels is a run without them, bit for bit."""

import os

import nets
import pytest
import torch
from ranks import run_ranks

import gradcomp
from gradcomp.core.compiled import kernels


def trained(rank, switch, rule, values):
    os.environ["GRADCOMP_COMPILED"] = switch
    kernels.cache_clear()
    assert (kernels() is not None) == (switch == "1")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.ReLU(), torch.nn.Linear(60, 50), torch.nn.Linear(50, 30))
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
    handle = nets.register(model, rule, values=values)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    traffic = handle.traffic
    return [p.detach().clone() for p in net.parameters()], handle.state_dict(), traffic.sent_bytes


@pytest.mark.parametrize("values", ["fp32", "bf16", "int8", "sign"])
@pytest.mark.parametrize("rule", [gradcomp.TopK(0.05), gradcomp.Threshold(0.002)], ids=["topk", "threshold"])
def test_the_same_bits(rule, values):
    pytest.importorskip("numba")
    for plain, fast in zip(run_ranks(2, trained, "0", rule, values), run_ranks(2, trained, "1", rule, values)):
        assert all(torch.equal(a, b) for a, b in zip(plain[0], fast[0]))
        assert plain[2] == fast[2]
        held, held_fast = plain[1]["residual"], fast[1]["residual"]
        assert held.keys() == held_fast.keys()
        assert len(held) > 1
        assert all(torch.equal(held[name], held_fast[name]) for name in held)
