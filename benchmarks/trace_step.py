"""One training step of rank 0, drawn: what the backward thread does, what is on the network meanwhile, what the callbacks do.

    torchrun --standalone --nproc_per_node 2 benchmarks/trace_step.py --png             # reports/trace.json, reports/trace.png
    scripts/netlab run 4 -- python benchmarks/trace_step.py --out trace.json --parameters 40e6 --density 0.001

Other arguments are those of ``gradcomp bench`` (the model, ``--density``, ``--values``, ``--bucket-mb``, ``--warm-up``, ``--steps``); the
hook is the first of gradcomp's that they name. The JSON file is a Chrome trace, for https://ui.perfetto.dev or chrome://tracing. It shows
the step of median length; the numbers are medians over all. Nothing in the package is changed: it is watched from outside.

A collective lasts from its issue until Python hears of its end. The last line is a JSON record. ``overlap``: the share of the collectives'
time before the last bucket's hook call had returned, after which backward only waits. ``hook_over_select_encode``: the time of the hook
calls, less callbacks that happened to run inside them, over the select and encode parts.
"""

import argparse
import functools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from gradcomp.cli import bench
from gradcomp.ddp import register
from gradcomp.ddp.coo import CooFlight
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.flight import Flight
from gradcomp.ddp.lastcalls import at_exit_wait_for
from gradcomp.ddp.state import SparseState
from gradcomp.ddp.traffic import Counters

TINY = "--parameters 2e4 --layers 4 --bucket-mb 0.03 --warm-up 3 --steps 3"
BACKWARD, NETWORK, CALLBACKS = "backward thread", "network", "callbacks"
COLOURS = {
    "forward": "tab:gray", "backward": "tab:blue", "optimizer": "tab:brown", "hook": "tab:cyan", "select": "tab:olive",
    "encode": "tab:green", "gather": "tab:orange", "ring": "tab:red", "decode": "tab:pink", "complete": "tab:purple",
}  # fmt: skip


class Event(NamedTuple):
    """Something that took a while, in seconds of the clock."""

    lane: str
    part: str
    detail: str
    start: float
    stop: float
    thread: int


