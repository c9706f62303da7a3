"""The time of a whole DDP step on a real slow network, under each hook: what each of gradcomp's ideas is worth, and where it loses.

    python benchmarks/bench_step.py --rates 100mbit 1gbit                  # as root: scripts/netlab makes the hosts
    python benchmarks/bench_step.py --rates 100mbit 1gbit 10gbit unshaped --ranks 2 4 --parameters 10e6 40e6 --density 0.1 0.01 0.001

Every host is a network namespace with one rank, one torch thread and a link of the given rate each way. What is measured is what
``gradcomp bench`` measures, which runs the same on a link of your own. ``twogathers`` is a plain sparse hook without gradcomp's ideas.
The last line is a JSON record: every cell, and the ratios of time over noop and of step time of every other hook over each of gradcomp's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gradcomp.cli.bench import table

NETLAB = Path(__file__).parents[1] / "scripts" / "netlab"
TINY = "--rates unshaped --ranks 2 --parameters 2e4 --steps 2 --rounds 1 --warm-up 3 --hooks plain twogathers-0.01 gradcomp-0.01-sign"


def cell(rate: str, ranks: int, parameters: float, rest: list[str]) -> dict[str, Any]:
    """The record of one run of ``gradcomp bench`` on ``ranks`` hosts."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NETLAB": f"step{os.getpid()}"}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        command = [sys.executable, "-m", "gradcomp", "bench", "--parameters", f"{parameters:g}", "--json", str(record), *rest]
        try:
            subprocess.run([NETLAB, "up", str(ranks), rate], check=True, env=environment, stdout=subprocess.DEVNULL)
            subprocess.run([NETLAB, "run", str(ranks), "--", *command], check=True, env=environment, stdout=subprocess.DEVNULL)
        finally:
            subprocess.run([NETLAB, "down"], check=True, env=environment)
        found: dict[str, Any] = json.loads(record.read_text())
        return {"rate": rate, **found}


def ratios(record: dict[str, Any], field: str) -> dict[str, float | None]:
    """Of every other hook's seconds over each of gradcomp's; None where noise has made one of them less than nothing."""
    hooks = {name: row[field] for name, row in record["hooks"].items() if name != "noop"}
    ours = [name for name in hooks if name.startswith("gradcomp")]
    pairs = [(other, own) for own in ours for other in hooks if other not in ours]
    return {f"{other} / {own}": hooks[other] / hooks[own] if min(hooks[other], hooks[own]) > 0 else None for other, own in pairs}


def main(argv: list[str] | None = None) -> None:
    """Print a table a cell, then the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Other arguments go to gradcomp bench.")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="as tc writes them, or unshaped (100mbit 1gbit)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="(4)")
    parser.add_argument("--parameters", type=float, nargs="+", default=[10e6], help="(10e6)")
    parser.add_argument("--tiny", action="store_true", help="a few seconds, to see that it runs")
    args, rest = parser.parse_known_args(argv)
    if args.tiny:
        args, rest = parser.parse_known_args(TINY.split())
    cells = []
    for parameters in args.parameters:
        for ranks in args.ranks:
            for rate in args.rates:
                cells.append(cell(rate, ranks, parameters, rest))
                print(f"{rate}: {table(cells[-1])}\n", flush=True)
    summary: dict[str, Any] = {"cells": cells}
    for record in cells:
        for field in ("over_noop_s", "step_s"):
            summary[f"{field}, {record['rate']}, {record['world_size']} ranks, {record['parameters']} parameters"] = ratios(record, field)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
