"""Train a small transformer language model on real text, data-parallel, with a gradient compressor of your choice.

    torchrun --standalone --nproc_per_node 2 scripts/train.py --rule topk --density 0.1 --values sign --optimizer delayed-adamw

The text is the documentation that ships inside CPython, so nothing is downloaded; ``--data FILE_OR_FOLDER`` trains on your own. The
last line of standard output is one JSON record: configuration, versions, losses, seconds a step and all traffic fields. With
``--validate-every N`` the curve has the validation loss too, and ``--target-loss X`` ends the run where that is at most X.
"""

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import gradcomp
from gradcomp.optim import DelayAwareAdamW


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what is out of range ends with a message that names it."""
    parser = argparse.ArgumentParser(prog="scripts/train.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--hook",
        default="gradcomp",
        choices=["none", "noop", "fp16", "bf16", "powersgd", "gradcomp"],
        help="how gradients travel (gradcomp): none is plain DDP, noop exchanges nothing",
    )
    add("--rule", default="topk", choices=["topk", "threshold", "dense"], help="gradcomp: what matters (topk)")
    add("--density", type=float, help="topk: fraction kept, in (0, 1]; 0.01 if not given")
    add("--threshold", type=float, help="threshold: magnitude above which an element is sent; 0.001 if not given")
    add("--values", help="gradcomp: value format on the wire: fp32, bf16 (if not given), fp16, int8 or sign")
    add("--warmup-steps", type=int, default=0, help="topk: steps over which the density falls to its own (0)")
    add("--analyze", action="store_true", help="gradcomp: print what gradients look like half-way, to choose a threshold by")
    add("--powersgd-rank", type=int, default=1, help="powersgd: rank of the approximation (1)")
    add("--data", type=Path, help="a text file or a folder of them, instead of the bundled documentation")
    add("--steps", type=int, default=600, help="of training in all, those before a resumption included (600)")
    add("--batch", type=int, default=16, help="sequences a rank and step (16)")
    add("--context", type=int, default=64, help="bytes a sequence (64)")
    add("--d-model", type=int, default=96, help="width of the model, a multiple of 32 (96)")
    add("--layers", type=int, default=2, help="depth of the model (2)")
    add(
        "--optimizer",
        default="adamw",
        choices=["adamw", "delayed-adamw", "sgd"],
        help="delayed-adamw: DelayAwareAdamW, for sparse gradients, under which adamw loses (adamw)",
    )
    add("--lr", type=float, help="peak learning rate; 0.006, for sgd 0.3, if not given")
    add("--clip", type=float, default=1.0, help="largest norm of the reduced gradient; 0 for no clipping (1)")
    add("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: a GPU a rank, over NCCL, or shared, over gloo (cpu)")
    add("--seed", type=int, default=0, help="of weights and data (0)")
    add("--validate-every", type=int, default=0, help="steps from one validation loss in the curve to the next; 0 for none (0)")
    add("--target-loss", type=float, help="stop at the first of these validation losses that is at most this")
    add("--report", type=Path, help="folder for the record and the plot of all records in it")
    add("--json", type=Path, help="a file for the record, curve included")
    add("--name", help="name of this run in the report")
    add("--checkpoint", type=Path, help="folder, shared by all ranks, for a checkpoint every --checkpoint-every steps")
    add("--checkpoint-every", type=int, default=50, help="steps from checkpoint to checkpoint (50)")
    add("--resume", action="store_true", help="continue from the newest whole checkpoint in --checkpoint, if there is one")
    args = parser.parse_args(argv)
    for field, low in (
        ("steps", 1),
        ("warmup_steps", 0),
        ("batch", 1),
        ("context", 2),
        ("d_model", 32),
        ("layers", 1),
        ("powersgd_rank", 1),
        ("validate_every", 0),
        ("checkpoint_every", 1),
    ):
        if getattr(args, field) < low:
            parser.error(f"--{field.replace('_', '-')} must be at least {low}, got {getattr(args, field)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, and torch finds none")
    if args.d_model % 32:
        parser.error(f"--d-model must be a multiple of 32, got {args.d_model}")
    if args.data is not None and not args.data.exists():
        parser.error(f"--data must be a file or a folder, {args.data} does not exist")
    if not 0 <= args.clip < math.inf:
        parser.error(f"--clip must be at least 0, got {args.clip}")
    if args.lr is not None and not 0 < args.lr < math.inf:
        parser.error(f"--lr must be above 0, got {args.lr}")
    if args.target_loss is not None and not 0 < args.target_loss < math.inf:
        parser.error(f"--target-loss must be above 0, got {args.target_loss}")
    if args.target_loss is not None and not args.validate_every:
        parser.error("--target-loss needs --validate-every N, the losses that it is compared with")
    if args.name is not None and not re.fullmatch(r"[\w.()=+-]+", args.name):
        parser.error(f"--name must be made of letters, digits and _.()=+-, got {args.name!r}")
    if args.report is not None and args.report.exists() and not args.report.is_dir():
        parser.error(f"--report must be a folder, {args.report} is a file")
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint FOLDER to resume from")
    if args.checkpoint is not None and args.hook == "powersgd":
        parser.error("--checkpoint has no meaning with --hook powersgd, whose state torch does not save")
    if args.values is not None and args.hook != "gradcomp":
        parser.error(f"--values has no meaning with --hook {args.hook}")
    args.values = "bf16" if args.values is None else args.values
    unused = {"density": args.rule != "topk", "threshold": args.rule != "threshold", "warmup_steps": args.rule != "topk", "analyze": False}
    for field, of_another_rule in unused.items():
        if getattr(args, field) not in (None, 0, False) and (of_another_rule or args.hook != "gradcomp"):
            parser.error(f"--{field.replace('_', '-')} has no meaning with --hook {args.hook} --rule {args.rule}")
    args.density = 0.01 if args.density is None and args.rule == "topk" else args.density
    args.threshold = 1e-3 if args.threshold is None and args.rule == "threshold" else args.threshold
    try:
        rule_of(args)
        gradcomp.codec.check_values(args.values)
    except ValueError as error:
        parser.error(str(error))
    if args.lr is None:
        args.lr = 0.3 if args.optimizer == "sgd" else 0.006
    if args.name is None:
        amount = {"topk": args.density, "threshold": args.threshold, "dense": None}[args.rule]
        detail = "" if amount is None else f"-{amount:g}"
        args.name = f"{args.rule}{detail}-{args.values}" if args.hook == "gradcomp" else args.hook
    return args


def rule_of(args: argparse.Namespace) -> Any:
    """The rule that the command line asks for."""
    return {"topk": lambda: gradcomp.TopK(args.density), "threshold": lambda: gradcomp.Threshold(args.threshold), "dense": gradcomp.Dense}[
        args.rule
    ]()


def read_text(path: Path | None) -> torch.Tensor:
    """The text as bytes, int64 [length]: the bundled documentation, a file, or every file below a folder."""
    if path is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[key] for key in sorted(topics)).encode()
    else:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        text = b"\n".join(file.read_bytes() for file in files)
    return torch.tensor(list(text), dtype=torch.int64)


class Block(nn.Module):
    """A pre-norm transformer block without biases."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.heads = d_model // 32
        self.norm1, self.norm2 = nn.LayerNorm(d_model, bias=False), nn.LayerNorm(d_model, bias=False)
        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
        self.up, self.down = nn.Linear(d_model, 4 * d_model, bias=False), nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, d_model] -> the same."""
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, d_model: int, layers: int, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, d_model), nn.Embedding(context, d_model)
        self.blocks = nn.Sequential(*[Block(d_model) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d_model, bias=False), nn.Linear(d_model, 256, bias=False)
        std = 0.6 / math.sqrt(d_model)  # less, and it takes hundreds of steps until attention begins to learn
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std / (math.sqrt(2 * layers) if name.endswith(("proj.weight", "down.weight")) else 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Int64 [batch, length + 1] -> mean loss in nats a byte."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden = self.token(inputs) + self.place.weight[: inputs.shape[1]]
        return F.cross_entropy(self.head(self.norm(self.blocks(hidden))).flatten(0, 1), targets.flatten())


def batch_of(text: torch.Tensor, args: argparse.Namespace, *seed: int) -> torch.Tensor:
    """Random sequences: int64 [batch, context + 1]. Drawn anew from the seed, so that a resumed run sees what it would have seen."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    starts = torch.randint(len(text) - args.context - 1, (args.batch,), generator=generator)
    return text[(starts[:, None] + torch.arange(args.context + 1)).to(text.device)]


