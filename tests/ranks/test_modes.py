"""The ways in which DDP is really used: every mode keeps the promises, or says what it does not do."""

import contextlib
import copy

import pytest
import torch
from nets import Given, given_ddp, loss_of, mixed_ddp, reduced, register, tokens
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

T = torch.tensor


def draw(rank, step, shape, low=-64, high=65):
    """Multiples of 1/16: sums of them are exact."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(100 * step + rank)) / 16


# 8: gradients that are sparse tensors


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 3, sparse=True)
        self.head = nn.Linear(3, 400)

    def forward(self, ids):
        return self.head(self.embed(ids))


def sparse_embedding(rank, optimizer_of):
    torch.manual_seed(0)
    net = Bags()
    hooked, plain = DistributedDataParallel(net), DistributedDataParallel(copy.deepcopy(net))
    handle = register(hooked, overrides={"*": gradcomp.Dense()}, values="fp32")
    optimizers = [optimizer_of(model.parameters()) for model in (hooked, plain)]
    for step in range(4):
        for model, optimizer in zip((hooked, plain), optimizers):
            optimizer.zero_grad()
            model(T([1, 1, 2 + rank + step])).square().sum().backward()
            optimizer.step()
        ours, theirs = hooked.module.embed.weight.grad, plain.module.embed.weight.grad
        assert ours.layout == theirs.layout == torch.sparse_coo
        assert torch.equal(ours.coalesce().indices(), theirs.coalesce().indices())
        assert torch.equal(ours.coalesce().values(), theirs.coalesce().values())
        assert all(torch.equal(a, b) for a, b in zip(hooked.parameters(), plain.parameters()))
    # One row more than half of the table's would be needed: nine numbers of metadata, 3 rows of an index and 3 values.
    coo = 4 * (72 + 3 * 8 + 3 * 3 * 4)
    dense = 4 * net.head.weight.numel() * 4 + 4 * net.head.bias.numel() * 4
    return handle.traffic.dense_bytes - dense - coo, handle.densities["embed.weight"], str(handle.traffic)


def test_8_sparse_embedding_gradients_travel_as_in_plain_ddp():
    for rest, density, text in run_ranks(2, sparse_embedding, lambda_sgd):
        assert rest == 0
        assert density == 9 / 30
        assert "2 ranks" in text or "one rank of 2" in text


def lambda_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def sparse_and_bad(rank, where):
    model = DistributedDataParallel(Bags())
    handle = register(model, overrides={"head.weight": gradcomp.TopK(0.1)}, fallback="never")
    poison = []
    getattr(model.module, where).weight.register_hook(lambda grad: grad * (poison or [1.0])[0])
    seen = []
    for step in range(3):
        model.zero_grad()
        poison[:] = [float("nan")] if step == 1 and rank == 1 else []
        before = handle.residual("head.weight")
        model(T([1, 2])).sum().backward()
        embedded = model.module.embed.weight.grad.coalesce().values()
        seen.append((bool(embedded.isnan().all()), bool(model.module.head.weight.grad.isnan().all())))
        if step == 1:
            assert torch.equal(handle.residual("head.weight"), before)
    return seen, handle.traffic.bad_steps


@pytest.mark.parametrize("where", ["embed", "head"])
def test_8_a_bad_step_spoils_sparse_gradients_too(where):
    assert run_ranks(2, sparse_and_bad, where) == [([(False, False), (True, True), (False, False)], 1)] * 2


# Complex parameters: pairs of real numbers


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(40, 40, dtype=torch.complex64))
        self.small = nn.Parameter(torch.zeros(3, dtype=torch.complex128))
        self.real = nn.Linear(40, 40)

    def forward(self, given):
        return sum((getattr(self, name) * grad.conj()).sum().real for name, grad in given.items()) + 0 * self.real(torch.ones(40)).sum()


def complex_gradients(rank, rule, view):
    torch.manual_seed(0)
    model = DistributedDataParallel(Waves(), gradient_as_bucket_view=view)
    handle = register(model, overrides={"*": rule}, values="fp32", fallback="never")
    out, local = ({"phase": 0.0, "small": 0.0} for _ in range(2))
    for step in range(4):
        given = {
            "phase": torch.complex(draw(rank, step, (40, 40)), draw(rank, 50 + step, (40, 40))),
            "small": torch.complex(draw(rank, step, (3,)), draw(rank, 50 + step, (3,))).to(torch.complex128),
        }
        model.zero_grad()
        model(given).backward()
        for name, grad in given.items():
            out[name] = out[name] + getattr(model.module, name).grad
            local[name] = local[name] + grad
    return out, local, {name: torch.view_as_complex(handle.residual(name)) for name in out}


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("rule", [gradcomp.TopK(0.1), gradcomp.Threshold(6.0), gradcomp.Dense()])
def test_complex_parameters_lose_nothing(rule, view):
    results = run_ranks(2, complex_gradients, rule, view)
    for name, out in results[0][0].items():
        exact = sum(local[name] for _, local, _ in results) / 2
        pending = sum(residual[name] for _, _, residual in results) / 2
        assert torch.equal(out + pending, exact), name
        if name == "phase" and rule != gradcomp.Dense():
            assert pending.count_nonzero() > 100


# 15: Join


def joined(rank, divide, empty_first):
    shapes = {"w": torch.zeros(30, 40), "v": torch.zeros(5), "d": torch.zeros(9000)}
    overrides = {"w": gradcomp.TopK(0.05), "*": gradcomp.Dense()}
    model, handle = given_ddp(
        shapes, None, "fp32", overrides=overrides, ddp={"bucket_cap_mb": 0.01}, fallback="never", check=False
    )  # parameters of ranks that have joined do differ for a while
    own = (0 if empty_first else 2) if rank == 0 else 5
    applied, local = ({name: torch.zeros_like(value, dtype=torch.float64) for name, value in shapes.items()} for _ in range(2))
    with model.join(divide_by_initial_world_size=divide):
        for step in range(own):
            grads = {name: draw(rank, step, value.shape) for name, value in shapes.items()}
            out = reduced(model, grads)
            for name in shapes:
                applied[name] += out[name].double()
                local[name] += grads[name].double()
    return handle.traffic, applied, local, {name: handle.residual(name).double() for name in shapes}


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("empty_first", [False, True])
def test_15_join_with_uneven_inputs(divide, empty_first):
    first, last = run_ranks(2, joined, divide, empty_first)
    assert first[0].steps == last[0].steps == 5
    assert first[0].sent_bytes == last[0].sent_bytes > 0
    for name in last[1]:  # divided by the initial world size either way: a rank that has joined counts as a zero gradient
        exact = (first[2][name] + last[2][name]) / 2
        pending = (first[3][name] + last[3][name]) / 2
        assert torch.equal(last[1][name] + pending, exact), name
    assert first[3]["w"].count_nonzero() < last[3]["w"].count_nonzero(), "what a joined rank holds goes on being sent"


# Backward passes: several before one optimizer step, and a second one through the same graph


def several(rank, view, passes):
    shapes = {"w": torch.zeros(30, 40), "v": torch.zeros(5), "d": torch.zeros(9000)}
    overrides = {"w": gradcomp.TopK(0.05), "*": gradcomp.Dense()}
    model, handle = given_ddp(
        shapes, None, "fp32", overrides=overrides, ddp={"bucket_cap_mb": 0.01, "gradient_as_bucket_view": view}, fallback="never"
    )
    applied, local = ({name: torch.zeros_like(value, dtype=torch.float64) for name, value in shapes.items()} for _ in range(2))
    for step in range(4):
        model.zero_grad()
        for each in range(passes):
            grads = {name: draw(rank, 10 * step + each, value.shape) for name, value in shapes.items()}
            model(grads).backward()
            for name in shapes:
                local[name] += grads[name].double()
        for name, p in model.module.named_parameters():
            applied[name] += p.grad.double()
    return applied, local, {name: handle.residual(name).double() for name in shapes}, handle.traffic.steps


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("passes", [2, 3])
def test_several_synchronised_backward_passes_before_one_optimizer_step(passes, view):
    """The last of them carries what the ones before it left in ``.grad``: what is applied and what is pending is still everything."""
    results = run_ranks(2, several, view, passes)
    for name in results[0][0]:
        exact = sum(local[name] for _, local, _, _ in results) / 2
        pending = sum(residual[name] for _, _, residual, _ in results) / 2
        assert torch.equal(results[0][0][name] + pending, exact), name
        assert torch.equal(results[0][0][name], results[1][0][name])
    assert [steps for *_, steps in results] == [4 * passes] * 2


def through_the_same_graph(rank):
    """A second backward pass without a forward pass: DDP itself does not synchronise it, with a hook or without."""
    torch.manual_seed(0)
    net = nn.Linear(30, 40)
    hooked, plain = DistributedDataParallel(net), DistributedDataParallel(copy.deepcopy(net))
    handle = register(hooked, overrides={"*": gradcomp.Dense()}, values="fp32")
    seen = []
    for model in (hooked, plain):
        loss = model(torch.full((2, 30), rank + 1.0)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        seen.append(model.module.weight.grad.clone())
        model.zero_grad()
        model(torch.full((2, 30), rank + 1.0)).square().sum().backward()
        seen.append(model.module.weight.grad.clone())
    return torch.equal(seen[0], seen[2]), torch.equal(seen[1], seen[3]), handle.traffic.steps


def test_a_second_backward_pass_through_the_same_graph_is_as_in_plain_ddp():
    assert run_ranks(2, through_the_same_graph) == [(True, True, 2)] * 2


def differentiated_twice(rank):
    """A gradient penalty: autograd.grad inside the forward pass, one synchronised backward pass."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30))
    hooked, plain = DistributedDataParallel(net), DistributedDataParallel(copy.deepcopy(net))
    register(hooked, overrides={"*": gradcomp.Dense()}, values="fp32")
    for model in (hooked, plain):
        x = torch.randn(3, 30, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        loss = model(x).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
    return all(torch.equal(a.grad, b.grad) for a, b in zip(hooked.parameters(), plain.parameters()))


def test_a_gradient_penalty_is_as_in_plain_ddp():
    assert run_ranks(2, differentiated_twice) == [True, True]


# Frozen for a while, unused for a while, shared


def frozen_then_not(rank):
    """Parameters are unfrozen by wrapping the network again; residuals go along by name."""
    net = Given(a=torch.zeros(30, 40), b=torch.zeros(30, 40), v=torch.zeros(5))
    totals, local = ({name: torch.zeros_like(p, dtype=torch.float64) for name, p in net.named_parameters()} for _ in range(2))
    state = None
    for phase, trained in enumerate((["a", "v"], ["a", "b", "v"], ["b", "v"])):
        for name, p in net.named_parameters():
            p.requires_grad_(name in trained)
            p.grad = None
        model = DistributedDataParallel(net)
        handle = register(model, overrides={"v": gradcomp.Dense(), "*": gradcomp.TopK(0.05)}, values="fp32", fallback="never")
        if state is not None:
            handle.load_state_dict(state)
        for step in range(3):
            grads = {name: draw(rank, 10 * phase + step, getattr(net, name).shape) for name in trained}
            out = reduced(model, grads)
            for name in trained:
                totals[name] += out[name].double()
                local[name] += grads[name].double()
        state = handle.state_dict()
    return totals, local, {name: handle.residual(name).double() for name in totals}


def test_parameters_frozen_and_unfrozen_keep_their_residuals():
    results = run_ranks(2, frozen_then_not)
    for name in results[0][0]:
        exact = sum(local[name] for _, local, _ in results) / 2
        pending = sum(residual[name] for _, _, residual in results) / 2
        assert torch.equal(results[0][0][name] + pending, exact), name
        assert (name == "v") == (pending.count_nonzero() == 0)


def frozen_in_place(rank):
    """Frozen after wrapping: an unused parameter from then on, as far as DDP is concerned."""
    model, handle = given_ddp(
        {"a": torch.zeros(4), "b": torch.zeros(4)}, gradcomp.TopK(0.5), "fp32", ddp={"find_unused_parameters": True}, fallback="never"
    )
    reduced(model, {"a": T([1.0, 2, 3, 4]), "b": T([1.0, 2, 3, 4])})
    model.module.b.requires_grad_(False)
    for _ in range(2):
        assert reduced(model, {"a": T([1.0, 2, 3, 4]), "b": T([1.0, 2, 3, 4])})["b"] is None
    held = handle.residual("b").tolist()
    model.module.b.requires_grad_(True)
    return held, reduced(model, {"a": T([1.0, 2, 3, 4]), "b": T([3.0, 0, 0, 0])})["b"].tolist()


@pytest.mark.usefixtures("either_device")
def test_a_parameter_frozen_in_place_keeps_its_residual():
    assert run_ranks(2, frozen_in_place) == [([1, 2, 0, 0], [4, 2, 0, 0])] * 2


def alternating(rank, fallback, values):
    """c and e are used on alternating steps, by the two ranks at different times, d by nobody for a while."""
    shapes = {"a": (30, 40), "c": (30, 40), "d": (30, 40), "e": (7,)}
    model, handle = given_ddp(
        {name: torch.zeros(shape) for name, shape in shapes.items()}, gradcomp.TopK(0.05), values,
        ddp={"find_unused_parameters": True, "bucket_cap_mb": 0.004}, fallback=fallback,
    )  # fmt: skip
    total, local = ({name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()} for _ in range(2))
    for step in range(10):
        used = {"a"} | ({"c"} if (step + rank) % 2 else set()) | ({"d"} if step % 4 == 0 else set()) | ({"e"} if step % 2 else set())
        grads = {name: draw(rank, step, shapes[name]) for name in used}
        for name, grad in reduced(model, grads).items():
            if grad is not None:
                total[name] += grad.double()
        for name, grad in grads.items():
            local[name] += grad.double()
    return total, local, {name: handle.residual(name).double() for name in shapes}


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("fallback", ["dense", "never"])
def test_7_parameters_unused_on_alternating_steps_lose_nothing(fallback, values):
    results = run_ranks(2, alternating, fallback, values)
    for name in results[0][0]:
        exact = sum(local[name] for _, local, _ in results) / 2
        pending = sum(residual[name] for _, _, residual in results) / 2
        assert torch.equal(results[0][0][name] + pending, exact), name


def quiet_in_a_static_graph(rank):
    model, handle = given_ddp(
        {"a": torch.zeros(2), "c": torch.zeros(2)}, gradcomp.TopK(0.5), "fp32", ddp={"static_graph": True}, fallback="never"
    )
    seen = []
    for a, c in (([1.0, 0.5], [2.0, 0.875]), ([1.0, 0.0], [0.0, 0.0]), ([0.0, 0.0], [0.0, 0.0]), ([1.0, 0.0], [0.0, 0.125])):
        out = reduced(model, {"a": T(a), "c": T(c)})
        seen.append((out["c"].tolist(), handle.residual("c").tolist()))
    return seen


@pytest.mark.usefixtures("either_device")
def test_7_a_static_graph_keeps_what_waits_for_a_gradient():
    expected = [([2, 0], [0, 0.875]), ([0, 0], [0, 0.875]), ([0, 0], [0, 0.875]), ([0, 1], [0, 0])]
    assert run_ranks(2, quiet_in_a_static_graph) == [expected] * 2


class Tied(nn.Module):
    """The embedding is the output layer too, and one layer is used twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 30)
        self.twice = nn.Linear(30, 30)
        self.again = self.twice
        self.head = nn.Linear(30, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.again(self.twice(self.embed(ids)).tanh())).sum()


def tied(rank):
    torch.manual_seed(0)
    net = Tied()
    probe = copy.deepcopy(net)
    model = DistributedDataParallel(net, bucket_cap_mb=0.003)
    handle = register(model, overrides={"*": gradcomp.TopK(0.05)}, values="fp32", fallback="never")
    out, local = ({name: 0.0 for name, _ in net.named_parameters()} for _ in range(2))
    for step in range(3):
        for each in (model, probe):
            each.zero_grad()
            each(T([1, 2, 3 + rank + step])).backward()
        for name, p in net.named_parameters():
            out[name] = out[name] + p.grad.double()
        for name, p in probe.named_parameters():
            local[name] = local[name] + p.grad.double()
    return out, local, {name: handle.residual(name).double() for name in out}


@pytest.mark.usefixtures("either_device")
def test_shared_parameters_have_one_residual():
    results = run_ranks(2, tied)
    assert set(results[0][0]) == {"embed.weight", "twice.weight", "twice.bias"}
    for name in results[0][0]:
        exact = sum(local[name] for _, local, _ in results) / 2
        pending = sum(residual[name] for _, _, residual in results) / 2
        torch.testing.assert_close(results[0][0][name] + pending, exact, rtol=1e-6, atol=1e-6)


# 17: torch.compile


def compiled(rank, way):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(400, 400) for _ in range(5)])

    eager, inner = (DistributedDataParallel(make(), bucket_cap_mb=2) for _ in range(2))
    rule = gradcomp.TopK(0.02)
    handles = [register(model, rule, values="bf16") for model in (eager, inner)]
    if way == "no optimizer":
        torch._dynamo.config.optimize_ddp = False
    model = torch.compile(inner, backend="aot_eager")
    for step in range(3):
        x = torch.randn(3, 400, generator=torch.Generator().manual_seed(10 * step + rank))
        for each in (eager, model):
            each.zero_grad()
            each(x).square().mean().backward()
    same = all(torch.equal(a.grad, b.grad) for a, b in zip(eager.parameters(), inner.parameters()))
    return same, [handle.traffic.steps for handle in handles], handles[1].traffic.ratio > 30


@pytest.mark.parametrize("way", ["default", "no optimizer"])
def test_17_a_compiled_model_trains_as_the_eager_one(way):
    assert run_ranks(2, compiled, way) == [(True, [3, 3], True)] * 2


def python_reducer(rank):
    torch._dynamo.config.optimize_ddp = "python_reducer"
    model = DistributedDataParallel(nn.Linear(40, 40))
    register(model)
    compiled_model = torch.compile(model, backend="aot_eager")
    words = r"bucket must be a bucket of DistributedDataParallel's own reducer, got .* tuple: .*python reducer"
    with pytest.raises(ValueError, match=words):
        compiled_model(torch.ones(2, 40)).sum().backward()
    return True


def test_17_the_python_reducer_is_refused_clearly():
    assert run_ranks(2, python_reducer) == [True, True]


# 26: a static graph and accumulation


def static_accumulation(rank):
    torch.manual_seed(0)
    plain, hooked = mixed_ddp(static_graph=True), mixed_ddp(static_graph=True)
    register(hooked, overrides={"*": gradcomp.Dense()}, values="fp32")
    for model in (plain, hooked):
        loss_of(model, tokens(rank, 0)).backward()  # synchronised: what a static graph needs first
    for step in range(1, 4):
        for model in (plain, hooked):
            model.zero_grad()
            for micro in range(3):
                with model.no_sync() if micro < 2 else contextlib.nullcontext():
                    loss_of(model, tokens(rank, 10 * step + micro)).backward()
        if not all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), hooked.parameters())):
            return step
    first = mixed_ddp(static_graph=True)
    register(first)
    with first.no_sync():
        loss = loss_of(first, tokens(rank, 0))
        with pytest.raises(RuntimeError, match="expect_autograd_hooks_"):  # torch's own assertion
            loss.backward()
    return None


def test_26_a_static_graph_whose_first_backward_pass_is_synchronised():
    assert run_ranks(2, static_accumulation) == [None, None]


# 25: the optimizer's own state


def momentum(rank):
    plain, hooked = mixed_ddp(), mixed_ddp()
    register(hooked, gradcomp.TopK(1.0), overrides={"*": gradcomp.TopK(1.0)}, values="fp32")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for model in (plain, hooked)]
    for step in range(5):
        for model, optimizer in zip((plain, hooked), optimizers):
            optimizer.zero_grad()
            loss_of(model, tokens(rank, step)).backward()
            optimizer.step()
    return all(torch.equal(a, b) for a, b in zip(plain.parameters(), hooked.parameters()))


def test_25_density_one_with_momentum_and_weight_decay_is_plain_ddp():
    assert run_ranks(2, momentum) == [True, True]


def huge_model(rank):
    """Several parameters whose indices together exceed what 24 bits hold, in one bucket."""
    model, handle = given_ddp(
        {name: torch.zeros(3 * 2**21) for name in "abc"}, gradcomp.TopK(1e-6), "bf16", ddp={"bucket_cap_mb": 4096}, check=False
    )
    grads = {name: torch.zeros(3 * 2**21) for name in "abc"}
    for place, name in enumerate("abc"):
        grads[name][-1 - place], grads[name][place] = 2.0 + rank, 1.0
    out = reduced(model, grads)
    kept = {name: (out[name][-1 - place].item(), out[name][place].item()) for place, name in enumerate("abc")}
    return kept, sum(int(grad.count_nonzero()) for grad in out.values()), handle.traffic.payload_bytes < 1000


def test_a_very_large_bucket_keeps_every_index_apart():
    assert run_ranks(2, huge_model) == [(dict.fromkeys("abc", (2.5, 1.0)), 6, True)] * 2


# What attackers found


class TwoDtypes(nn.Module):
    """Two buckets from the first step on."""

    def __init__(self, kind):
        super().__init__()
        self.first = nn.Linear(40, 40)
        self.kind = kind
        if kind == "half":
            self.second = nn.Linear(40, 40).bfloat16()
        elif kind == "complex":
            self.second = nn.Parameter(torch.ones(40, 40, dtype=torch.complex64))
        else:
            self.second = nn.Embedding(40, 40, sparse=True)

    def forward(self, x):
        x = self.first(x)
        if self.kind == "half":
            return self.second(x.bfloat16()).float().square().sum()
        if self.kind == "complex":
            return (x.to(torch.complex64) @ self.second).abs().square().sum()
        return (x * self.second(torch.tensor([1, 2]))).sum()


def several_first_buckets(rank, kind, world_size):
    torch.manual_seed(0)
    hooked = DistributedDataParallel(TwoDtypes(kind), static_graph=True)
    plain = DistributedDataParallel(copy.deepcopy(hooked.module), static_graph=True)
    handle = register(hooked, overrides={"*": gradcomp.Dense()}, values="fp32")
    for step in range(4):
        for model in (hooked, plain):
            model.zero_grad()
            model(draw(rank, step, (2, 40))).backward()
        for ours, theirs in zip(hooked.parameters(), plain.parameters()):
            assert torch.equal(ours.grad.to_dense(), theirs.grad.to_dense()), step
    return handle.traffic.steps


@pytest.mark.parametrize("kind", ["half", "complex", "embedding"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_static_graph_of_several_first_buckets_finishes(world_size, kind):
    """torch numbers all buckets of a static graph's first step 0, and calls none of them the last."""
    assert run_ranks(world_size, several_first_buckets, kind, world_size, timeout_s=30) == [4] * world_size


def viewed(rank, world_size):
    """Gradients that lie in buckets, sparse ones among them, through a rebuild under no_sync."""
    torch.manual_seed(0)
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.02}
    net = nn.Sequential(nn.Embedding(50, 30, sparse=True), *[nn.Linear(30, 30) for _ in range(6)])
    hooked, plain = DistributedDataParallel(net, **options), DistributedDataParallel(copy.deepcopy(net), **options)
    register(hooked, overrides={"*": gradcomp.Dense()}, values="fp32")
    for step in range(6):
        for model in (hooked, plain):
            if step % 3 == 1:
                model.zero_grad()
            with model.no_sync():
                model(torch.tensor([rank, 2 + step])).square().sum().backward()
            model(torch.tensor([rank + 1, 3])).square().sum().backward()
        for name, ours in hooked.module.named_parameters():
            theirs = plain.module.get_parameter(name)
            if not torch.equal(ours.grad.to_dense(), theirs.grad.to_dense()):
                return step, name
    return None


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_in_buckets_beside_sparse_ones_are_as_in_plain_ddp(world_size):
    assert run_ranks(world_size, viewed, world_size) == [None] * world_size