class Recorder:
    """Notes what the package does, from outside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []

    def add(self, lane: str, part: str, start: float, detail: str = "") -> None:
        """Something that began at ``start`` has ended."""
        event = Event(lane, part, detail, start, time.perf_counter(), threading.get_ident())
        with self._lock:
            self._events.append(event)

    def take(self) -> list[Event]:
        """What has happened since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    @contextmanager
    def span(self, lane: str, part: str, detail: str = "") -> Iterator[None]:
        """Note a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, part, start, detail)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch everything that a hook registered meanwhile does."""
        with ExitStack() as stack:
            for owner, name, watched in (
                (torch.Tensor, "backward", self._call(torch.Tensor.backward, BACKWARD, "backward")),
                (register, "sparse_hook", self._hook(register.sparse_hook)),
                (Counters, "timed", self._timed(Counters.timed)),
                (Exchange, "gather", self._collective(Exchange.gather, "gather")),
                (Exchange, "ring", self._collective(Exchange.ring, "ring")),
                (Exchange, "ring_coo", self._collective(Exchange.ring_coo, "ring")),
                (Flight, "receive_payloads", self._call(Flight.receive_payloads, CALLBACKS, "decode")),
                (Flight, "receive_ring", self._call(Flight.receive_ring, CALLBACKS, "decode")),
                (CooFlight, "receive_ring", self._call(CooFlight.receive_ring, CALLBACKS, "decode")),
                (SparseState, "_complete", self._call(SparseState._complete, CALLBACKS, "complete")),
            ):
                stack.enter_context(patch.object(owner, name, watched))
            yield

    def _call(self, function: Callable[..., Any], lane: str, part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **settings: Any) -> Any:
            with self.span(lane, part):
                return function(*args, **settings)

        return watched

    def _hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)  # DDP looks at its annotations
        def watched(state: Any, bucket: Any) -> Any:
            with self.span(BACKWARD, "hook", f"bucket {bucket.index()}"):
                return hook(state, bucket)

        return watched

    def _timed(self, timed: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def watched(counters: Counters, name: str) -> Iterator[None]:
            start = time.perf_counter()
            with timed(counters, name):
                yield
            if name in ("select_s", "encode_s"):
                self.add(BACKWARD, name.removesuffix("_s"), start)

        return watched

    def _collective(self, issue: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(issue)
        def watched(exchange: Exchange, tensor: torch.Tensor) -> Any:
            start = time.perf_counter()
            future = issue(exchange, tensor)
            size = "sparse" if tensor.is_sparse else f"{tensor.numel() * tensor.element_size():,} bytes"
            future.add_done_callback(at_exit_wait_for(lambda _: self.add(NETWORK, part, start, size)))  # before the hook's own
            return future

        return watched


def seconds(events: list[Event], *parts: str) -> float:
    """Of these parts together."""
    return sum(event.stop - event.start for event in events if event.part in parts)


def within(events: list[Event], hook: Event, *parts: str) -> float:
    """Seconds of these parts that ran inside a hook call, on its thread."""
    return seconds([event for event in events if event.thread == hook.thread and hook.start <= event.start <= hook.stop], *parts)


def numbers(events: list[Event], hooks: list[Event]) -> dict[str, float]:
    """Seconds of one step by part, and how much of the exchange was hidden."""
    exchanges = [event for event in events if event.lane == NETWORK]
    last = max(hook.stop for hook in hooks)
    found = {f"{part}_s": seconds(events, part) for part in ("step", "backward", "hook", "select", "encode", "decode", "complete")}
    found["callbacks_inside_hook_s"] = sum(within(events, hook, "decode", "complete") for hook in hooks)
    found["exchange_s"] = seconds(exchanges, "gather", "ring")
    return found | {"overlap": sum(max(0.0, min(event.stop, last) - event.start) for event in exchanges) / found["exchange_s"]}


def summary(steps: list[list[Event]]) -> dict[str, float]:
    """Medians over the steps; of the hook's time bucket by bucket, so that a call that another process held up does not count."""
    hooks = [sorted((event for event in events if event.part == "hook"), key=lambda event: event.start) for events in steps]
    if not all(hooks) or len({len(calls) for calls in hooks}) > 1:
        raise SystemExit(f"every step must have the same buckets, got {sorted({len(calls) for calls in hooks})}: try more --warm-up steps")
    rows = [numbers(events, calls) for events, calls in zip(steps, hooks)]
    own_s = selected_s = 0.0
    for calls in zip(*hooks):
        spent = [call.stop - call.start - within(events, call, "decode", "complete") for events, call in zip(steps, calls)]
        own_s += statistics.median(spent)
        selected_s += statistics.median(within(events, call, "select", "encode") for events, call in zip(steps, calls))
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]} | {"hook_over_select_encode": own_s / selected_s}


def tracks(events: list[Event], lane: str) -> list[list[Event]]:
    """Events of a lane on as few lines as they need: nested ones in the backward thread's, others that overlap below each other."""
    lines: list[list[Event]] = []
    for event in sorted((event for event in events if event.lane == lane), key=lambda event: (event.start, -event.stop)):
        free = next((line for line in lines if line[-1].stop <= event.start), None)
        if free is None:
            lines.append([event])
        else:
            free.append(event)
    return lines


