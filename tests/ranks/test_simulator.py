"""Logical workers in one process are what processes are: bit for bit where sums commute, and counted alike."""

import gc
import threading
import time
from functools import lru_cache

import pytest
import torch
from crew import Crew, Hub, LocalExchange
from hooks import DenseMean, Fp16Mean, PowerSGD, Sparse, in_buckets
from nets import Given, Mixed, loss_of, tokens
from ranks import run_ranks
from simulator import Workers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.ddp.agreement import DIGEST_BYTES
from gradcomp.ddp.traffic import Counters

STEPS = 6
CASES = {
    "sign": ("mixed", Sparse, {"rule": gradcomp.TopK(0.05), "values": "sign"}),
    "bf16": ("mixed", Sparse, {"rule": gradcomp.TopK(0.05), "values": "bf16"}),
    "threshold": ("mixed", Sparse, {"rule": gradcomp.Threshold(0.05)}),
    # Too large to ride in a payload: it goes by the ring, beside the others.
    "ring": ("mixed", Sparse, {"rule": gradcomp.TopK(0.05), "values": "fp32", "overrides": {"conv.weight": gradcomp.Dense()}}),
    "buckets": ("layers", Sparse, {"rule": gradcomp.TopK(0.05), "values": "int8"}),
    "fp16": ("mixed", Fp16Mean, {}),
    "dense": ("mixed", DenseMean, {}),
}
# A ring all-reduce adds what more than two ranks give in an order of its own: bits are compared where nothing goes by it, or W is 2.
EXACT = [(world_size, case) for world_size in (2, 4) for case in ("sign", "bf16", "threshold", "buckets")]
EXACT += [(2, case) for case in ("ring", "fp16", "dense")]
FIELDS = ("steps", "payload_bytes", "sent_bytes", "dense_bytes", "elements", "density", "sparse_parameters", "parameters", "bad_steps")


