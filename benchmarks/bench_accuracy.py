"""Accuracy at equal steps, and the bits it took: every method at its best learning rate of a small grid, over several seeds.

    python benchmarks/bench_accuracy.py transformer --steps 600                          # about 40 minutes on two cores
    python benchmarks/bench_accuracy.py transformer --total-bits 400                     # equal bytes: each as many steps as that allows
    python benchmarks/bench_accuracy.py cnn-mnist --steps 400 --clip 0 --methods adamw:dense delayed:topk-0.01-sign
    python benchmarks/bench_accuracy.py rnn --steps 1500 --clip 0 --rates 3 6 12 --methods sgd:dense dgc-0.6:topk-0.001-bf16-warm

Workers are logical ones of ``benchmarks/simulator.py``: one process, the real hook. A method is ``OPTIMIZER:EXCHANGE``. Optimizers:
``adamw``, ``delayed`` (gradcomp.optim.DelayAwareAdamW; parameters that are sent whole are not delayed), ``sgd`` (momentum 0.9, another as
``sgd-0.6``) and ``dgc`` (the same momentum, corrected: taken in gradcomp's hook instead of in the optimizer).
Exchanges: ``dense``, ``fp16``, ``powersgd-RANK``, and ``topk-DENSITY-VALUES``, with ``-warm`` for a density that falls from 25% over the
first tenth. The rate warms up for 5% of the steps and falls as a cosine to a twentieth.

Bits are those that one worker hands to collectives, an element and step, everything counted; "sent" those that it puts on the wire at this
number of workers: W - 1 times as many for a gather, 2(W - 1)/W times for a ring. Seed 0 tries every rate and is not reported; the best one
is run with the others, and marked * where it is at the edge of the grid. ``--clip`` limits the norm of the gradient that the optimizer
gets, in which ``dgc`` has the momentum: compare it with ``sgd`` at ``--clip 0``. Runs are kept in ``--out`` and not repeated by the same
code; the last line is a JSON record.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import time
import zlib
from pathlib import Path
from typing import Any

import tasks
import torch
from hooks import DenseMean, Fp16Mean, PowerSGD, Sparse
from simulator import Workers
from tasks import TASKS

import gradcomp
from gradcomp.optim import DelayAwareAdamW

RATES = {
    ("adamw", "loss"): [0.003, 0.006, 0.010],
    ("delayed", "loss"): [0.003, 0.006, 0.010],
    ("sgd", "loss"): [0.1, 0.3, 1.0],
    ("dgc", "loss"): [0.1, 0.3, 1.0],
    ("adamw", "accuracy"): [0.003, 0.006, 0.010],
    ("delayed", "accuracy"): [0.003, 0.006, 0.010],
    ("sgd", "accuracy"): [0.01, 0.03, 0.1],
    ("dgc", "accuracy"): [0.01, 0.03, 0.1],
}
MOMENTUM = 0.9
PROBE = 40
"""Steps after which a method's bits are known, those of a warm-up over the first tenth included."""
METHODS = [
    "adamw:dense", "adamw:powersgd-1", "adamw:powersgd-4", "adamw:powersgd-16", "adamw:topk-0.1-sign", "delayed:topk-0.13-bf16",
    "delayed:topk-0.13-sign", "delayed:topk-0.07-sign", "delayed:topk-0.03-sign",
]  # fmt: skip


def split(optimizer: str) -> tuple[str, float]:
    """What is before the colon: the kind, and the momentum of those that have one."""
    kind, _, momentum = optimizer.partition("-")
    if momentum and kind not in ("sgd", "dgc"):
        raise ValueError(f"only sgd and dgc have a momentum, got {optimizer}")
    return kind, float(momentum) if momentum else MOMENTUM


def hook_of(optimizer: str, exchange: str, steps: int) -> Any:
    """What makes a worker's hook."""
    name, momentum = split(optimizer)
    if name != "dgc":
        momentum = 0.0
    kind, *rest = exchange.split("-")
    if momentum and kind != "topk":
        raise ValueError(f"dgc takes its momentum in gradcomp's hook: dgc:topk-DENSITY-VALUES, got dgc:{exchange}")
    if kind == "topk":
        warm = steps // 10 if rest[-1] == "warm" else 0
        return Sparse(gradcomp.TopK(float(rest[0])), values=rest[1], warmup_steps=warm, momentum=momentum)
    return {"dense": lambda: DenseMean(), "fp16": lambda: Fp16Mean(), "powersgd": lambda: PowerSGD(int(rest[0]))}[kind]()