def chrome(events: list[Event]) -> dict[str, Any]:
    """The trace, as Chrome and Perfetto read it: microseconds since the step began."""
    begin = min(event.start for event in events)
    rows: list[dict[str, Any]] = []
    number = 0
    for lane in (BACKWARD, NETWORK, CALLBACKS):
        lines = tracks(events, lane)
        if lane == BACKWARD:  # what nests may share a line there
            lines = [[event for line in lines for event in line]]
        for place, line in enumerate(lines):
            name = lane if place == 0 else f"{lane} {place + 1}"
            rows.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}})
            rows.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": number, "args": {"sort_index": number}})
            for event in line:
                times = {"ts": 1e6 * (event.start - begin), "dur": 1e6 * (event.stop - event.start)}
                about = {"detail": event.detail, "thread": event.thread}
                rows.append({"name": event.part, "cat": lane, "ph": "X", "pid": 0, "tid": number, **times, "args": about})
            number += 1
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def draw(events: list[Event], path: Path, title: str) -> None:
    """The trace as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    begin = min(event.start for event in events)
    shown = [event for event in events if event.part != "step"]
    lines = [(lane, line) for lane in (BACKWARD, NETWORK, CALLBACKS) for line in tracks(shown, lane)]
    figure, axis = plt.subplots(figsize=(12, 1.2 + 0.45 * len(lines)), layout="constrained")
    for place, (_, line) in enumerate(lines):
        for event in line:
            width = 1e3 * (event.stop - event.start)
            axis.barh(place, width, height=0.8, left=1e3 * (event.start - begin), color=COLOURS[event.part])
    first = {lane: place for place, (lane, _) in reversed(list(enumerate(lines)))}
    axis.set_yticks(list(first.values()), list(first))
    axis.invert_yaxis()
    axis.set_xlabel("ms since the step began")
    axis.set_title(title)
    parts = [part for part in COLOURS if any(event.part == part for event in shown)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[part]) for part in parts]
    axis.legend(handles, parts, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def record(args: argparse.Namespace, name: str) -> tuple[list[list[Event]], int]:
    """The events of each step on this rank, and the model's size."""
    recorder, steps = Recorder(), []
    with recorder.watching():
        trainee = bench.Trainee(args, name)
        for number in range(args.warm_up):
            trainee.step(number)
        for number in range(args.steps):
            dist.barrier()
            recorder.take()
            with recorder.span(BACKWARD, "step"):
                trainee.step(number)
            steps.append(recorder.take())
    for events in steps:
        step, backward = (next(event for event in events if event.part == part) for part in ("step", "backward"))
        events.append(step._replace(part="forward", stop=backward.start))
        events.append(step._replace(part="optimizer", start=backward.stop))
    return steps, trainee.numel


def report(args: argparse.Namespace, name: str, steps: list[list[Event]], numel: int) -> None:
    """Write the files, print the table and the record."""
    middle = summary(steps)
    typical = sorted(steps, key=lambda events: seconds(events, "step"))[len(steps) // 2]
    title = f"{name}, {dist.get_world_size()} ranks, {numel:,} parameters"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(chrome(typical)))
    if args.png is not None:
        args.png.parent.mkdir(parents=True, exist_ok=True)
        draw(typical, args.png, title)
    print(f"{title}; medians of {len(steps)} steps of rank 0, ms a step")
    for key, value in middle.items():
        if key.endswith("_s"):
            print(f"  {key.removesuffix('_s').replace('_', ' '):<24} {1e3 * value:>9.2f}")
    print(f"  exchange that ran before the last hook call had returned: {100 * middle['overlap']:.0f}%")
    print(f"  hook over select + encode: {middle['hook_over_select_encode']:.2f}")
    print(f"  {args.out}" + (f", {args.png}" if args.png else ""))
    buckets = sum(event.part == "hook" for event in typical)
    print(json.dumps({"world_size": dist.get_world_size(), "parameters": numel, "hook": name, "buckets": buckets, **middle}))


def main(argv: list[str] | None = None) -> None:
    """Run under torchrun, or on netlab's hosts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Other arguments are those of gradcomp bench.")
    parser.add_argument("--out", type=Path, default=Path("reports/trace.json"), help="the Chrome trace (reports/trace.json)")
    parser.add_argument("--png", type=Path, nargs="?", const=Path(), help="also draw it, here or beside the trace; needs matplotlib")
    parser.add_argument("--tiny", action="store_true", help="a model of 20,000 parameters: to see that it runs")
    args, rest = parser.parse_known_args(argv)
    if args.png == Path():
        args.png = args.out.with_suffix(".png")
    bench_args = bench.parse([*TINY.split(), *rest] if args.tiny else rest)
    name = next((hook for hook in bench_args.hooks if hook.startswith("gradcomp-")), None)
    if name is None:
        parser.error(f"--hooks must name one of gradcomp's hooks, got {' '.join(bench_args.hooks)}")
    if "RANK" not in os.environ:
        raise SystemExit("a step between ranks is traced: launch it with torchrun, as torchrun --nproc_per_node 2 benchmarks/trace_step.py")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    steps, numel = record(bench_args, name)
    if dist.get_rank() == 0:
        report(args, name, steps, numel)
    dist.destroy_process_group()
    time.sleep(0.2)  # as in gradcomp bench: gloo's threads must let go before Python ends


if __name__ == "__main__":
    main()
