"""One folder for the states of all ranks, over torch.distributed.checkpoint: saved in one call, loaded at any world size."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.handle import Handle
from gradcomp.errors import GradcompError

REASON_BYTES = 256
KINDS = ("residual", "velocity")
"""Of tensors, by parameter."""
METADATA = ".metadata"
"""What torch.distributed.checkpoint writes last."""


def save(handle: Handle, folder: str | Path) -> None:
    """Save the hook's state on all ranks: residuals, velocities, progress, capacities. Beside it belong the model's and the optimizer's.

    Args:
        handle: from :func:`gradcomp.register`, or a :class:`gradcomp.SparseState`.
        folder: on a file system that all ranks share; made if need be. A state that is there already is replaced; should that be cut
            off, the folder holds no state: save into a new folder each time, and delete old ones afterwards.

    Raises:
        ValueError: there is no process group.
        GradcompError: a rank could not write, or ``folder`` is no path; on all ranks.

    Communication:
        Collective: all ranks call it, between the same two steps. torch.distributed.checkpoint gathers names and sizes; residuals
        go to the file system, ``4 N`` bytes a rank (twice that with ``momentum``). Not counted in ``handle.traffic``.
    """
    # Imported here: it takes half as long as torch itself.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    exchange = _connected(handle)
    state = handle.state_dict()
    tensors = {_key(exchange.rank, kind, name): tensor for kind in KINDS for name, tensor in state.pop(kind).items()}
    text = json.dumps(state).encode()
    _make_room(exchange, folder)
    tensors[_key(exchange.rank)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a state is there already, where a rank looks before rank 0 has removed it
            save_tensors(tensors, checkpoint_id=str(folder), process_group=exchange.group)
    except CheckpointException as error:  # no Exception by its class
        raise GradcompError(f"the state could not be saved in {folder}: {_reasons(error)}") from error


def _make_room(exchange: Exchange, folder: str | Path) -> None:
    """Have the folder, without a state in it: what is half replaced must not be taken for one. On all ranks or on none."""
    refusal = ""
    try:
        path = Path(folder)
        if exchange.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            (path / METADATA).unlink(missing_ok=True)
    except (OSError, TypeError) as error:
        refusal = repr(error)
    texts = exchange.gather_now(refusal.encode()[:REASON_BYTES].ljust(REASON_BYTES))
    for rank, text in enumerate(texts):
        if text.strip():
            raise GradcompError(f"the state could not be saved in folder {folder!r}: rank {rank}: {text.decode(errors='replace').strip()}")


def load(handle: Handle, folder: str | Path) -> None:
    """Continue from :func:`save`, at any world size. Nothing is loaded on any rank if anything is wrong on one.

    At the same world size every rank gets its own state, and continues bit for bit. At another one the pending mean gradient stays
    what it was: exactly when the world has grown by a whole factor, else to rounding.

    Args:
        handle: a newly registered hook, or one that has run.
        folder: of :func:`save`.

    Raises:
        ValueError: no process group, no whole state in the folder, another format, another model: naming what does not fit.
        DesyncError: another rank could not load, naming it and its reason.

    Communication:
        Collective: one blocking all-gather of 16 bytes a rank, and of the refusals if there are any.
    """
    exchange = _connected(handle)
    handle._load(lambda: _read(folder, exchange), together=True)


def sources(rank: int, world_size: int, saved: int) -> Sequence[int]:
    """The saved ranks whose residuals' mean ``rank`` of ``world_size`` takes over, so that the mean over all ranks stays the same."""
    if world_size % saved == 0:
        return [rank * saved // world_size]
    if saved % world_size == 0:
        factor = saved // world_size
        return range(rank * factor, (rank + 1) * factor)
    return range(saved)


def _connected(handle: Handle) -> Exchange:
    exchange = handle._resolve()
    if exchange is None:
        raise ValueError("handle has no process group: call init_process_group first")
    return exchange


def _key(rank: int, *path: str) -> str:
    return "/".join([str(rank), *(path or ["state"])])


def _read(folder: str | Path, exchange: Exchange) -> dict[str, Any]:
    """This rank's state out of the folder; raises a ``ValueError`` that says what is missing."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    try:
        entries = FileSystemReader(Path(folder)).read_metadata().state_dict_metadata
    except Exception as error:
        raise ValueError(f"folder must hold a state that gradcomp.save finished, {folder} does not: {error!r}") from error
    stored = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    saved = sum(_key(rank) in stored for rank in range(len(stored)))
    if not saved:
        raise ValueError(f"folder must hold a state of gradcomp.save, {folder} holds another checkpoint")
    merged = _Merged(exchange.rank, exchange.world_size)
    chosen = sources(exchange.rank, exchange.world_size, saved)
    for source in chosen:
        keys = [key for key in stored if key.startswith(f"{source}/")]
        tensors = {key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype, device="cpu") for key in keys}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each rank reads by itself, and torch asks whether that is meant
                load_tensors(tensors, checkpoint_id=str(folder), no_dist=True)
            state = json.loads(tensors.pop(_key(source)).numpy().tobytes())
        except (Exception, CheckpointException) as error:  # a rank that raised anything else would leave the others waiting
            text = f"folder must hold the files of every rank, rank {source}'s in {folder} cannot be read"
            raise ValueError(f"{text}: {_reasons(error)}") from error
        if not isinstance(state, dict) or not {"rank", "announce"} <= state.keys():
            raise ValueError(f"folder must hold a state of gradcomp.save, {folder} holds another checkpoint")
        merged.add(state, {key.removeprefix(f"{source}/"): tensor for key, tensor in tensors.items()}, len(chosen))
    return merged.state()


def _reasons(error: BaseException) -> str:
    """What went wrong on which rank, without tracebacks."""
    failures = getattr(error, "failures", None)
    return repr(error) if failures is None else ", ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in failures.items())


class _Merged:
    """The state of one rank out of one or several saved ones: the mean of their tensors, the rest equal in all."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._place = {"rank": rank, "world_size": world_size}
        self._rest: dict[str, Any] = {}
        self._announce = 0
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, state: dict[str, Any], tensors: Mapping[str, torch.Tensor], of: int) -> None:
        source = state["rank"]
        rest = {key: value for key, value in state.items() if key not in ("rank", "announce")}
        if self._rest and rest != self._rest:
            different = sorted(key for key in rest if rest[key] != self._rest.get(key))
            raise ValueError(f"folder must hold one state, rank {source}'s differs from the others in {different}")
        self._rest = rest
        self._announce |= state["announce"]
        for key, tensor in tensors.items():
            share = tensor.double() / of  # exact where there is only one
            self._tensors[key] = self._tensors[key] + share if key in self._tensors else share

    def state(self) -> dict[str, Any]:
        held: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}
        for key, tensor in self._tensors.items():
            kind, _, name = key.partition("/")
            held[kind][name] = tensor.float()
        return self._rest | self._place | {"announce": self._announce} | held
