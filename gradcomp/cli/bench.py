"""``gradcomp bench``: the time of a whole training step under each hook, and the bytes it sends, on the link at hand.

    torchrun --nnodes 4 --nproc_per_node 1 ... -m gradcomp bench --parameters 10e6 --density 0.01

The model is a stack of square linear layers and the data is random: the time to compute is small beside that of a real model of so many
parameters, so that what a hook adds is seen. That is the column "over noop": noop exchanges nothing. Hooks take turns, in rounds, and the
median round counts. Bytes are the kernel's count of what left the interface, a rank and step, with all that TCP adds; where several
ranks share an interface, or others use it, theirs are in it. The last line is a JSON record.
"""

import argparse
import json
import math
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.cli.peers import in_one_bucket, peer


class Block(NamedTuple):
    """What a block of steps took, a step."""

    seconds: float
    cpu_s: float
    kernel_bytes: float | None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what is out of range ends with a message that names it."""
    purpose, rest = __doc__.split("\n\n", 1)
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="gradcomp bench", description=purpose, epilog=rest, formatter_class=form)
    add = parser.add_argument
    add("--parameters", type=float, default=10e6, help="of the model, about (10e6)")
    add("--layers", type=int, default=10, help="of the model (10)")
    add("--batch", type=int, default=8, help="rows a rank and step (8)")
    add("--density", type=float, nargs="+", default=[0.01], help="fractions kept by the sparse hooks (0.01)")
    add("--values", nargs="+", default=["bf16", "sign"], help="value formats of gradcomp's hook (bf16 sign)")
    add("--hooks", nargs="+", help="instead of all: names as the table has them")
    add("--steps", type=int, default=10, help="a round (10)")
    add("--rounds", type=int, default=3, help="(3)")
    add("--warm-up", type=int, default=4, help="steps before the clock starts, in which buckets are rebuilt and PowerSGD begins (4)")
    add("--bucket-mb", type=float, default=25, help="DDP's bucket_cap_mb (25)")
    add("--json", type=Path, help="a file for the record")
    args = parser.parse_args(argv)
    for field in ("parameters", "layers", "batch", "steps", "rounds", "warm_up", "bucket_mb"):
        if not 0 < getattr(args, field) < math.inf or (field != "bucket_mb" and getattr(args, field) < 1):
            parser.error(f"--{field.replace('_', '-')} must be at least 1, got {getattr(args, field)}")
    if args.hooks is None:
        args.hooks = ["noop", "plain", "fp16", "bf16", "powersgd-1", "powersgd-4"]
        args.hooks += [f"twogathers-{density:g}" for density in args.density]
        args.hooks += [f"gradcomp-{density:g}-{values}" for density in args.density for values in args.values]
    args.hooks = list(dict.fromkeys(["noop", *args.hooks]))
    if args.warm_up < 3:
        parser.error(f"--warm-up must be at least 3, in which buckets are rebuilt and PowerSGD begins, got {args.warm_up}")
    for name in args.hooks:
        try:
            peer(name)
        except ValueError as error:
            parser.error(str(error))
    return args


def interface() -> Path | None:
    """The kernel's count of bytes sent by the interface that gloo uses; None where that cannot be told."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is None and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        name = "lo"
    counter = Path(f"/sys/class/net/{name}/statistics/tx_bytes")
    return counter if name is not None and counter.exists() else None


