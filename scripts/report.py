"""Records of training runs: write them, plot them, and print them side by side.

python scripts/report.py FOLDER
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import gradcomp


def fields_of(traffic: gradcomp.Traffic) -> dict[str, Any]:
    """Every field of a traffic snapshot."""
    return dataclasses.asdict(traffic)


def write(folder: Path, record: dict[str, Any]) -> Path:
    """Write ``record`` as JSON and draw all the folder's records into ``report.png``; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{record['name']}.json").write_text(json.dumps(record))
    draw(read(folder), folder / "report.png")
    return folder


def read(folder: Path) -> list[dict[str, Any]]:
    """All records of a folder, oldest first."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    return [json.loads(file.read_text()) for file in files]


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Training loss against the step and against the bytes sent, one curve a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for record in records:
        losses = [point["loss"] for point in record["curve"]]
        window = max(1, len(losses) // 20)
        smooth = [sum(losses[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(losses))]
        by_step.plot([point["step"] for point in record["curve"]], smooth, label=f"{record['name']} (val {record['val_loss']:.3f})")
        by_bytes.plot([point["sent_bytes"] / 1e6 for point in record["curve"]], smooth)
    by_step.set(xlabel="step", ylabel="training loss, nats a byte")
    if any(record["sent_bytes"] for record in records):
        by_bytes.set_xscale("log")
    by_bytes.set(xlabel="MB sent by one rank")
    by_step.legend(fontsize=8)
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def show(records: list[dict[str, Any]]) -> None:
    """Print the records side by side."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{records[0]['config']['steps']} steps, {records[0]['world_size']} ranks, {records[0]['parameters_numel']:,} parameters"
    )
    for heading in ("run", "validation loss", "MB sent by a rank", "ratio", "ms a step"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for record in records:
        sent = f"{record['sent_bytes'] / 1e6:,.2f} ({record['bytes_are']})"
        table.add_row(record["name"], f"{record['val_loss']:.3f}", sent, f"{record['ratio']:.1f}x", f"{1e3 * record['step_s']:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the records of a report folder side by side.")
    parser.add_argument("folder", type=Path)
    listed = read(parser.parse_args().folder)
    if not listed:
        parser.error("the folder holds no records")
    show(listed)
