"""What a threshold saves by type of layer: the density that it comes to, what it costs in accuracy, and the bytes that the codec saves.

    python benchmarks/bench_layers.py                          # about a quarter of an hour on two cores
    python benchmarks/bench_layers.py --threshold 3e-3 --layers convolution lstm --values sign

Only the layers of one type are sparse, by ``Threshold`` with error feedback; all else travels dense. Two workers of
``benchmarks/simulator.py``, SGD with momentum 0.9, the same training dense beside it. Bytes are those of the layers alone, by the codec,
with the room that the hook keeps for a threshold, against an fp32 all-reduce, which at two workers hands over 4 bytes an element. Beside it
stands what a published article claims of a threshold on gradients, without saying how it was measured. The last line is a JSON record.
"""

import argparse
import json
import math
import multiprocessing
import statistics
from fnmatch import fnmatchcase
from typing import Any

import torch
from bench_accuracy import MOMENTUM
from hooks import DenseMean, Sparse
from simulator import Workers
from tasks import TASKS

import gradcomp
from gradcomp.core.values import FORMATS, check_values
from gradcomp.ddp.plan import capacity_for, payload_share

LAYERS: dict[str, dict[str, Any]] = {
    "convolution": {"task": "cnn-mnist", "names": ["0.weight", "3.weight"], "rate": 0.03, "claim": "65-80% sparse, < 0.5%, 60-75%"},
    "lstm": {"task": "rnn", "names": ["lstm.weight*"], "rate": 0.3, "claim": "40-60% sparse, 1-2%, 35-55%"},
    "attention": {"task": "transformer", "names": ["*.qkv.weight", "*.proj.weight"], "rate": 0.3, "claim": "70-90% sparse, < 1%, 65-85%"},
    "mlp": {"task": "transformer", "names": ["*.up.weight", "*.down.weight"], "rate": 0.3, "claim": "-"},
    "embedding": {"task": "transformer", "names": ["token.weight"], "rate": 0.3, "claim": "-"},
}
"""By type: where it is, under which names, at which learning rate; claimed sparsity, loss of accuracy, and bytes saved."""
WORKERS = 2


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One training; the job with its result, and what was sent of the layers. ``threshold`` None: dense."""
    torch.set_num_threads(1)
    layers, form = LAYERS[job["layers"]], FORMATS[job["values"]]
    task = TASKS[layers["task"]]()
    torch.manual_seed(job["seed"])
    net = task.make()
    chosen = [name for name, _ in net.named_parameters() if any(fnmatchcase(name, glob) for glob in layers["names"])]
    sizes = {name: parameter.numel() for name, parameter in net.named_parameters() if name in chosen}
    if job["threshold"] is None:
        workers = Workers(net, WORKERS, DenseMean())
    else:
        overrides = {name: gradcomp.Threshold(job["threshold"]) for name in chosen}
        workers = Workers(net, WORKERS, Sparse(gradcomp.Dense(), overrides=overrides, values=job["values"], fallback="never"))
    optimizer = torch.optim.SGD(net.parameters(), lr=layers["rate"], momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.05 + 0.475 * (1 + math.cos(math.pi * step / job["steps"])))
    generators = [torch.Generator().manual_seed(1000 * job["seed"] + worker) for worker in range(WORKERS)]
    elements = size = 0
    for _ in range(job["steps"]):
        workers.step([task.batch(generator) for generator in generators], task.loss)
        optimizer.step()
        scheduler.step()
        for handle in workers.handles[:1]:
            sent = {name: round(handle.densities[name] * sizes[name]) for name in chosen}
            elements += sum(sent.values())
            size += sum(payload_share(sizes[name], capacity_for(sizes[name], count), form) for name, count in sent.items())
    total = sum(sizes.values()) * job["steps"]
    dense = job["threshold"] is None
    return {
        **job,
        "result": task.judge(net),
        "density": 1.0 if dense else elements / total,
        "saved": 0.0 if dense else 1 - size / (4 * total),
    }


def main(argv: list[str] | None = None) -> None:
    """Print a table and a JSON record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--threshold", type=float, default=1e-3, help="(0.001, the articles')")
    parser.add_argument("--values", default="bf16", help="(bf16)")
    parser.add_argument("--steps", type=int, default=400, help="(400)")
    parser.add_argument("--seeds", type=int, default=3, help="(3)")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time (2)")
    args = parser.parse_args(argv)
    check_values(args.values)
    gradcomp.Threshold(args.threshold)
    fixed = {"steps": args.steps, "values": args.values}
    seeds = range(1, args.seeds + 1)
    # Layers of one network share its dense trainings.
    first = {LAYERS[layers]["task"]: layers for layers in reversed(args.layers)}
    jobs = [fixed | {"layers": layers, "threshold": None, "seed": seed} for layers in first.values() for seed in seeds]
    jobs += [fixed | {"layers": layers, "threshold": args.threshold, "seed": seed} for layers in args.layers for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        runs = pool.map(run, jobs, chunksize=1)
    print(f"Threshold({args.threshold:g}), {args.values} values, {args.steps} steps, {args.seeds} seeds")
    print(f"{'layers':<12} {'task':<12} {'dense':>8} {'sparse':>8} {'accuracy lost':>22} {'sparsity':>9} {'bytes saved':>12}   claimed")
    rows = []
    for layers in args.layers:
        dense, sparse = ([r for r in runs if r["layers"] == which and (r["threshold"] is None) == plain] for which, plain in (
            (first[LAYERS[layers]["task"]], True), (layers, False),
        ))  # fmt: skip
        metric = TASKS[LAYERS[layers]["task"]]().metric
        a, b = (statistics.mean(run["result"] for run in found) for found in (dense, sparse))
        spread = max(run["result"] for run in dense) - min(run["result"] for run in dense)
        lost = a - b if metric == "accuracy" else 100 * (b / a - 1)
        unit, spread = ("points", spread) if metric == "accuracy" else ("% loss", 100 * spread / a)
        row = {
            "layers": layers,
            "task": LAYERS[layers]["task"],
            "metric": metric,
            "dense": a,
            "sparse": b,
            "lost": lost,
            "dense_spread": spread,
        }
        row |= {field: statistics.mean(run[field] for run in sparse) for field in ("density", "saved")}
        rows.append(row)
        text = f"{lost:+.2f} {unit} (±{spread / 2:.2f})"
        numbers = f"{a:>8.3f} {b:>8.3f} {text:>22} {100 * (1 - row['density']):>8.1f}% {100 * row['saved']:>11.1f}%"
        print(f"{layers:<12} {row['task']:<12} {numbers}   {LAYERS[layers]['claim']}")
    print(json.dumps({"threshold": args.threshold, "values": args.values, "steps": args.steps, "seeds": args.seeds, "rows": rows}))


if __name__ == "__main__":
    main()