def optimizer_of(optimizer: str, net: torch.nn.Module, rate: float, max_delay: int) -> torch.optim.Optimizer:
    """The optimizer of that name."""
    kind, momentum = split(optimizer)
    if kind in ("sgd", "dgc"):
        return torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum if kind == "sgd" else 0.0)
    if kind == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.9, 0.95))
    whole = [p for p in net.parameters() if p.dim() < 2 or p.numel() < 1024]
    late = [p for p in net.parameters() if not (p.dim() < 2 or p.numel() < 1024)]
    groups = [{"params": late}, {"params": whole, "delayed": False}]
    return DelayAwareAdamW(groups, lr=rate, max_delay=max_delay)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One training; the job with its result."""
    if job.get("code", now := code()) != now:  # this process has read the code anew
        raise RuntimeError("gradcomp's code or the study's was changed while the study ran: start it again")
    torch.set_num_threads(1)
    task = TASKS[job["task"]]()
    kind, exchange = job["method"].split(":")
    torch.manual_seed(job["seed"])
    net = task.make()
    workers = Workers(net, job["workers"], hook_of(kind, exchange, job["steps"]))
    optimizer = optimizer_of(kind, net, job["rate"], job["max_delay"])
    warm, steps = max(1, job["steps"] // 20), job["steps"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
    )
    generators = [torch.Generator().manual_seed(1000 * job["seed"] + worker) for worker in range(job["workers"])]
    start = time.perf_counter()
    for _ in range(steps):
        workers.step([task.batch(generator) for generator in generators], task.loss)
        if job["clip"]:
            torch.nn.utils.clip_grad_norm_(net.parameters(), job["clip"])
        optimizer.step()
        scheduler.step()
    return {**job, "result": task.judge(net), "bits": workers.bits, "sent_bits": workers.sent_bits, "seconds": time.perf_counter() - start}


def code() -> str:
    """What a result depends on beside a job's settings: versions, and a checksum of gradcomp's own code and the studies'."""
    files = sorted(Path(gradcomp.__file__).parent.rglob("*.py")) + [Path(tasks.train.__file__)]
    files += [Path(__file__).with_name(f"{name}.py") for name in ("bench_accuracy", "crew", "hooks", "simulator", "tasks")]
    checksum = 0
    for file in files:
        checksum = zlib.crc32(file.read_bytes(), checksum)
    return f"gradcomp {gradcomp.__version__}, torch {torch.__version__}, {checksum:08x}"


