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
    name, number = record["name"], 1
    while (folder / f"{record['name']}.json").exists():  # an earlier run of that name stays
        number += 1
        record["name"] = f"{name}-{number}"
    (folder / f"{record['name']}.json").write_text(json.dumps(record))
    draw(read(folder), folder / "report.png")
    return folder


def read(folder: Path) -> list[dict[str, Any]]:
    """All records of a folder, oldest first."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    records = [json.loads(file.read_text()) for file in files]
    return [record for record in records if isinstance(record, dict) and "curve" in record]


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw all records: loss against step, bytes and seconds; the hook's time by part; density by parameter over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counted = [record for record in records if record["bytes_are"] == "counted"]
    figure, axes = plt.subplots(1 + len(counted), 1, figsize=(12, 4 + 4.5 * len(counted)), squeeze=False, layout="constrained")
    for axis in axes[:, 0]:
        axis.remove()
    parts = figure.subfigures(1 + len(counted), 1, squeeze=False)[:, 0]
    draw_losses(records, parts[0])
    first = records[0]
    parts[0].suptitle(f"{first['world_size']} ranks, {first['parameters_numel']:,} parameters; training loss of rank 0, smoothed")
    for record, part in zip(counted, parts[1:]):
        draw_hook(record, part)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_losses(records: list[dict[str, Any]], figure: Any) -> None:
    """Smoothed training loss of every run against step, bytes sent and seconds."""
    axes = figure.subplots(1, 3, sharey=True)
    for record in records:
        if record["config"]["hook"] == "noop":
            continue  # every rank trains alone
        losses = [point["loss"] for point in record["curve"]]
        window = max(1, len(losses) // 20)
        smooth = [sum(losses[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(losses))]
        label = f"{record['name']} (val {record['val_loss']:.3f})"
        for axis, key, scale in zip(axes, ("step", "sent_bytes", "seconds"), (1, 1e6, 1)):
            points = [(point[key] / scale, loss) for point, loss in zip(record["curve"], smooth) if key == "step" or point[key]]
            axis.plot([x for x, _ in points], [y for _, y in points], label=label)
    for axis, words in zip(axes, ("step", "MB sent by one rank, logarithmic", "seconds in steps")):
        axis.set(xlabel=words)
        axis.grid(alpha=0.3)
    axes[1].set_xscale("log")
    axes[0].set(ylabel="training loss, nats a byte")
    if axes[0].lines:
        axes[0].legend(fontsize=8)


def draw_hook(record: dict[str, Any], figure: Any) -> None:
    """One compressed run: where the hook's time goes, and the density of every parameter over the run."""
    from matplotlib.colors import LogNorm

    config = record["config"]
    setting = {"topk": f"density {config['density']}", "threshold": f"tau {config['threshold']}"}.get(config["rule"], "")
    figure.suptitle(f"{record['name']}: {config['rule']} {setting}, {config['values']}")
    times, heat = figure.subplots(1, 2, width_ratios=(1, 3))
    for part in ("select", "encode", "decode"):
        times.bar(part, 1e3 * record[f"{part}_s"] / record["steps"], color="tab:blue")
    times.set(ylabel="ms a step")
    exchange_ms = 1e3 * record["exchange_s"] / record["steps"]
    times.set_title(f"exchange: {exchange_ms:.0f} ms, summed over buckets,\noverlapping with the rest", fontsize=8)
    points = [point for point in record["curve"] if point.get("densities")]
    if points:
        names = list(points[0]["densities"])
        rows = [[max(1e-5, point["densities"][name]) for point in points] for name in names]
        extent = (points[0]["step"], max(points[-1]["step"], points[0]["step"] + 1), len(names), 0)
        image = heat.imshow(rows, aspect="auto", norm=LogNorm(1e-4, 1), extent=extent, interpolation="nearest")
        heat.set_yticks([row + 0.5 for row in range(len(names))], names, fontsize=6)
        heat.set(xlabel="step, sampled")
        figure.colorbar(image, ax=heat, label="density (1e-4: that or less)")


def show(records: list[dict[str, Any]]) -> None:
    """Print the records side by side; with a noop run among them, also what each run's exchange costs over it."""
    from rich.console import Console
    from rich.table import Table

    first = records[0]
    floor = next((record["step_s"] for record in records if record["config"]["hook"] == "noop"), None)
    plain = next((record["step_s"] for record in records if record["config"]["hook"] == "none"), None)
    same = len({(record["steps"], record["world_size"], record["parameters_numel"]) for record in records}) == 1
    title = f"{first['steps']} steps, {first['world_size']} ranks, {first['parameters_numel']:,} parameters"
    table = Table(title=title if same else "runs that differ in steps, ranks or parameters")
    headings = ["run", "validation loss", "MB sent by a rank", "ratio", "seconds", "ms a step"]
    for heading in headings + (["ms over noop", "plain / this, over noop"] if floor else []):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for record in records:
        seconds = record["curve"][-1]["seconds"]
        sent = f"{record['sent_bytes'] / 1e6:,.2f} ({record['bytes_are']})"
        loss = "-" if record["config"]["hook"] == "noop" else f"{record['val_loss']:.3f}"  # each rank trains alone
        row = [record["name"], loss, sent, f"{record['ratio']:.1f}x", f"{seconds:.1f}", f"{1e3 * record['step_s']:.0f}"]
        if floor:
            # Runs follow each other on one machine: a difference under 2% of the floor cannot be told from none.
            over = record["step_s"] - floor
            times = f"{(plain - floor) / max(over, 0.02 * floor):.0f}x" if plain else ""
            lost = record["config"]["hook"] == "noop" or not plain
            row += [f"{1e3 * over:.1f}", "-" if lost else times + (" or more" if over < 0.02 * floor else "")]
        table.add_row(*row)
    Console(width=130).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the records of a report folder side by side.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print the newest record as one line of JSON instead, without its curve")
    args = parser.parse_args()
    listed = read(args.folder)
    if not listed:
        parser.error(f"{args.folder} is not a folder with records")
    if args.json:
        print(json.dumps({key: value for key, value in listed[-1].items() if key != "curve"}))
    else:
        show(listed)
