"""Selection and codec where the host must not wait: torch operations of static shapes, on the device that holds the data.

What the numpy passes of :mod:`gradcomp.core.scan`, :mod:`gradcomp.core.codec` and :mod:`gradcomp.core.values` do on the CPU, bit for bit
(but for the scales, which are sums in another order). How many elements there are is known to the device alone: a list has as many
places as it has room for, those in use come first, and the rest is padding, which encodes to zero bits and adds nothing.

The CPU can do it too, which is how it is tested.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.core.codec import index_bits, low_bits
from gradcomp.core.rules import AnyRule, Dense, Threshold, TopK, fill_mask
from gradcomp.core.scan import largest_mask, magnitudes
from gradcomp.core.values import LARGEST, SMALLEST, Format


class Picked(NamedTuple):
    """What a rule chose of one tensor of N elements, in K places.

    Attributes:
        indices: int64 [K], ascending; N in padding.
        values: fp32 [K]; 0 in padding.
        wanted: int64 scalar; the elements that the rule selected, whether there is a place for them or not.
        finite: bool scalar; whether all N elements are.
    """

    indices: Tensor
    values: Tensor
    wanted: Tensor
    finite: Tensor


def choose(rule: AnyRule, name: str, acc: Tensor, like: Tensor) -> Tensor:
    """The mask of what ``rule`` says matters: bool [N].

    Args:
        rule: of the tensor called ``name``.
        name: what rules that are told names are told.
        acc: fp32 [N], in the memory order of ``like``.
        like: a tensor with the shape and strides in which a rule of the user's is shown ``acc``.
    """
    if type(rule) is Threshold:
        return ~(acc.abs() <= min(rule.tau, torch.finfo(acc.dtype).max))  # NaN is among them, and so is what is infinite
    if type(rule) is TopK:
        magnitude = magnitudes(acc)
        return largest_mask(magnitude > 0, magnitude, rule.count(acc.numel()))
    mask = torch.zeros(acc.numel(), dtype=torch.bool, device=acc.device)
    if type(rule) is Dense:
        return ~mask
    shown = acc.clone()  # a rule may write to what it is shown
    fill_mask(rule, name, shown.as_strided(like.shape, like.stride()), mask.as_strided(like.shape, like.stride()))
    return mask


def pick(mask: Tensor, acc: Tensor, capacity: int, *, fits: bool = False) -> Picked:
    """The elements of a mask, in ``capacity`` places: where there are too few, the largest magnitudes, ties to the lowest index.

    ``fits``: there are never too few.
    """
    numel = acc.numel()
    kept = mask if fits or capacity >= numel else largest_mask(mask, magnitudes(acc), capacity)
    indices = torch.nonzero_static(kept, size=capacity, fill_value=numel).view(-1)
    values = torch.where(indices < numel, acc[indices.clamp(max=max(0, numel - 1))], 0.0)
    return Picked(indices, values, mask.sum(), acc.isfinite().all())


def gathered_first(used: Tensor, *columns: Tensor) -> list[Tensor]:
    """Columns of [K] with the places in use moved to the front, in their order; zeros after them."""
    numel = used.numel()
    place = torch.where(used, used.cumsum(0) - 1, numel)
    return [column.new_zeros(numel + 1).scatter_(0, place, column)[:numel] for column in columns]


# Bits


def pack_bits(bits: Tensor) -> Tensor:
    """Bool or 0/1 [..., M] -> uint8 [..., ceil(M / 8)], the first bit lowest."""
    missing = -bits.shape[-1] % 8
    octets = torch.nn.functional.pad(bits.to(torch.uint8), (0, missing)).view(*bits.shape[:-1], -1, 8)
    return torch.sum(octets << _places(8, bits), -1, dtype=torch.uint8)


def unpack_bits(data: Tensor, count: int) -> Tensor:
    """The inverse: uint8 [..., B] -> 0/1 as uint8 [..., count]."""
    return (data.unsqueeze(-1) >> _places(8, data) & 1).flatten(-2)[..., :count]


def _places(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device, dtype=torch.uint8)


# Indices


def encode_indices(indices: Tensor, sent: Tensor, numel: int) -> Tensor:
    """As :func:`gradcomp.core.codec.encode_indices`, of the first ``sent`` of K ascending indices below ``numel``."""
    count = indices.numel()
    low, size = low_bits(numel, count), index_bits(numel, count)
    order = torch.arange(count, device=indices.device)
    used = order < sent
    rest = indices - order
    bits = torch.zeros(size + 1, dtype=torch.uint8, device=indices.device)  # the last one is thrown away
    lowest = torch.arange(low, device=indices.device)
    bits[: count * low] = ((rest.unsqueeze(1) >> lowest & 1) * used.unsqueeze(1)).to(torch.uint8).view(-1)
    bits.index_fill_(0, torch.where(used, count * low + (rest >> low) + order, size), 1)
    return pack_bits(bits[:size])


def decode_indices(data: Tensor, sent: Tensor, numel: int, count: int) -> tuple[Tensor, Tensor]:
    """The inverse.

    Returns:
        int64 [count], ``numel`` in padding and in place of what cannot be right; and whether the bytes hold ``sent`` strictly
        ascending indices below ``numel``, a bool scalar.
    """
    low, size = low_bits(numel, count), index_bits(numel, count)
    bits = unpack_bits(data, size)
    order = torch.arange(count, device=data.device)
    used = order < sent
    places = torch.nonzero_static(bits[count * low :], size=count, fill_value=0).view(-1)
    lowest = torch.arange(low, device=data.device)
    below = (bits[: count * low].view(count, low).to(torch.int64) << lowest).sum(1)
    indices = torch.where(used, (places - order << low) + below + order, numel)
    inside = (indices >= 0) & (indices < numel)
    ascending = (indices[1:] > indices[:-1]) | ~used[1:]
    intact = (sent <= count) & (bits[count * low :].sum() == sent) & (inside | ~used).all() & ascending.all()
    return torch.where(inside & intact, indices, numel), intact


# Values


def scale_of(values: Tensor, sent: Tensor, form: Format) -> Tensor:
    """As :func:`gradcomp.core.values.scale_of`, of ``sent`` values and zeros: an fp32 scalar."""
    if not form.scaled or not values.numel():
        return values.new_zeros(())
    magnitude = values.double().abs()
    scale = magnitude.max() / 127 if form.name == "int8" else magnitude.sum() / sent.clamp(min=1)
    return torch.where(sent > 0, scale.clamp(SMALLEST, LARGEST), 0.0).to(torch.float32)


def encode_values(values: Tensor, form: Format, scales: Tensor | None = None) -> Tensor:
    """As :func:`gradcomp.core.values.encode_values`; fp32 [K], zeros in padding. ``scales``: of each value [K], where there are any."""
    if form.dtype is not None:
        limit = torch.finfo(form.dtype).max
        return values.clamp(-limit, limit).to(form.dtype).view(torch.uint8)
    if form.name == "sign":
        return pack_bits(values.signbit())
    if scales is None:
        raise ValueError(f"scales must be given for values in {form.name}")
    steps = (values / torch.where(scales > 0, scales, 1.0)).round().nan_to_num()
    return steps.clamp(-127, 127).to(torch.int8).view(torch.uint8)


def decode_values(data: Tensor, form: Format, count: int, scales: Tensor | None = None) -> Tensor:
    """As :func:`gradcomp.core.values.decode_values`: fp32 [count]. What padding decodes to must not be used."""
    if form.dtype is not None:
        return data.clone(memory_format=torch.contiguous_format).view(form.dtype).to(torch.float32)  # views of other dtypes must be aligned
    if scales is None:
        raise ValueError(f"scales must be given for values in {form.name}")
    if form.name == "sign":
        return (1.0 - 2.0 * unpack_bits(data, count)) * scales
    return (data.view(torch.int8).to(torch.float32) * scales).clamp(-LARGEST, LARGEST)
