"""What every rule and value format must do, on 1, 2 and 4 ranks, with several parameters and several buckets."""

import pytest
import torch
from nets import loss_of, mixed_ddp, recorded, register, tokens
from ranks import run_ranks
from reference import Ranks, threshold_indices, top_k_indices

import gradcomp

TAU = 0.01


def positive(data, mask):
    """A rule that is a plain function, and not about magnitude."""
    mask.copy_(data > TAU)


RULES = {"topk": gradcomp.TopK(0.05), "threshold": gradcomp.Threshold(TAU), "function": positive}
ORACLES = {
    "topk": lambda name, acc: top_k_indices(acc, gradcomp.TopK(0.05).count(acc.numel())),
    "threshold": lambda name, acc: threshold_indices(acc, TAU),
    "function": lambda name, acc: (acc > TAU).nonzero().view(-1).tolist(),
}
CASES = [(rule, values, world_size) for world_size in (1, 2, 4) for values in ("fp32", "bf16", "fp16", "int8", "sign") for rule in RULES]


def train(rank, rule, values, steps):
    """What :func:`nets.recorded` records, the weights at the end, and the traffic."""
    model, handle, history = recorded(rank, steps, RULES[rule], values, optimizers=0.9)
    weights = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    return history, weights, handle.traffic


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize(("rule", "values", "world_size"), CASES)
def test_against_the_oracle_bit_for_bit(rule, values, world_size):
    steps = 5
    results = run_ranks(world_size, train, rule, values, steps)
    shapes = {name: grad.shape for name, grad in results[0][0][0]["local"].items()}
    oracle = Ranks(shapes, ORACLES[rule], values, world_size, sized=rule != "topk")
    for step in range(steps):
        expected = oracle.step([history[step]["local"] for history, _, _ in results])
        for rank, (history, _, _) in enumerate(results):
            for name in shapes:
                assert torch.equal(history[step]["reduced"][name], expected[name]), (step, rank, name)
                assert torch.equal(history[step]["residual"][name], oracle.residual[rank][name]), (step, rank, name)
    for _, weights, traffic in results:
        assert all(torch.equal(weights[name], results[0][1][name]) for name in shapes), "replicas differ"
        assert traffic.steps == steps
        assert 0 < traffic.density < 0.6, "nothing was compressed, or nothing sent"
        assert (traffic.ratio > 1) == (world_size > 1)


def twins(rank, rule, values, world_size, options, steps, set_to_none=True):
    """Train the hooked model beside plain DDP; the first step at which they differ, or None."""
    plain, hooked = mixed_ddp(**options), mixed_ddp(**options)
    handle = register(hooked, overrides={"*": rule}, values=values, check=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for m in (plain, hooked)]
    for step in range(steps):
        for model, optimizer in zip((plain, hooked), optimizers):
            optimizer.zero_grad(set_to_none=set_to_none)
            if not set_to_none and step % 5 == 2:  # also some gradients that begin anew, and some that begin under no_sync
                optimizer.zero_grad(set_to_none=True)
            if not set_to_none and step % 5 >= 2 and step % 2:
                with model.no_sync():
                    loss_of(model, tokens(rank, 100 + step)).backward()
            loss_of(model, tokens(rank, step)).backward()
            optimizer.step()
        for ours, theirs in zip(hooked.parameters(), plain.parameters()):
            if not torch.equal(ours, theirs) or not torch.equal(ours.grad, theirs.grad):
                return step, handle.traffic
    return None, handle.traffic


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"bucket_cap_mb": 25}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("rule", [gradcomp.TopK(density=1.0), gradcomp.Dense()])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_density_one_with_fp32_is_plain_ddp(rule, world_size, options):
    if options and world_size in (1, 4):
        options = {**options, "gradient_as_bucket_view": True}
    for different, traffic in run_ranks(world_size, twins, rule, "fp32", world_size, options, 20):
        assert different is None
        assert traffic.density == 1.0
        # The dense path: the bytes of plain DDP, and 16 bytes of digest for each bucket layout.
        assert traffic.dense_bytes <= traffic.sent_bytes <= traffic.dense_bytes + 40 * 16 * (world_size - 1)


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("world_size", [2, 3])
def test_density_one_is_plain_ddp_where_gradients_are_bucket_views(world_size):
    """Plain DDP divides by W what accumulated in its bucket, and multiplies the rest by 1/W: at three ranks the bits tell."""
    options = {"gradient_as_bucket_view": True}
    for different, _ in run_ranks(world_size, twins, gradcomp.Dense(), "fp32", world_size, options, 20, False):
        assert different is None


def dense_default(rank):
    model = mixed_ddp()
    handle = register(model, gradcomp.TopK(0.01))
    for step in range(4):
        model.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
    names = [name for name, _ in model.module.named_parameters()]
    return {name: int(handle.residual(name).count_nonzero()) for name in names}, handle.traffic


@pytest.mark.usefixtures("either_device")
def test_small_and_one_dimensional_parameters_are_dense_by_default():
    for residuals, traffic in run_ranks(2, dense_default):
        assert {name for name in residuals if residuals[name] > 1000} == {"embed.weight", "conv.weight", "hidden.weight", "head.weight"}
        assert traffic.sparse_parameters == 4
        assert traffic.parameters == 10