class Trainee:
    """A model under a hook."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        width = max(1, round(math.sqrt(args.parameters / args.layers)))
        torch.manual_seed(0)
        layers = [layer for _ in range(args.layers) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())]
        network = nn.Sequential(*layers)
        self.numel = args.layers * width * width
        self.model = DistributedDataParallel(network, bucket_cap_mb=1 << 14 if in_one_bucket(name) else args.bucket_mb)
        self.handle = peer(name)(self.model)
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.batches = torch.randn(4, args.batch, width, generator=generator)

    def step(self, number: int) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        self.model(self.batches[number % 4]).square().mean().backward()
        self.optimizer.step()

    def block(self, steps: int) -> Block:
        """Steps between two barriers."""
        counter = interface()
        dist.barrier()
        bytes_before = int(counter.read_text()) if counter else 0
        start, cpu_start = time.perf_counter(), time.process_time()
        for number in range(steps):
            self.step(number)
        cpu_s = time.process_time() - cpu_start
        dist.barrier()
        seconds = time.perf_counter() - start
        shared = dist.get_world_size() if counter and counter.parts[-3] == "lo" else 1
        sent = (int(counter.read_text()) - bytes_before) / shared / steps if counter else None
        return Block(seconds / steps, cpu_s / steps, sent)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record: every hook's medians, as this rank saw them."""
    blocks: dict[str, list[Block]] = {name: [] for name in args.hooks}
    traffic: dict[str, Any] = {}
    numel = 0
    for _ in range(args.rounds):
        for name in args.hooks:
            trainee = Trainee(args, name)
            numel = trainee.numel
            for number in range(args.warm_up):
                trainee.step(number)
            before = trainee.handle.traffic if trainee.handle is not None else None
            blocks[name].append(trainee.block(args.steps))
            if trainee.handle is not None:
                after = trainee.handle.traffic
                fields = ("dense_bytes", "sent_bytes", "select_s", "encode_s", "decode_s", "exchange_s")
                spent = {field: (getattr(after, field) - getattr(before, field)) / args.steps for field in fields}
                traffic[name] = spent | {"ratio": spent["dense_bytes"] / spent["sent_bytes"] if spent["sent_bytes"] else 1.0}
            del trainee
    hooks = {}
    for name, rounds in blocks.items():
        seconds = statistics.median(block.seconds for block in rounds)
        over = statistics.median(block.seconds - floor.seconds for block, floor in zip(rounds, blocks["noop"]))
        sent = [block.kernel_bytes for block in rounds if block.kernel_bytes is not None]
        hooks[name] = {
            "step_s": seconds,
            "over_noop_s": over,
            "spread_s": max(block.seconds for block in rounds) - min(block.seconds for block in rounds),
            "cpu_s": statistics.median(block.cpu_s for block in rounds),
            "kernel_bytes": statistics.median(sent) if sent else None,
            **traffic.get(name, {}),
        }
    return {"world_size": dist.get_world_size(), "parameters": numel, "batch": args.batch, "torch": torch.__version__, "hooks": hooks}


def table(record: dict[str, Any]) -> str:
    """The record, for people."""
    hooks = record["hooks"]
    plain = hooks.get("plain")
    lines = [
        f"{record['world_size']} ranks, {record['parameters']:,} parameters, {record['batch']} rows a rank; ms and MB a step",
        f"{'hook':<24} {'step':>8} {'over noop':>10} {'CPU':>7} {'sent':>8} {'step against plain':>19}",
    ]
    for name, row in hooks.items():
        sent = "-" if row["kernel_bytes"] is None else f"{row['kernel_bytes'] / 1e6:.3f}"
        times = "" if plain is None else f"{plain['step_s'] / row['step_s']:.2f}x"
        lines.append(
            f"{name:<24} {1e3 * row['step_s']:>8.1f} {1e3 * row['over_noop_s']:>10.1f} {1e3 * row['cpu_s']:>7.1f} {sent:>8} {times:>19}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run under torchrun."""
    args = parse(argv)
    if "RANK" not in os.environ:
        raise SystemExit(
            "gradcomp bench measures a link between ranks: launch it with torchrun, as torchrun --nproc_per_node 2 -m gradcomp bench"
        )
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    record = measure(args)
    if dist.get_rank() == 0:
        print(table(record))
        if any(row["kernel_bytes"] is None for row in record["hooks"].values()):
            print("bytes: set GLOO_SOCKET_IFNAME to the link's interface to have them counted")
        print(json.dumps(record))
        if args.json is not None:
            args.json.write_text(json.dumps(record))
    dist.destroy_process_group()
    time.sleep(0.2)  # threads of gloo that still hold torch's own hooks must let go of them before Python ends
