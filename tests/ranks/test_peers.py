"""The plain sparse hook that benchmarks compare with is honest: it too keeps what it does not send."""

import torch
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

from gradcomp.cli.peers import peer


def trained(rank, name):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 30, bias=False), torch.nn.Linear(30, 10, bias=False))
    model = DistributedDataParallel(net, bucket_cap_mb=0.002)
    peer(name)(model)
    start = [parameter.detach().clone() for parameter in net.parameters()]
    total = [torch.zeros_like(parameter) for parameter in start]
    rows = torch.randn(6, 4, 20, generator=torch.Generator().manual_seed(rank))
    for step in range(6):
        net.zero_grad()
        model(rows[step]).square().mean().backward()  # the same parameters in every step: the dense mean is the same too
        total = [so_far + parameter.grad for so_far, parameter in zip(total, net.parameters())]
    return total


def test_two_gathers_sends_the_largest_and_in_the_end_most():
    plain, few, all_of_it = (run_ranks(2, trained, name) for name in ("plain", "twogathers-0.1", "twogathers-1"))
    for ranks in (plain, few, all_of_it):
        assert all(torch.equal(a, b) for a, b in zip(*ranks))
    for dense, sparse, whole in zip(plain[0], few[0], all_of_it[0]):
        torch.testing.assert_close(whole, dense)
        assert 0.1 < float(sparse.norm() / dense.norm()) < 1.0
        assert float(torch.nn.functional.cosine_similarity(sparse.flatten(), dense.flatten(), dim=0)) > 0.6
