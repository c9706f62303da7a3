"""Seconds to a validation loss, the same language model trained under each hook on real slow links: what fewer bytes are worth in the end.

    python benchmarks/bench_time_to_loss.py                                # as root: scripts/netlab makes the hosts; 18 minutes
    python benchmarks/bench_time_to_loss.py --links 300mbit --hooks plain topk-0.1-sign-delayed --steps 400 --d-model 192

(18 minutes on two cores that do nothing else.) The model, its data and its schedule are those of ``scripts/train.py``, to which other
arguments go. The loss after a step does not depend on the link, so that every hook's learning rates are tried on an unshaped one: its best
rate is the one that takes the fewest steps to the target, or that ends lowest where none gets there. At that rate it is trained anew on
each link, until the target. The target is 1.02 times plain DDP's lowest loss at the end. All runs have one schedule, over ``--steps``: a
hook that does not reach the target might do so in more.

Seconds are those of the steps on rank 0: start-up and validation are left out. Of bytes, those of gradcomp are counted, the others'
computed. ``reports/time-to-loss`` gets the curves, as ``curves.png`` and in ``record.json``; the last line is that record without them.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NETLAB = ROOT / "scripts" / "netlab"
SIZE = "--steps 600 --batch 8 --validate-every 20"
TINY = "--links unshaped --ranks 2 --hooks plain topk-0.1-sign-delayed --lr 0.01"
TINY_SIZE = "--steps 16 --d-model 32 --layers 1 --batch 4 --context 32 --validate-every 4"
SLACK = 1.02
"""The target, over plain DDP's lowest loss."""

ADAMW, LATE = (0.006, 0.010), (0.003, 0.006)
HOOKS: dict[str, dict[str, Any]] = {
    "plain": {"hook": "none", "lr": ADAMW},
    "fp16": {"hook": "fp16", "lr": ADAMW},
    "powersgd-16": {"hook": "powersgd", "powersgd-rank": 16, "lr": ADAMW},
    "topk-0.01-bf16": {"rule": "topk", "density": 0.01, "values": "bf16", "lr": ADAMW},
    "topk-0.1-sign-delayed": {"rule": "topk", "density": 0.1, "values": "sign", "optimizer": "delayed-adamw", "lr": LATE},
    "topk-0.03-sign-delayed": {"rule": "topk", "density": 0.03, "values": "sign", "optimizer": "delayed-adamw", "lr": LATE},
}
"""By name, arguments of ``scripts/train.py``; of ``lr`` all that are tried."""


def training(hook: str, lr: float) -> list[str]:
    """A hook's own arguments of ``scripts/train.py``."""
    own = HOOKS[hook] | {"lr": lr, "name": f"{hook}-lr={lr:g}"}
    return [word for name, value in own.items() for word in (f"--{name}", str(value))]


class Lab:
    """Hosts on one link."""

    def __init__(self, ranks: int) -> None:
        self.ranks = str(ranks)
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "NETLAB": f"loss{os.getpid()}"}

    @contextmanager
    def up(self, link: str) -> Iterator[None]:
        """Up, and down again."""
        try:
            up = subprocess.run([NETLAB, "up", self.ranks, link], env=self.environment, stdout=subprocess.DEVNULL, check=False)
            if up.returncode:
                raise SystemExit(f"scripts/netlab could not set up {self.ranks} hosts at {link}")
            yield
        finally:
            subprocess.run([NETLAB, "down"], env=self.environment, stderr=subprocess.DEVNULL, check=False)

    def train(self, arguments: list[str]) -> dict[str, Any]:
        """The record of a training, curve included."""
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "record.json")
            command = [sys.executable, str(ROOT / "scripts" / "train.py"), *arguments, "--json", str(record)]
            hosts = [NETLAB, "run", self.ranks, "--"]
            run = subprocess.run([*hosts, *command], env=self.environment, capture_output=True, text=True, check=False)
            if run.returncode or not record.exists():
                raise SystemExit(f"{run.stderr}\nscripts/train.py {' '.join(arguments)}: ended with status {run.returncode}")
            found: dict[str, Any] = json.loads(record.read_text())
            return found