def ignored(rank):
    net = nn.Sequential(Given(w=torch.zeros(40, 40), mine=torch.full((3,), float(rank))))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.mine"])
    model = DistributedDataParallel(net)
    handle = register(model, gradcomp.TopK(0.1), fallback="never")
    for _ in range(3):
        model.zero_grad()
        model({"w": torch.ones(40, 40), "mine": torch.ones(3)}).backward()
    return handle.traffic.steps, handle.traffic.parameters


def test_parameters_that_ddp_ignores_are_ignored():
    assert run_ranks(2, ignored) == [(3, 1)] * 2


def dense_then_sparse(rank):
    torch.manual_seed(0)
    states = {}
    for sparse in (False, True):
        model = DistributedDataParallel(nn.Sequential(nn.Embedding(50, 30, sparse=sparse), nn.Linear(30, 30)))
        handle = register(model, gradcomp.TopK(0.05), fallback="never")
        if states:
            handle.load_state_dict(states)
        loss = model(torch.arange(40)).square().sum()
        if sparse:
            with pytest.raises(gradcomp.GradcompError, match=r"parameter 0\.weight has a sparse gradient and a residual of dense ones"):
                loss.backward()
        else:
            loss.backward()
            states = handle.state_dict()
    return True


def test_a_residual_that_a_sparse_gradient_cannot_carry_is_not_dropped():
    assert run_ranks(2, dense_then_sparse) == [True, True]