@pytest.fixture(autouse=True)
def one_thread():
    """As in the processes: with more, torch adds in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(kind):
    torch.manual_seed(0)
    if kind == "mixed":
        return Mixed(), loss_of
    return nn.Sequential(nn.Linear(40, 80), nn.Tanh(), nn.Linear(80, 60), nn.Tanh(), nn.Linear(60, 30)), loss_of_layers


def loss_of_layers(model, batch):
    inputs = torch.sin(batch[:, :-1, None] * torch.arange(1.0, 41))
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), batch[:, 1:].flatten())


def heard(exchange, method):
    """The bytes of every gather from now on."""
    gather, calls = getattr(exchange, method), []

    def noting(payload):
        calls.append(payload.numpy().tobytes())
        return gather(payload)

    setattr(exchange, method, noting)
    return calls


def outcome(net, handle, calls):
    """(weights, residuals, traffic, gathered bytes) of one rank."""
    weights = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    if handle is None:
        return weights, {}, {}, []
    traffic = handle.traffic
    return weights, {name: handle.residual(name) for name in weights}, {field: getattr(traffic, field) for field in FIELDS}, calls


def in_processes(rank, cases):
    outcomes = {}
    for case in cases:
        kind, hook, options = CASES[case]
        net, loss = build(kind)
        # Where parameters may be unused, DDP's buckets stay as they are in the first step; else it makes new ones after it.
        model = DistributedDataParallel(net, **({"bucket_cap_mb": 0.01} if kind == "layers" else {"find_unused_parameters": True}))
        handle, calls = None, []
        if hook is Sparse:
            handle = gradcomp.register(model, **options)
            calls = heard(handle.exchange, "gather")
        elif hook is Fp16Mean:
            model.register_comm_hook(None, fp16_compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, tokens(rank, step)).backward()
            optimizer.step()
        outcomes[case] = outcome(net, handle, calls)
    return outcomes


@lru_cache
def processes(world_size):
    """By rank, the outcomes of all cases."""
    return run_ranks(world_size, in_processes, sorted({case for size, case in EXACT if size == world_size} | {"dense"}))


def simulated(case, world_size, **settings):
    kind, hook, options = CASES[case]
    net, loss = build(kind)
    workers = Workers(net, world_size, hook(**options), **settings)
    calls = [heard(handle.exchange, "_gather") for handle in workers.handles] or [[]] * world_size
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        workers.step([tokens(rank, step) for rank in range(world_size)], loss)
        optimizer.step()
    handles = workers.handles or [None] * world_size
    return workers, [outcome(net, handle, own) for handle, own in zip(handles, calls)]


def payloads(calls):
    return [call for call in calls if len(call) != DIGEST_BYTES]


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize(("world_size", "case"), EXACT)
def test_workers_are_what_processes_are(world_size, case):
    bucket_numel = -(-int(0.01 * 2**20) // 4) if case == "buckets" else None
    workers, ours = simulated(case, world_size, bucket_numel=bucket_numel)
    for (weights, residuals, traffic, calls), theirs in zip(ours, [outcomes[case] for outcomes in processes(world_size)]):
        same(weights, theirs[0])
        same(residuals, theirs[1])
        if case == "buckets":  # in the first step DDP has one
            assert len(workers.buckets[0]) == 2
            later = 2 * (STEPS - 1)
            assert payloads(calls)[-later:] == payloads(theirs[3])[-later:]
            assert traffic["density"] == theirs[2]["density"]
        else:
            assert traffic == theirs[2]
            assert calls == theirs[3], "every byte that is gathered, digests too"
    assert (workers.hooks[0].exchange.dense_bytes > 0) == (case in ("ring", "fp16", "dense"))
    if CASES[case][1] is Sparse:
        assert len(ours[0][3]) >= STEPS
        kept = [residuals["4.weight" if case == "buckets" else "head.weight"] for _, residuals, _, _ in ours]
        assert all(residual.any() for residual in kept)
        assert not torch.equal(kept[0], kept[1])


def test_the_dense_mean_is_that_of_plain_ddp():
    workers, ours = simulated("dense", 4)
    for name, weight in processes(4)[0]["dense"][0].items():
        torch.testing.assert_close(ours[0][0][name], weight, rtol=0, atol=1e-6)
    assert workers.bits == 32


def local_gradients(net, loss, world_size, step):
    """By rank and name."""
    found = []
    for rank in range(world_size):
        net.zero_grad()
        loss(net, tokens(rank, step)).backward()
        found.append({name: parameter.grad.clone() for name, parameter in net.named_parameters()})
    return found


def mean_of(tensors):
    return torch.stack(list(tensors)).mean(0)


def test_fp16_mean():
    net, loss = build("mixed")
    workers = Workers(net, 4, Fp16Mean())
    local = local_gradients(net, loss, 4, 0)
    workers.step([tokens(rank, 0) for rank in range(4)], loss)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, mean_of(grads[name] for grads in local), rtol=2e-3, atol=1e-5)
        assert torch.equal(parameter.grad, parameter.grad.half().float())
    assert workers.bits == 16


@pytest.mark.parametrize("bucket_numel", [None, 4000])
def test_power_sgd_of_full_rank_is_the_dense_mean(bucket_numel):
    net, loss = build("mixed")
    workers = Workers(net, 3, PowerSGD(1000, min_compression_rate=0), bucket_numel=bucket_numel)
    for step in range(4):
        local = local_gradients(net, loss, 3, step)
        workers.step([tokens(rank, step) for rank in range(3)], loss)
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.grad, mean_of(grads[name] for grads in local), rtol=1e-4, atol=1e-6)
    assert workers.hooks[0].errors.keys() == {name for name, parameter in net.named_parameters() if parameter.dim() > 1}


def test_power_sgd_keeps_what_it_does_not_send():
    net, loss = build("mixed")
    world_size, rank = 3, 2
    workers = Workers(net, world_size, PowerSGD(rank))
    given, applied = ({name: torch.zeros_like(parameter) for name, parameter in net.named_parameters()} for _ in range(2))
    for step in range(8):
        local = local_gradients(net, loss, world_size, step)
        workers.step([tokens(rank, step) for rank in range(world_size)], loss)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                given[name] += mean_of(grads[name] for grads in local)
                applied[name] += parameter.grad
                parameter -= 0.1 * parameter.grad
    errors = [hook.errors for hook in workers.hooks]
    bits = 0
    for name, parameter in net.named_parameters():
        pending = torch.zeros_like(parameter)
        if parameter.dim() > 1:
            rows, columns = parameter.flatten(1).shape
            pending = mean_of(error[name] for error in errors).view(parameter.shape)
            assert pending.norm() > 0.01 * given[name].norm()
            assert torch.linalg.matrix_rank(parameter.grad.flatten(1)) <= rank
        bits += 32 * ((rows + columns) * rank if parameter.dim() > 1 else parameter.numel())
        torch.testing.assert_close(applied[name] + pending, given[name], rtol=1e-5, atol=1e-5)
    assert workers.bits == pytest.approx(bits / workers.numel)


def test_power_sgd_compresses_only_where_it_pays():
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 3, bias=False))
    assert Workers(net, 1, PowerSGD(4)).hooks[0].errors.keys() == {"0.weight"}
    assert not Workers(net, 1, PowerSGD(32)).hooks[0].errors


def test_power_sgd_goes_on_after_a_gradient_of_zero():
    net = Given(w=torch.zeros(40, 40))
    workers = Workers(net, 2, PowerSGD(1))
    for scale in (1.0, 0.0, 1.0):
        grad = scale * torch.outer(torch.arange(40.0), torch.ones(40))
        workers.step([{"w": grad}, {"w": grad}], lambda net, grads: net(grads))
        torch.testing.assert_close(net.w.grad, grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bucket_numel", [None, 4000])
@pytest.mark.parametrize("case", ["sign", "bf16", "ring", "threshold"])
def test_bits_are_those_of_the_plan(case, bucket_numel):
    kind, hook, options = CASES[case]
    net, loss = build(kind)
    workers = Workers(net, 4, hook(**options), bucket_numel=bucket_numel)
    state, num_bytes = workers.handles[0], 0
    for step in range(4):
        if case == "threshold" and step > 0:  # capacities follow what was wanted two steps before
            plans = [state.layouts.plan(state.layouts.of(bucket), flush=False) for bucket in workers.buckets[0]]
        workers.step([tokens(rank, step) for rank in range(4)], loss)
        if case != "threshold" or step == 0:
            plans = [state.layouts.plan(state.layouts.of(bucket), flush=False) for bucket in workers.buckets[0]]
        num_bytes += sum(plan.payload_bytes + sum(4 * piece.numel for piece in plan.rings) for plan in plans)
    assert workers.bits == 8 * num_bytes / (4 * workers.numel)
    assert (state.exchange.dense_bytes > 0) == (case == "ring")
    assert state.traffic.payload_bytes == state.exchange.payload_bytes
    assert state.exchange.agreement_bytes == 16 * len(workers.buckets[0]) + 8 * 4 * (case == "threshold")


def test_in_buckets():
    parameters = [nn.Parameter(torch.zeros(size)) for size in (5, 1, 4, 3, 8, 2)]

    def sizes(bucket_numel):
        return [[parameter.numel() for parameter in bucket] for bucket in in_buckets(parameters, bucket_numel)]

    assert sizes(None) == [[5, 1, 4, 3, 8, 2]]
    assert sizes(4) == [[2, 8], [3, 4], [1, 5]]
    assert sizes(1) == [[2], [8], [3], [4], [1], [5]]
    assert sizes(1000) == [[2, 8, 3, 4, 1, 5]]


def test_gradients_lie_in_the_parameters_memory_order():
    net = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    loss = lambda net, batch: net(batch).square().sum()  # noqa: E731
    batches = [torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for hook in (DenseMean(), PowerSGD(1000, min_compression_rate=0), Sparse(overrides={"*": gradcomp.Dense()}, values="fp32")):
        expected = []
        for batch in batches:
            net.zero_grad()
            loss(net, batch).backward()
            expected.append(net.weight.grad.clone())
        Workers(net, 2, hook).step(batches, loss)
        torch.testing.assert_close(net.weight.grad, mean_of(expected), rtol=1e-4, atol=1e-4)
        assert net.weight.grad.stride() == net.weight.stride()


def given_workers(hook, world_size=2, **parameters):
    net = Given(**parameters)
    return net, Workers(net, world_size, hook), lambda net, grads: net(grads)


def test_losses_come_back_and_may_be_functions():
    net, loss = build("mixed")
    workers = Workers(net, 2, DenseMean())
    values = workers.step([tokens(rank, 0) for rank in range(2)], loss)
    first = net.head.weight.grad.clone()
    assert values == [loss(net, tokens(rank, 0)).item() for rank in range(2)]
    assert workers.step([lambda rank=rank: loss(net, tokens(rank, 0)) for rank in range(2)]) == values
    assert torch.equal(first, net.head.weight.grad)
    assert workers.steps == 2
    assert workers.local_s > 0
    assert workers.mean_s > 0
    with pytest.raises(ValueError, match="one for each of 2 workers, got 1"):
        workers.step([tokens(0, 0)], loss)


def test_parameters_without_a_gradient():
    net, workers, loss = given_workers(DenseMean(), a=torch.zeros(3), b=torch.zeros(3), c=torch.zeros(3))
    net.a.grad = torch.ones(3)
    workers.step([{"b": torch.ones(3)}, {"b": torch.ones(3), "c": 2 * torch.ones(3)}], loss)
    assert net.a.grad is None
    assert net.b.grad.tolist() == [1, 1, 1]
    assert net.c.grad.tolist() == [1, 1, 1]


def test_a_bad_step_is_bad_everywhere_and_equal():
    rule = {"*": gradcomp.TopK(0.1)}
    net, workers, loss = given_workers(Sparse(overrides=rule, check=True), w=torch.zeros(30, 40))
    good, bad = torch.ones(30, 40), torch.full((30, 40), float("nan"))
    workers.step([{"w": good}, {"w": bad}], loss)
    assert net.w.grad.isnan().all()
    workers.step([{"w": good}, {"w": good}], loss)
    assert net.w.grad.count_nonzero() == 120
    assert [handle.traffic.bad_steps for handle in workers.handles] == [1, 1]

    net, workers, loss = given_workers(Sparse(overrides=rule, on_nonfinite="raise"), w=torch.zeros(30, 40))
    with pytest.raises(RuntimeError, match="rank 1: the gradient of w"):
        workers.step([{"w": good}, {"w": bad}], loss)
    assert all(isinstance(handle.last_error, gradcomp.NonFiniteError) for handle in workers.handles)
    workers.step([{"w": good}, {"w": good}], loss)
    assert net.w.grad.count_nonzero() == 120


def test_handles_work():
    net, loss = build("mixed")
    workers = Workers(net, 2, Sparse(gradcomp.TopK(0.05), values="fp32", check=True))
    workers.handles[1].flush()
    analysis = workers.handles[0].analyze()
    states = []
    for step in range(3):
        workers.step([tokens(rank, step) for rank in range(2)], loss)
        states.append([handle.state_dict() for handle in workers.handles])
    assert analysis.ready
    assert not torch.distributed.is_initialized()
    for handle in workers.handles:
        assert not handle.residual("head.weight").any()
        assert handle.densities["head.weight"] == 1
        assert handle.traffic.world_size == 2
    with pytest.raises(RuntimeError, match="every worker's thread"):  # it is collective
        workers.handles[0].load_state_dict(states[0][0])
    workers.each(lambda rank: workers.handles[rank].load_state_dict(states[0][rank]))
    same({"r": workers.handles[1].residual("head.weight")}, {"r": states[0][1]["residual"]["head.weight"]})
    workers.step([tokens(rank, 3) for rank in range(2)], loss)


class FailsAt:
    """A rule that fails on the nth call of its copy, on one worker."""

    def __init__(self):
        self.calls = 0

    def mask_(self, data, mask):
        self.calls += 1
        mask.copy_(data.abs() > 0.5)
        if threading.current_thread().name == "worker 1" and self.calls == 2:
            raise ValueError("enough")


def test_a_worker_that_fails_takes_nobody_with_it():
    rule = FailsAt()
    net, workers, loss = given_workers(Sparse(overrides={"*": rule}), world_size=3, w=torch.zeros(30, 40))
    grads = [{"w": torch.ones(30, 40)}] * 3
    workers.step(grads, loss)
    start = time.perf_counter()
    with pytest.raises(gradcomp.GradcompError, match="enough"):
        workers.step(grads, loss)
    assert time.perf_counter() - start < 20
    workers.step(grads, loss)
    assert net.w.grad.count_nonzero() == 1200
    assert rule.calls == 0, "workers have copies"


def test_results_must_be_equal():
    class Own:
        def __init__(self, net, hub, rank):
            self.exchange = LocalExchange(hub, rank, Counters())

        def __call__(self, bucket):
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

    _, workers, loss = given_workers(Own, w=torch.zeros(3))
    workers.step([{"w": torch.ones(3)}] * 2, loss)
    with pytest.raises(RuntimeError, match="workers 0 and 1 have different"):
        workers.step([{"w": torch.ones(3)}, {"w": torch.tensor([1.0, 1.0, 2.0])}], loss)


def test_a_worker_does_not_wait_for_ever():
    hub = Hub(2, timeout_s=0.05)
    with pytest.raises(RuntimeError, match=r"worker 0 waited 0.05 s for 1 others"):
        Crew(hub).each(lambda rank: rank or hub.meet(rank, rank, list))


def test_collectives():
    hub = Hub(3)
    exchanges = [LocalExchange(hub, rank, Counters()) for rank in range(3)]

    def collectives(rank):
        exchange = exchanges[rank]
        gathered = exchange.gather(torch.tensor([rank, 7], dtype=torch.uint8)).wait()
        summed = exchange.ring(torch.tensor([1.0, rank], dtype=torch.float16)).wait()
        rows = torch.sparse_coo_tensor([[rank, 3, 3]], torch.ones(3, 2), (4, 2), check_invariants=True)
        sparse = exchange.ring_coo(rows).wait()
        assert sparse is rows
        return gathered.tolist(), summed, sparse.to_dense().tolist(), exchange.gather_now(bytes([rank]))

    for gathered, summed, sparse, now in Crew(hub).each(collectives):
        assert gathered == [[0, 7], [1, 7], [2, 7]]
        assert summed.dtype == torch.float16
        assert summed.tolist() == [3, 3]
        assert sparse == [[1, 1], [1, 1], [1, 1], [6, 6]]
        assert now == [b"\0", b"\1", b"\2"]
    for exchange in exchanges:
        assert (exchange.payload_bytes, exchange.dense_bytes, exchange.agreement_bytes) == (2, 4 + 3 * 8 + 6 * 4, 1)
        counted = exchange._counters.snapshot()
        assert counted.sent_bytes == counted.received_bytes == 2 * 2 + 4 * 4 // 3 + 2 * (72 + 3 * 8 + 6 * 4) + 2


def test_one_worker():
    net, workers, loss = given_workers(Sparse(overrides={"*": gradcomp.TopK(0.1)}, fallback="never"), world_size=1, w=torch.zeros(30, 40))
    workers.step([{"w": torch.ones(30, 40)}], loss)
    assert net.w.grad.count_nonzero() == 120


def test_only_what_is_simulated_is_taken():
    with pytest.raises(ValueError, match=r"parameter weight must be fp32 on the CPU, got torch\.float64"):
        Workers(nn.Linear(2, 2).double(), 2, DenseMean())
    workers = Workers(nn.Embedding(4, 2, sparse=True), 2, DenseMean())
    with pytest.raises(ValueError, match="must be dense"):
        workers.step([torch.tensor([1])] * 2, lambda net, batch: net(batch).sum())


def test_threads_end_with_their_workers():
    before = set(threading.enumerate())
    net, loss = build("mixed")
    workers = Workers(net, 4, Sparse(gradcomp.TopK(0.05)))
    workers.step([tokens(rank, 0) for rank in range(4)], loss)
    own = set(threading.enumerate()) - before
    assert len(own) == 4
    del workers
    gc.collect()
    for thread in own:
        thread.join(10)
        assert not thread.is_alive()
