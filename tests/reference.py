"""Slow, obvious oracles: loops, sorts and Python integers, sharing no code with the fast paths."""

import math

import torch

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def top_k_indices(data, k):
    """Flat indices of the k largest magnitudes: no zeros, ties to the lowest index, NaN as infinite."""
    magnitude = [math.inf if math.isnan(x) else abs(x) for x in data.reshape(-1).tolist()]
    order = sorted((i for i, m in enumerate(magnitude) if m != 0), key=lambda i: (-magnitude[i], i))
    return sorted(order[:k])


def threshold_indices(data, tau):
    """Flat indices with |x| > tau in the data's own precision, half precision as fp32; NaN included."""
    data = data if data.dtype == torch.float64 else data.float()
    return [i for i, x in enumerate(data.reshape(-1)) if not bool(x.abs() <= tau)]


def rounded(values, form):
    """What a receiver decodes of one parameter's fp32 values: rounded to the format, saturating at its finite range."""
    listed = values.double().tolist()
    if form in FORMATS:
        limit = torch.finfo(FORMATS[form]).max
        return torch.tensor([max(-limit, min(limit, x)) for x in listed], dtype=torch.float64).to(FORMATS[form]).float()
    if not listed:
        return torch.empty(0)
    magnitudes = [abs(x) for x in listed]
    largest = torch.finfo(torch.float32).max
    if form == "sign":
        scale = max(2.0**-149, fp32(math.fsum(magnitudes) / len(magnitudes)))
        return torch.tensor([math.copysign(scale, x) for x in listed])
    scale = max(2.0**-149, fp32(max(magnitudes) / 127))
    steps = [max(-127, min(127, round(fp32(fp32(x) / scale)))) for x in listed]  # Python rounds halves to even, as numpy does
    return torch.tensor([max(-largest, min(largest, step * scale)) for step in steps], dtype=torch.float64).float()


def fp32(number):
    """The nearest fp32 number."""
    return float(torch.tensor(number, dtype=torch.float64).float())


def accumulated(residual, grad):
    """fp32(residual + grad): the fp64 sum rounded once (fp64 has more than twice fp32's digits)."""
    return (residual.double() + grad.double()).float()


def elias_fano(indices, numel, count):
    """The index bytes, from bit strings; the layout is the one that codec.py describes."""
    low = min(range(max(1, numel.bit_length())), key=lambda bits: count * bits + count + ((numel - count) >> bits))
    lows, highs = "", ["0"] * (count + ((numel - count) >> low) if count else 0)
    for order, index in enumerate(indices):
        rest = index - order
        lows += format(rest % (1 << low), f"0{low}b")[::-1] if low else ""
        highs[(rest >> low) + order] = "1"
    bits = lows.ljust(count * low, "0") + "".join(highs)
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def information_bound(numel, count):
    """log2 of the number of subsets of ``count`` of ``numel``, in bits."""
    return (math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)) / math.log(2)


class Ranks:
    """Error feedback over W ranks, one tensor at a time: what the hook must do, without a network.

    Args:
        shapes: name -> shape.
        choose: function of (name, accumulated tensor) that gives the flat indices that matter.
        form: value format.
        world_size: W.
        sized: whether capacities follow what the ranks wanted, two steps later (every rule but TopK and Dense).
        momentum: of DGC's momentum correction; such that its products with gradients are exact.
    """

    def __init__(self, shapes, choose, form, world_size, sized=False, momentum=0.0):
        self.residual, self.velocity = [
            [{name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(world_size)] for _ in range(2)
        ]
        self.momentum = momentum
        self.choose, self.form, self.world_size, self.sized = choose, form, world_size, sized
        self.capacities = {}  # name -> those of the coming steps

    def step(self, grads):
        """``grads[rank][name]`` -> the reduced gradients by name. Updates the residuals."""
        reduced = {}
        for name in grads[0]:
            shape = grads[0][name].shape
            moved = [accumulated(self.momentum * self.velocity[rank][name], local[name]) for rank, local in enumerate(grads)]
            accs = [accumulated(self.residual[rank][name], local).reshape(-1) for rank, local in enumerate(moved)]
            wanted = [self.choose(name, acc) for acc in accs]
            after = self._capacity(shape.numel(), max(map(len, wanted)))
            capacity, *coming = self.capacities.setdefault(name, [after, after])
            self.capacities[name] = [*coming, after]
            total = torch.zeros(shape.numel())
            silent = all(not bool(local[name].count_nonzero()) for local in grads)
            for rank, acc in enumerate(accs):
                kept, left = self.residual[rank][name].reshape(-1).clone(), self.velocity[rank][name].reshape(-1).clone()
                if not silent:
                    kept, left = acc.clone(), moved[rank].reshape(-1).clone()
                    largest = sorted(wanted[rank], key=lambda i: (-abs(float(acc[i])), i))[:capacity]
                    chosen = torch.tensor(sorted(largest), dtype=torch.int64)
                    released = rounded(acc[chosen], self.form)
                    kept[chosen] = acc[chosen] - released
                    total[chosen] += released * (1.0 / self.world_size)
                    left[chosen] = 0.0
                self.velocity[rank][name] = left.view(shape)
                self.residual[rank][name] = kept.view(shape)
            reduced[name] = total.view(shape)
        return reduced

    def _capacity(self, numel, wanted):
        if not self.sized:
            return numel
        return min(numel, max(64, 64 * math.ceil(1.25 * wanted / 64)))


def delay_aware_adamw(
    starts, steps, *, lr, betas=(0.8, 0.95), eps=1e-8, weight_decay=1e-2, max_delay=8, clip_threshold=1.0
):  # fmt: skip
    """The coordinates of one parameter under delay-aware AdamW, in Python floats: every arrival is t gradients of size gradient / t."""
    parameter, last = list(starts), [-1] * len(starts)
    average, square, age = ([0.0] * len(starts) for _ in range(3))
    for step, gradients in enumerate(steps):
        update = [0.0] * len(starts)
        for i, gradient in enumerate(gradients):
            parameter[i] *= 1 - lr * weight_decay
            if gradient == 0:
                continue
            t = min(step - last[i], max_delay)
            last[i] = step
            for _ in range(t):  # t equal gradients, one after the other
                average[i] = betas[0] * average[i] + (1 - betas[0]) * gradient / t
                square[i] = betas[1] * square[i] + (1 - betas[1]) * (gradient / t) ** 2
                age[i] += 1
            update[i] = t * (average[i] / (1 - betas[0] ** age[i])) / ((square[i] / (1 - betas[1] ** age[i])) ** 0.5 + eps)
        length = (sum(u * u for u in update) / len(update)) ** 0.5
        scale = 1.0 if clip_threshold is None or length <= clip_threshold else clip_threshold / length
        parameter = [p - lr * scale * u for p, u in zip(parameter, update)]
    return parameter
