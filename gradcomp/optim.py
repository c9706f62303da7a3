"""Optimizers that know that gradients arrive late: :class:`DelayAwareAdamW`."""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcomp.core.compiled import kernels
from gradcomp.core.rules import number

# Without the wrapper that torch puts around a step: hooks run once, around all groups.
_adamw_step: Callable[[torch.optim.AdamW], Any] = inspect.unwrap(torch.optim.AdamW.step)


class DelayAwareAdamW(torch.optim.AdamW):
    r"""AdamW for gradients of which a coordinate arrives every few steps, as one burst: sparsified, with error feedback.

    Why plain Adam loses under sparsification: a coordinate that arrives every t steps as the sum of t gradients g moves
    :math:`t g / \sqrt{t^2 g^2 / t} = \sqrt t` step lengths where t gradients one by one would move it t of them, so about
    :math:`1/\sqrt t` as far; and its moments decay between the bursts as if nothing had been there to see.

    Here a burst that comes t steps after the last one (t at most ``max_delay``) is taken for what it is, t gradients of size burst / t:

    * the moments decay by :math:`\beta^t` and take :math:`1-\beta^t` of the average gradient, or its square;
    * each coordinate's bias correction counts the steps that its own moments have seen;
    * the update is t times as long;
    * coordinates that did not arrive rest: no update, no decay of their moments. Weight decay goes on for all, every step;
    * a parameter's update whose root mean square (over all its coordinates, in units of ``lr``) is more than ``clip_threshold`` is scaled
      down to that.

    The last is for the first steps above all. AdamW's update has a root mean square of 1 in its first step, in which every coordinate has
    seen one gradient and moves by its sign, and of a fifth of that before long. Here first arrivals come over many steps, each t times as
    long: whole parameters moved at a root mean square of 2 for dozens of steps, and of some trainings that was the end.

    A coordinate that arrives in every step is updated as AdamW does it (to rounding, and unless clipped). A coordinate is taken to have
    arrived when its gradient is not exactly zero; gradients that are zero by themselves (unused embedding rows, say) rest likewise, where
    AdamW would go on moving along the decaying first moment.

    The optimizer sees the mean over ranks, so t is the number of steps since any rank last sent the coordinate: where ranks choose
    different coordinates it is less than the age of what one of them sends.

    Limits: ``max_delay`` bounds what one burst can do to a coordinate, and without such a bound rare bursts at small densities diverge; a
    parameter of few coordinates, which arrive all at once, is in effect bounded by ``clip_threshold``. The average over t steps has a
    smaller second moment than t noisy gradients have, so that the optimizer goes further than AdamW where gradients are noise: late in a
    training its updates have a root mean square of .7 where a fifth of the coordinates arrive, and of ``clip_threshold`` where a tenth
    do; AdamW's have .2. So the smaller the density, the smaller the best ``lr`` (the README has numbers).

    Args:
        params: parameters, or groups of them. A group may set ``delayed``, ``max_delay`` and ``clip_threshold``, once and for all.
        lr, eps, weight_decay, maximize, foreach: as for :class:`torch.optim.AdamW`.
        betas: likewise, but for their default: what arrives is late already, and a shorter memory of it is better.
        max_delay: cap of t, 1 to 254. At 1 bursts count as single gradients, but moments rest between them.
        clip_threshold: largest root mean square of a parameter's update, over 0; None for no limit. What is not finite is not counted.
            Plain groups have no limit.
        delayed: False makes a group plain AdamW with these betas, bit for bit: for parameters that are sent whole, as norms and biases are.

    With the extra ``fast`` a step on a CPU takes 1 to 1.6 times as long as AdamW's if a tenth of the coordinates arrive, 1.5 to 2.6 times
    where a fifth do, 3.5 to 6 times where all do (8 and 1 million elements); without it, and elsewhere, always several times as long.

    State of a parameter of N elements, beside AdamW's two moments: ``delay``, uint8 [N], the steps since the last arrival, and ``age``,
    fp32 [N], the steps that its moments have seen. The state of an AdamW can be loaded.

    Raises:
        ValueError: a setting out of its range, named with its value; a gradient that is a sparse tensor, or a complex parameter, in a
            delayed group.

    Reference:
        Kingma and Ba, "Adam", ICLR 2015; Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019. Clipping the update:
        Shazeer and Stern, "Adafactor", ICML 2018. The delay is ours.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.8, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_delay: int = 8,
        clip_threshold: float | None = 1.0,
        delayed: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, foreach=foreach)
        own = {"max_delay": max_delay, "clip_threshold": clip_threshold, "delayed": delayed}
        for group in self.param_groups:
            for name, value in own.items():
                group.setdefault(name, value)
            self._check(group)
        self.defaults |= own

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the group may set ``delayed``, ``max_delay`` and ``clip_threshold``."""
        super().add_param_group(param_group)
        if "max_delay" in self.defaults:  # not yet while torch's own constructor adds the first groups
            try:
                self._check(self.param_groups[-1])
            except ValueError:
                self.param_groups.pop()
                raise

    @staticmethod
    def _check(group: dict[str, Any]) -> None:
        if not number("max_delay", group["max_delay"]).is_integer() or not 1 <= group["max_delay"] <= 254:
            raise ValueError(f"max_delay must be a whole number in 1..254, got {group['max_delay']!r}")
        if group["clip_threshold"] is not None and not number("clip_threshold", group["clip_threshold"]) > 0:
            raise ValueError(f"clip_threshold must be over 0, or None, got {group['clip_threshold']!r}")
        if not isinstance(group["delayed"], bool):
            raise ValueError(f"delayed must be True or False, got {group['delayed']!r}")
        for name in ("amsgrad", "capturable", "differentiable", "fused"):
            if group["delayed"] and group.get(name):
                raise ValueError(f"{name} is not for a delayed group: leave it out, or set delayed=False, got {group[name]!r}")
        if group["delayed"] and any(parameter.is_complex() for parameter in group["params"]):
            raise ValueError("delayed must be False for a group of complex parameters")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in torch; what was pickled before there was a ``clip_threshold`` gets its default."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            group.setdefault("clip_threshold", 1.0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, which would give every state tensor its parameter's dtype; ``delay`` and ``age`` keep theirs.

        Settings that AdamW has not saved stay as they are here, and so does what only says how AdamW computed (``fused`` and the like).
        """
        if len(state_dict["param_groups"]) == len(self.param_groups):  # else torch says so
            merged = []
            for group, here in zip(state_dict["param_groups"], self.param_groups):
                ways = ("fused", "capturable", "differentiable") if group.get("delayed", here["delayed"]) else ()
                settings = {name: here[name] for name in ("delayed", "max_delay", "clip_threshold")}
                merged.append(settings | group | {name: here[name] for name in ways})
                self._check(merged[-1] | {"params": here["params"]})
            state_dict = state_dict | {"param_groups": merged}
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, own):
            for name in ("delay", "age"):
                if name in state_dict["state"].get(index, {}):
                    self.state[parameter][name] = state_dict["state"][index][name].detach().clone().to(parameter.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over all groups. Mutates parameters and state."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["delayed"]]
            if self.param_groups:
                _adamw_step(self)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["delayed"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise ValueError("gradients that are sparse tensors are not for a delayed group: delayed=False, or torch.optim.SparseAdam")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if "delay" not in state:  # new, or what AdamW saved
            state["delay"] = torch.zeros_like(parameter, dtype=torch.uint8, memory_format=torch.preserve_format)
            state["age"] = torch.full_like(parameter, float(state["step"]), dtype=torch.float32, memory_format=torch.preserve_format)
        state["step"] += 1
        tensors = [parameter, gradient, state["exp_avg"], state["exp_avg_sq"], state["age"], state["delay"]]
        settings = [float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"], group["max_delay"]]
        settings += [math.inf if group["clip_threshold"] is None else group["clip_threshold"], -1.0 if group["maximize"] else 1.0]
        plain = parameter.device.type == "cpu" and parameter.dtype == gradient.dtype == torch.float32
        fast = kernels() if plain and all(tensor.is_contiguous() for tensor in tensors) else None
        if fast is not None:
            fast.move(*(tensor.detach().view(-1).numpy() for tensor in tensors), np.array(settings, np.float64))
        else:
            _move(*tensors, *settings)


def _move(
    parameter: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    age: Tensor,
    delay: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_delay: int,
    clip_threshold: float,
    sign: float,
) -> None:
    """What the compiled kernel does, on any device and dtype, with any strides. Mutates all but the gradient."""
    parameter.mul_(1 - lr * weight_decay)
    delay.add_(1).clamp_(max=max_delay)
    arrived = gradient != 0
    t = delay.to(age.dtype) * arrived
    mean = torch.where(arrived, sign * gradient / t, 0)
    age.add_(t)
    average.lerp_(mean.to(average.dtype), _missing(beta1, t).to(average.dtype))
    square.lerp_((mean * mean).to(square.dtype), _missing(beta2, t).to(square.dtype))
    root = (square / _missing(beta2, age)).sqrt_().add_(eps)
    update = torch.where(arrived, t * average / _missing(beta1, age) / root, 0)
    finite = torch.where(update.isfinite(), update, 0)
    update /= (finite.square().mean().sqrt() / clip_threshold).nan_to_num_(nan=1).clamp_(min=1)  # NaN: of no coordinates
    parameter.sub_(lr * update.to(parameter.dtype))
    delay.mul_(~arrived)


def _missing(beta: float, steps: Tensor) -> Tensor:
    """``1 - beta ** steps``, exact for small results."""
    if beta == 0:
        return (steps > 0).to(steps.dtype)
    return -torch.expm1(steps * math.log(beta))
