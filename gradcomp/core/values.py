"""Values <-> bytes: fp32, bf16, fp16, int8 with one scale, sign with one magnitude.

What a narrow float format cannot hold saturates at its largest finite value. What any format rounds away is the sender's to keep: for
fp32, bf16, fp16 (below 2^29) and int8 the difference between a value and what is decoded of it is exact in fp32; for sign it is within
one ulp of the larger of the two.

Reference:
    int8: Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016 (here linear, with one scale a tensor).
    sign: Bernstein et al., "signSGD", ICML 2018, scaled as in Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019, by the
    mean magnitude; here of what is sent.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gradcomp.core.scan import Floats

Bytes = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.float32]

LARGEST = float(np.finfo(np.float32).max)
"""Of fp32."""
_SIGNS = np.array([1, -1], np.float32)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
"""Of fp32, above zero."""


@dataclass(frozen=True, slots=True)
class Format:
    """A value format.

    Attributes:
        name: its public name.
        bits: bits a value takes.
        dtype: the torch dtype of a float format; None for a scaled one.
        riding: the format of dense parameters that ride in a payload of this format.
    """

    name: str
    bits: int
    dtype: torch.dtype | None
    riding: str

    def size(self, count: int) -> int:
        """Bytes that ``count`` values take, scales aside."""
        return -(-count * self.bits // 8)

    @property
    def scaled(self) -> bool:
        """Whether every parameter's values share a scale, which the header carries."""
        return self.dtype is None

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether every finite value of ``dtype`` survives exactly."""
        return self.dtype == dtype or (self.dtype == torch.float32 and dtype in (torch.float16, torch.bfloat16))


FORMATS = {
    form.name: form
    for form in (
        Format("fp32", 32, torch.float32, "fp32"),
        Format("bf16", 16, torch.bfloat16, "bf16"),
        Format("fp16", 16, torch.float16, "fp16"),
        Format("int8", 8, None, "bf16"),
        Format("sign", 1, None, "bf16"),
    )
}
"""Value formats by name. Their order is their code on the wire."""


def check_values(values: str) -> str:
    """Return ``values`` if it names a value format; raise a ``ValueError`` otherwise."""
    if not isinstance(values, str) or values not in FORMATS:
        raise ValueError(f"values must be one of {list(FORMATS)}, got {values!r}")
    return values


def scale_of(values: Floats, form: Format) -> float:
    """The scale of one parameter's values: int8, the largest magnitude / 127; sign, the mean magnitude; else 0. Finite, fp32."""
    if not form.scaled or not values.size:
        return 0.0
    magnitude = np.abs(values.astype(np.float64))
    scale = magnitude.max() / 127 if form.name == "int8" else magnitude.mean()
    # A scale of zero would divide by zero; below 127 of the smallest steps, one step is scale enough.
    return float(np.float32(min(max(scale, SMALLEST), LARGEST)))


def encode_values(values: Floats, form: Format, scales: Scales | float = 0.0) -> Bytes:
    """Write values in ``form``.

    Args:
        values: fp32 or fp64 [K]; NaN stays NaN in float formats, and is anything in scaled ones.
        form: the format.
        scales: for scaled formats, the scale of each value [K], or of all.
    """
    if not values.size:
        return np.empty(0, np.uint8)
    if form.dtype is not None:
        limit = torch.finfo(form.dtype).max
        return torch.from_numpy(np.ascontiguousarray(values)).clamp(-limit, limit).to(form.dtype).view(torch.uint8).numpy()
    if form.name == "sign":
        return np.packbits(np.signbit(values), bitorder="little")
    with np.errstate(invalid="ignore", over="ignore"):
        steps = np.nan_to_num(np.rint(values / np.float32(scales)))
    encoded: Bytes = np.clip(steps, -127, 127).astype(np.int8).view(np.uint8)
    return encoded


def decode_values(data: Bytes, form: Format, count: int, scales: Scales | float = 0.0) -> npt.NDArray[np.float32]:
    """Read ``count`` values back as fp32, always finite if what was written was; the inverse of :func:`encode_values` but for rounding."""
    if not count:
        return np.empty(0, np.float32)
    if form.dtype is not None:
        return torch.from_numpy(data.copy()).view(form.dtype).to(torch.float32).numpy()
    if form.name == "sign":
        signs: npt.NDArray[np.float32] = _SIGNS[np.unpackbits(data, count=count, bitorder="little")]
        signs *= np.float32(scales)
        return signs
    with np.errstate(over="ignore"):
        decoded: npt.NDArray[np.float32] = data.view(np.int8).astype(np.float32) * np.float32(scales)
    return decoded.clip(-LARGEST, LARGEST)