def validate(model: nn.Module, text: torch.Tensor, args: argparse.Namespace) -> float:
    """Mean loss over 16 fixed batches, shared out over the ranks."""
    batches = [batch_of(text, args, 1, number) for number in range(16)]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        total = sum((model(batch) for batch in batches[rank::world_size]), torch.zeros((), device=text.device))
    dist.all_reduce(total)
    return float(total) / len(batches)


def bf16_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16 hook under another name: DDP refuses the original without CUDA and NCCL, though gloo can do it."""
    return default_hooks.bf16_compress_hook(group, bucket)


class Meter:
    """Traffic by whatever hook: counted by gradcomp; for the others computed from what each hands to its all-reduce."""

    def __init__(self, args: argparse.Namespace, model: DistributedDataParallel) -> None:
        self.hook = args.hook
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        self.handle: gradcomp.Handle | None = None
        self.powersgd: Any = None
        if args.hook == "gradcomp":
            self.handle = gradcomp.register(model, rule_of(args), values=args.values, warmup_steps=args.warmup_steps)
        elif args.hook == "powersgd":
            self.powersgd = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=args.powersgd_rank, start_powerSGD_iter=10)
            model.register_comm_hook(self.powersgd, powerSGD_hook.powerSGD_hook)
        elif args.hook != "none":
            hooks = {"noop": debugging_hooks.noop_hook, "fp16": default_hooks.fp16_compress_hook, "bf16": bf16_hook}
            model.register_comm_hook(None, hooks[args.hook])

    def read(self, steps: int) -> dict[str, Any]:
        """The fields of ``gradcomp.Traffic``; where gradcomp did not count, only those that can be computed."""
        if self.handle is not None:
            return report.fields_of(self.handle.traffic) | {"bytes_are": "counted"}
        elements: float = self.numel * steps
        if self.powersgd is not None:
            dense_steps = min(steps, self.powersgd.start_powerSGD_iter)
            elements = self.numel * dense_steps + self.powersgd.total_numel_after_compression
        width = {"fp16": 2, "bf16": 2, "noop": 0}.get(self.hook, 4)
        share = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        dense, sent = int(share * 4 * self.numel * steps), int(share * width * elements)
        return {
            "steps": steps,
            "dense_bytes": dense,
            "sent_bytes": sent,
            "received_bytes": sent,
            "ratio": dense / sent if sent else 1.0,
            "bytes_are": "computed",
        }


SECONDARY = {"report", "json", "name", "checkpoint", "checkpoint_every", "resume", "analyze", "validate_every", "target_loss", "device"}
"""Arguments that may change from a checkpoint to its resumption."""


class Checkpoints:
    """Whole checkpoints in a folder that all ranks share: the hook's state of every rank, and what is equal on all."""

    def __init__(self, args: argparse.Namespace, handle: gradcomp.Handle | None, net: nn.Module, optimizer: Any, scheduler: Any) -> None:
        self.folder = args.checkpoint
        self.config = {key: str(value) for key, value in vars(args).items() if key not in SECONDARY}
        self.handle = handle
        self.parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}

    def save(self, step: int, curve: list[dict[str, Any]]) -> None:
        """Save; a checkpoint is whole once it has its ``model.pt``. Older ones are deleted, all but the last."""
        new = self.folder / f"step-{step:08d}"
        new.mkdir(parents=True, exist_ok=True)
        if self.handle is not None:
            gradcomp.save(self.handle, new / "hook")
        if dist.get_rank() == 0:
            saved = {name: part.state_dict() for name, part in self.parts.items()}
            torch.save(saved | {"curve": curve, "config": self.config}, new / "model.pt.partial")
            (new / "model.pt.partial").replace(new / "model.pt")
            for old in sorted(self.folder.glob("step-*"))[:-2]:
                shutil.rmtree(old, ignore_errors=True)

    def resume(self) -> list[dict[str, Any]]:
        """Load the newest whole checkpoint; the loss curve up to it, empty where there is none."""
        found = [max(self.folder.glob("step-*/model.pt"), default=None)]
        dist.broadcast_object_list(found)  # rank 0 decides
        if found[0] is None:
            return []
        saved = torch.load(found[0], weights_only=True, map_location="cpu")
        other = {key: was for key, was in saved["config"].items() if was != self.config.get(key)}
        if other:
            was = ", ".join(f"--{key.replace('_', '-')} {value}" for key, value in other.items())
            raise SystemExit(f"--resume: the checkpoint in {found[0].parent} was made with {was}: give the same, or another --checkpoint")
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        if self.handle is not None:
            gradcomp.load(self.handle, found[0].parent / "hook")
        curve: list[dict[str, Any]] = saved["curve"]
        return curve