def validated(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of a run's curve that have a validation loss."""
    keys = ("step", "seconds", "sent_bytes", "val_loss")
    return [{key: point[key] for key in keys} for point in record["curve"] if "val_loss" in point]


def first(record: dict[str, Any], target: float) -> dict[str, Any] | None:
    """The point at which a run reaches the target, if it does."""
    return next((point for point in validated(record) if point["val_loss"] <= target), None)


def or_none(number: float) -> float | None:
    """NaN and infinity are no JSON."""
    return number if math.isfinite(number) else None


def best(runs: dict[float, dict[str, Any]], target: float) -> float:
    """The rate that takes the fewest steps to the target; where none gets there, or several are as quick, that with the lowest end."""

    def order(lr: float) -> tuple[float, float]:
        point, end = first(runs[lr], target), runs[lr]["val_loss"]
        return point["step"] if point else math.inf, end if math.isfinite(end) else math.inf

    return min(runs, key=order)


def target_of(plain: dict[float, dict[str, Any]]) -> float:
    """The default target: a little above plain DDP's lowest loss at the end."""
    ends = [run["val_loss"] for run in plain.values() if math.isfinite(run["val_loss"])]
    if not ends:
        raise SystemExit("plain DDP diverges at every rate: give others with --lr, or a --target")
    return SLACK * min(ends)


def summary(record: dict[str, Any], lr: float, target: float) -> dict[str, Any]:
    """What a run on a link came to."""
    point, end = first(record, target), record["curve"][-1]
    return {
        "lr": lr,
        "reached": point is not None,
        "steps_to_target": point["step"] if point else None,
        "seconds_to_target": point["seconds"] if point else None,
        "steps": end["step"],
        "seconds": end["seconds"],
        "sent_bytes": end["sent_bytes"],
        "bytes_are": record["bytes_are"],
        "val_loss": or_none(record["val_loss"]),
    }


def against_plain(rows: dict[str, dict[str, Any]]) -> None:
    """Add plain DDP's seconds to the target over each hook's, None where one of them does not get there."""
    plain = rows.get("plain", {}).get("seconds_to_target")
    for row in rows.values():
        row["plain_over_this"] = plain / row["seconds_to_target"] if plain and row["reached"] else None


def table(link: str, rows: dict[str, dict[str, Any]], record: dict[str, Any]) -> str:
    """A link, for people."""
    lines = [
        f"{link}, {record['ranks']} ranks, {record['parameters']:,} parameters, to a validation loss of {record['target']:.4f}",
        f"{'hook':<23} {'best lr':>8} {'steps':>6} {'seconds':>8} {'plain / this':>13} {'MB sent':>19} {'loss':>7}",
    ]
    for name, row in rows.items():
        sent = f"{row['sent_bytes'] / 1e6:,.2f} ({row['bytes_are']})"
        loss = "-" if row["val_loss"] is None else f"{row['val_loss']:.3f}"
        times = "-" if row["plain_over_this"] is None else f"{row['plain_over_this']:.2f}x"
        steps, seconds, words = str(row["steps"]), f"{row['seconds']:.1f}", ""
        if not row["reached"]:
            steps, seconds, words = "-", "-", f"  not reached in {row['steps']} steps, {row['seconds']:.1f} s"
        lines.append(f"{name:<23} {row['lr']:>8g} {steps:>6} {seconds:>8} {times:>13} {sent:>19} {loss:>7}{words}")
    return "\n".join(lines)


def draw(record: dict[str, Any], path: Path) -> None:
    """Validation loss against seconds, a panel a link."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    links = record["links"]
    figure, axes = plt.subplots(1, len(links), figsize=(7 * len(links), 5), squeeze=False, sharey=True, layout="constrained")
    for axis, (link, rows) in zip(axes[0], links.items()):
        for name, row in rows.items():
            points = record["curves"][link][name]
            seconds, losses = [point["seconds"] for point in points], [point["val_loss"] for point in points]
            label = f"{name}, lr {row['lr']:g}" + ("" if row["reached"] else ": not reached")
            (line,) = axis.plot(seconds, losses, label=label, linestyle="-" if row["reached"] else ":")
            if row["reached"]:
                axis.plot(seconds[-1], losses[-1], "o", color=line.get_color())
        axis.axhline(record["target"], color="black", linewidth=0.8, linestyle="--", label=f"target {record['target']:.3f}")
        axis.set(title=f"{link}, {record['ranks']} ranks", xlabel="seconds in steps")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set(ylabel="validation loss, nats a byte")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what goes to every training; what is wrong ends with a message that names it."""
    purpose, rest = __doc__.split("\n\n", 1)
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=purpose, epilog=rest, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit"], help="as tc writes them, or unshaped (100mbit 1gbit)")
    parser.add_argument("--ranks", type=int, default=4, help="(4)")
    parser.add_argument("--hooks", nargs="+", default=list(HOOKS), choices=HOOKS, help="(all)")
    parser.add_argument("--lr", type=float, nargs="+", help="instead of each hook's own learning rates to try")
    parser.add_argument("--target", type=float, help=f"validation loss; {SLACK:g} times plain's lowest at the end if not given")
    parser.add_argument("--out", type=Path, default=Path("reports/time-to-loss"), help="folder (reports/time-to-loss)")
    parser.add_argument("--tiny", action="store_true", help="half a minute, to see that it runs")
    argv = sys.argv[1:] if argv is None else argv
    args, others = parser.parse_known_args(argv)
    size = SIZE.split()
    if args.tiny:  # later arguments win
        args, others = parser.parse_known_args([*TINY.split(), *argv])
        size = TINY_SIZE.split()
    if args.ranks < 1:
        parser.error(f"--ranks must be at least 1, got {args.ranks}")
    if args.target is None and "plain" not in args.hooks:
        parser.error("--target is needed where plain, whose loss sets it, is not among the --hooks")
    if args.target is not None and not 0 < args.target < math.inf:
        parser.error(f"--target must be above 0, got {args.target}")
    sys.path.insert(0, str(ROOT / "scripts"))
    import train

    for name in args.hooks:  # a wrong argument is found before the first training
        for lr in args.lr or HOOKS[name]["lr"]:
            train.parse([*size, *others, *training(name, lr), "--target-loss", "1"])
    return args, size + others


def main(argv: list[str] | None = None) -> None:
    """Search, train on every link, print a table each, then the record."""
    args, common = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts are taken down then, too
    args.out.mkdir(parents=True, exist_ok=True)
    lab = Lab(args.ranks)
    for link in args.links:  # what cannot be made is found before the first training, too
        with lab.up(link):
            pass
    search: dict[str, dict[float, dict[str, Any]]] = {}
    with lab.up("unshaped"):
        for name in args.hooks:
            search[name] = {lr: lab.train([*common, *training(name, lr)]) for lr in args.lr or HOOKS[name]["lr"]}
            ends = ", ".join(f"{run['val_loss']:.4f} at {lr:g}" for lr, run in search[name].items())
            print(f"{name}: validation loss {ends}", flush=True)
    target = target_of(search["plain"]) if args.target is None else args.target
    any_run = next(iter(search[args.hooks[0]].values()))
    rates = {name: best(runs, target) for name, runs in search.items()}
    record: dict[str, Any] = {
        "ranks": args.ranks,
        "parameters": any_run["parameters_numel"],
        "versions": any_run["versions"],
        "training": " ".join(common),
        "target": target,
        "search": {
            name: {
                f"{lr:g}": {"val_loss": or_none(run["val_loss"]), "steps_to_target": (first(run, target) or {"step": None})["step"]}
                for lr, run in runs.items()
            }
            for name, runs in search.items()
        },
        "links": {},
    }
    curves: dict[str, dict[str, Any]] = {}
    for link in args.links:
        runs = {}
        with lab.up(link):
            for name, lr in rates.items():
                runs[name] = lab.train([*common, *training(name, lr), "--target-loss", repr(target)])
        rows = {name: summary(run, rates[name], target) for name, run in runs.items()}
        against_plain(rows)
        record["links"][link] = rows
        curves[link] = {name: [point | {"val_loss": or_none(point["val_loss"])} for point in validated(run)] for name, run in runs.items()}
        print(f"\n{table(link, rows, record)}", flush=True)
    (args.out / "record.json").write_text(json.dumps(record | {"curves": curves}))
    draw(record | {"curves": curves}, args.out / "curves.png")
    print(f"\n{args.out / 'curves.png'}")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
