"""Ranks agree before bytes move: a small digest of settings and layout, the full texts only where digests differ."""

import json
import struct
from collections.abc import Mapping
from hashlib import blake2b

from gradcomp.ddp.exchange import Exchange
from gradcomp.errors import DesyncError

DIGEST_BYTES = 16


def agree(exchange: Exchange, description: Mapping[str, str]) -> None:
    """Make sure that every rank gives the same description.

    Args:
        exchange: of the ranks that must agree.
        description: field -> value, the same on every rank if all is well.

    Raises:
        DesyncError: on every rank, naming the first rank that differs from rank 0, the field and both values.

    Communication:
        One blocking all-gather of 16 bytes a rank; where digests differ, two more: lengths, then the texts padded to the longest.
    """
    text = json.dumps(description).encode()
    digest = blake2b(text, digest_size=DIGEST_BYTES).digest()
    if len(set(exchange.gather_now(digest))) == 1:
        return
    sizes = [struct.unpack("<Q", size)[0] for size in exchange.gather_now(struct.pack("<Q", len(text)))]
    texts = exchange.gather_now(text.ljust(max(sizes)))
    first, *others = [json.loads(padded) for padded in texts]
    for rank, other in enumerate(others, 1):
        for key in [*first, *other]:
            ours, theirs = first.get(key, "nothing"), other.get(key, "nothing")
            if ours != theirs:
                raise DesyncError(f"rank {rank} disagrees with rank 0 on {key}: {theirs} against {ours}")
    raise DesyncError("the ranks' descriptions differ only in the order of their fields")


def largest(exchange: Exchange, counts: list[int]) -> list[int]:
    """The largest over the ranks of each count. Communication: one blocking all-gather of 8 bytes a count and rank."""
    form = f"<{len(counts)}Q"
    rows = [struct.unpack(form, row) for row in exchange.gather_now(struct.pack(form, *counts))]
    return [max(column) for column in zip(*rows)]