def reached(curve: list[dict[str, Any]], target: float | None) -> bool:
    """Whether the curve ends with a validation loss of at most ``target``."""
    return target is not None and bool(curve) and curve[-1].get("val_loss", math.inf) <= target


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the record of the run."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = read_text(args.data).to(args.device)
    split = int(0.9 * len(text))
    if len(text) - split <= args.context + 1:
        raise SystemExit(f"--data has {len(text)} bytes; a context of {args.context} needs at least {10 * (args.context + 2)}")
    torch.manual_seed(args.seed)
    net = ByteModel(args.d_model, args.layers, args.context).to(args.device)
    # torch's PowerSGD hook crosses its collectives on gloo when there are several buckets.
    model = DistributedDataParallel(net, bucket_cap_mb=4096 if args.hook == "powersgd" else 1)
    meter = Meter(args, model)
    if args.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    elif args.optimizer == "delayed-adamw":
        late, prompt = [p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() < 2]
        groups = [{"params": late}, {"params": prompt, "delayed": False}]  # norms are sent whole
        optimizer = DelayAwareAdamW(groups, lr=args.lr)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    warmup = max(10, args.steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.05 + 0.475 * (1 + math.cos(math.pi * step / args.steps)))
    )
    checkpoints = None if args.checkpoint is None else Checkpoints(args, meter.handle, net, optimizer, scheduler)
    curve: list[dict[str, Any]] = checkpoints.resume() if checkpoints is not None and args.resume else []
    resumed_at, before = len(curve), curve[-1] if curve else {"sent_bytes": 0, "seconds": 0.0}
    seconds: list[float] = []
    analysis = None
    quiet = {"disable": rank != 0, "file": sys.stderr, "mininterval": 1 if sys.stderr.isatty() else 10}
    bar = tqdm(range(resumed_at, args.steps), initial=resumed_at, total=args.steps, desc=args.name, **quiet)
    dist.barrier()  # the clock starts when all are there
    for step in bar:
        if reached(curve, args.target_loss):
            break
        start = time.perf_counter()
        if args.analyze and meter.handle is not None and step == args.steps // 2:
            analysis = meter.handle.analyze()
        optimizer.zero_grad()
        loss = model(batch_of(text[:split], args, args.seed, rank, step))  # every rank sees its own data
        loss.backward()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        seconds.append(time.perf_counter() - start)
        traffic = meter.read(step + 1 - resumed_at)
        so_far = {"sent_bytes": before["sent_bytes"] + traffic["sent_bytes"], "seconds": before["seconds"] + sum(seconds)}
        curve.append({"step": step + 1, "loss": loss.item(), **so_far})
        if meter.handle is not None and step % max(1, args.steps // 40) == 0:
            curve[-1]["densities"] = meter.handle.densities
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", ratio=f"{traffic['ratio']:.1f}x", sent=f"{traffic['sent_bytes'] / 1e6:.2f} MB")
        if args.validate_every and (step + 1) % args.validate_every == 0:
            curve[-1]["val_loss"] = validate(net, text[split:], args)
        if checkpoints is not None and (step + 1) % args.checkpoint_every == 0:
            checkpoints.save(step + 1, curve)
    val_loss: float = curve[-1]["val_loss"] if "val_loss" in curve[-1] else validate(net, text[split:], args)
    if args.validate_every:
        curve[-1]["val_loss"] = val_loss
    steps = len(curve) - resumed_at
    if rank == 0 and analysis is not None:
        print(analysis)
    if rank == 0 and meter.handle is not None:
        if resumed_at:
            print(f"resumed after step {resumed_at} of {args.steps}; traffic is counted from there")
        print(meter.handle.traffic if steps else "nothing was left to do: remove the checkpoints to begin anew")
    last = curve[-20:]
    return {
        "name": args.name,
        "config": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "versions": {"gradcomp": gradcomp.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "world_size": world_size,
        "parameters_numel": meter.numel,
        "loss": sum(point["loss"] for point in last) / len(last),
        "val_loss": val_loss,
        "step_s": statistics.median(seconds[min(5, len(seconds) - 1) :]) if seconds else 0.0,
        "resumed_at": resumed_at,  # the traffic fields count from here
        **meter.read(steps),
        "curve": curve,
    }


def write_json(file: Path, record: dict[str, Any]) -> None:
    """The record, its curve included."""
    file.write_text(json.dumps(record))


def write_report(folder: Path, record: dict[str, Any]) -> None:
    """The record and the plot of all records in the folder."""
    print(f"report: {report.write(folder, record)}")


def main(argv: list[str] | None = None) -> None:
    """Run under torchrun; alone it trains with one rank."""
    args = parse(argv)
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    backend = "gloo"
    if args.device == "cuda":
        local, ranks_here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.cuda.set_device(local % torch.cuda.device_count())
        backend = "nccl" if ranks_here <= torch.cuda.device_count() else "gloo"  # NCCL refuses two ranks on one GPU
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    record = train(args)
    if dist.get_rank() == 0:
        for wanted, write in ((args.json, write_json), (args.report, write_report)):
            try:
                if wanted is not None:
                    write(wanted, record)
            except OSError as error:  # the run is done: its record is printed all the same
                print(f"no report: {error}", file=sys.stderr)
        print(json.dumps({key: value for key, value in record.items() if key != "curve"}))
    dist.destroy_process_group()
    # A gloo thread of torch 2.13 that lets go of a hook's callback while Python shuts down aborts the process. gradcomp waits for its
    # own callbacks (gradcomp/ddp/lastcalls.py); torch's other hooks do not.
    time.sleep(0.2)


if __name__ == "__main__":
    main()