class Runs:
    """Finished runs, kept in a file of JSON lines; the rest is run on all cores."""

    def __init__(self, file: Path, processes: int) -> None:
        self.file = file
        self.processes = processes
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if file.exists() else []
        self.done = {self.key(run): run for run in map(json.loads, lines)}

    @staticmethod
    def key(job: dict[str, Any]) -> str:
        """What tells runs apart: the settings, and the code that they were run with."""
        fields = ("code", "task", "method", "steps", "rate", "seed", "workers", "max_delay", "clip")
        return json.dumps([job.get(field) for field in fields])

    def get(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of all jobs."""
        new = {self.key(job): job for job in jobs if self.key(job) not in self.done}
        if new:
            with multiprocessing.get_context("spawn").Pool(self.processes) as pool, self.file.open("a") as file:
                for done in pool.imap_unordered(run, new.values()):
                    self.done[self.key(done)] = done
                    file.write(json.dumps(done) + "\n")
                    file.flush()
                    print(f"  {done['method']:<28} rate {done['rate']:<6g} seed {done['seed']}: {done['result']:.4f}", flush=True)
        return [self.done[self.key(job)] for job in jobs]


def study(args: argparse.Namespace, metric: str) -> list[dict[str, Any]]:
    """A row a method: result of every seed at its best rate, and bits."""
    runs = Runs(args.out / "runs.jsonl", args.processes)
    now = code()

    def job(method: str, rate: float, seed: int) -> dict[str, Any]:
        fixed = {"task": args.task, "steps": steps[method], "workers": args.workers, "max_delay": args.max_delay, "clip": args.clip}
        fixed["code"] = now
        return fixed | {"method": method, "rate": rate, "seed": seed}

    rates = {method: args.rates or RATES[split(method.split(":")[0])[0], metric] for method in args.methods}
    steps = dict.fromkeys(args.methods, args.steps)
    if args.total_bits:
        steps = dict.fromkeys(args.methods, PROBE)
        probes = runs.get([job(method, rates[method][0], 0) for method in args.methods])
        steps = {probe["method"]: max(1, min(args.steps, int(args.total_bits / probe["bits"]))) for probe in probes}
    runs.get([job(method, rate, 0) for method in args.methods for rate in rates[method]])
    sign = 1 if metric == "loss" else -1
    best: dict[str, float] = {}
    for method in args.methods:
        tried = runs.get([job(method, rate, 0) for rate in rates[method]])
        best[method] = min(tried, key=lambda run: sign * run["result"] if math.isfinite(run["result"]) else math.inf)["rate"]
    seeds = range(1, args.seeds + 1)  # not the one that chose
    runs.get([job(method, best[method], seed) for method in args.methods for seed in seeds])
    rows = []
    for method in args.methods:
        found = runs.get([job(method, best[method], seed) for seed in seeds])
        results = [run["result"] for run in found]
        row = {"method": method, "rate": best[method], "at_edge": best[method] in (min(rates[method]), max(rates[method]))}
        row |= {"steps": steps[method], "results": results, "mean": statistics.mean(results)}
        rows.append(row | {field: statistics.mean(run[field] for run in found) for field in ("bits", "sent_bits")})
    return rows


def table(rows: list[dict[str, Any]], metric: str) -> str:
    """The rows, for people."""
    base = next((row["mean"] for row in rows if row["method"].endswith(":dense")), None)
    lines = [f"{'method':<30} {'steps':>6} {'rate':>6} {metric:>9} {'spread':>7} {'bits':>7} {'sent':>7} {'against dense':>14}"]
    for row in rows:
        spread = max(row["results"]) - min(row["results"])
        if base is None:
            against = ""
        else:
            against = f"{100 * (row['mean'] / base - 1):+.1f}%" if metric == "loss" else f"{row['mean'] - base:+.2f} points"
        rate = f"{row['rate']:g}{'*' if row['at_edge'] else ''}"
        numbers = f"{row['mean']:>9.3f} {spread:>7.3f} {row['bits']:>7.2f} {row['sent_bits']:>7.2f}"
        lines.append(f"{row['method']:<30} {row['steps']:>6} {rate:>6} {numbers} {against:>14}")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], metric: str, file: Path) -> None:
    """Result against bits, a curve a kind of method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        optimizer, exchange = row["method"].split(":")
        parts = exchange.split("-")
        kinds.setdefault(f"{optimizer}, {parts[0]} {' '.join(parts[2:])}", []).append(row)
    for kind, points in kinds.items():
        points.sort(key=lambda row: row["bits"])
        axes.plot([row["bits"] for row in points], [row["mean"] for row in points], marker="o", label=kind)
    axes.set(xscale="log", xlabel="bits an element and step", ylabel=metric)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Print a table and a JSON record; draw the frontier."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--steps", type=int, default=600, help="(600)")
    parser.add_argument("--total-bits", type=float, help="an element may take in all; fewer steps where --steps would take more")
    parser.add_argument("--rates", type=float, nargs="+", help="instead of the grid of the optimizer")
    parser.add_argument("--seeds", type=int, default=3, help="(3)")
    parser.add_argument("--workers", type=int, default=4, help="(4)")
    parser.add_argument("--max-delay", type=int, default=8, help="of delayed (8)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the mean gradient; 0 for no clipping (1)")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time (2)")
    parser.add_argument("--out", type=Path, default=Path("reports/accuracy"), help="(reports/accuracy)")
    args = parser.parse_args(argv)
    metric = TASKS[args.task]().metric
    rows = study(args, metric)
    print(table(rows, metric))
    length = f"{args.total_bits:g}-bits" if args.total_bits else args.steps
    plot(rows, metric, args.out / f"{args.task}-{length}.png")
    record = {"task": args.task, "steps": args.steps, "total_bits": args.total_bits, "workers": args.workers, "clip": args.clip}
    print(json.dumps(record | {"rows": rows}))


if __name__ == "__main__":
    main()
