"""Networks, registered models and training loops that rank functions share."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.ddp import connection


class Mixed(nn.Module):
    """Linears, a convolution, a norm and an embedding: parameters of 1 to 4 dimensions, several buckets at ``bucket_cap_mb=0.01``."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 64)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.norm = nn.LayerNorm(64)
        self.hidden = nn.Linear(64, 96)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(96, 30)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.hidden(self.norm(x)).tanh() * self.scale)


def tokens(rank, step):
    """A batch that differs by rank and step."""
    return torch.randint(0, 30, (4, 9), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def mixed_ddp(**options):
    torch.manual_seed(0)
    options.setdefault("bucket_cap_mb", 0.01)
    return DistributedDataParallel(Mixed(), **options)


class Given(nn.Module):
    """Parameters whose gradients are whatever each step gives: the loss is the inner product with it."""

    def __init__(self, **parameters):
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, grads):
        return sum((getattr(self, name) * grad).sum() for name, grad in grads.items())


def register(model, rule=None, **options):
    """``gradcomp.register`` with every step checked, where that can be done, unless a test counts bytes."""
    return gradcomp.register(model, rule, **{"check": bool(connection.HOSTS), **options})


def given_ddp(parameters, rule, values="fp32", overrides=None, ddp=None, **options):
    """A DDP model of :class:`Given`, and its handle; the rule is for every parameter unless overridden."""
    model = DistributedDataParallel(Given(**parameters), **(ddp or {}))
    handle = register(model, overrides=overrides or {"*": rule}, values=values, **options)
    return model, handle


def reduced(model, grads):
    """One backward pass with these local gradients; the reduced gradients by name (None where there is none)."""
    model.zero_grad()
    model(grads).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.module.named_parameters()}


def recorded(rank, steps, rule, values, optimizers, **options):
    """Train :class:`Mixed` under one rule for all parameters; model, handle, and of every step the local and the reduced gradients,
    residuals and velocities, by name. ``optimizers`` is its momentum; the hook's is one of ``options``."""
    torch.manual_seed(0)
    probe = Mixed()  # never wrapped: its backward passes give the local gradients
    model = mixed_ddp()
    handle = register(model, overrides={"*": rule}, values=values, fallback="never", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=optimizers)
    names = [name for name, _ in probe.named_parameters()]
    history = []
    for step in range(steps):
        probe.load_state_dict(model.module.state_dict())
        probe.zero_grad()
        loss_of(probe, tokens(rank, step)).backward()
        optimizer.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        history.append(
            {
                "local": {name: p.grad.clone() for name, p in probe.named_parameters()},
                "reduced": {name: p.grad.clone() for name, p in model.module.named_parameters()},
                "residual": {name: handle.residual(name) for name in names},
                "velocity": {name: handle.velocity(name) for name in names},
            }
        )
    return model, handle, history
