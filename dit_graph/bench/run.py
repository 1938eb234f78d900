"""One run of the benchmark: every scenario with every variant, then the record.

Set-up times come from fresh processes, because a kernel that one variant has warmed is warm for the
next; everything else comes from one process, in turns, because the host's mood hits all alike.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dit_graph.bench import chart, record, table
from dit_graph.bench.measure import (
    WARM,
    Activity,
    Clock,
    Times,
    activity,
    break_even,
    eager_first,
    finite,
    measured,
    percentile,
)
from dit_graph.bench.tasks import Task, tasks
from dit_graph.bench.variants import COMPILED, EAGER, Front, front, impossible
from dit_graph.cli.bench import BenchOptions
from dit_graph.cli.errors import UsageError, one_line, told
from dit_graph.errors import ConfigError, DitGraphError

_NO_DEVICE = (
    "no CUDA device: GPU-busy share, kernels, launches, device times and bytes are not measured, "
    "and the recorder's times say nothing about a GPU"
)


def run(options: BenchOptions, argv: Sequence[str] | None) -> None:
    """Measure, print the table, write what was asked for; the last line is the record as JSON."""
    on = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else "cpu"
    clock = Clock(torch.device(on))
    if options.alone is not None:
        print(json.dumps(_alone(options, options.alone, clock)))
        return
    notes = [] if clock.cuda else [_NO_DEVICE]
    names = eager_first(options.compare)
    why = {n: impossible(n, clock.cuda, options.what, options.enable) for n in names}
    notes += [f"not measured: {reason}" for reason in why.values() if reason]
    names = [name for name in names if not why[name]]
    rows: list[dict[str, Any]] = []
    for task in tasks(options, clock.on):
        found, failed = _scenario(task, names, options, clock, argv)
        rows += found
        notes += [f"{task.scenario}: {name} failed: {text}" for name, text in failed.items()]
        left_out = f"not run: {', '.join(task.left_out)}"
        if task.left_out and left_out not in notes:
            notes.append(left_out)
    result = {"machine": record.machine(clock.on), "options": _told(options), "notes": notes,
              "rows": rows}  # fmt: skip
    print(table.markdown(result))
    _write(result, options)
    print(json.dumps(result))


def _scenario(
    task: Task, names: list[str], options: BenchOptions, clock: Clock, argv: Sequence[str] | None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of one scenario, and the variants that failed with their reason."""
    fronts, failed = _fronts(task, names, options)
    rounds = max(2, options.images // task.images)
    set_ups: dict[str, dict[str, Any]] = {}
    calls = len(fronts) * (WARM + rounds)
    with tqdm(total=calls, unit="call", file=sys.stderr, desc=task.scenario) as bar:

        def said(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        times, equal, broken = measured(fronts, task.call, clock, rounds, said)
    failed |= broken
    rows = []
    eager = next(f for f in fronts if f.variant == EAGER)
    if EAGER in broken:
        raise UsageError(f"{task.scenario}: eager itself fails: {broken[EAGER]}")
    if not finite(task.call(eager)):
        failed["equality"] = "eager's own result is not finite numbers; nothing is shown by it"
    for made in fronts:
        name = made.variant
        if name not in times:
            continue
        did = activity(made, task.call, clock)
        if options.set_up == "fresh":
            set_ups[name] = _fresh(name, task, argv)
        rows.append(_row(task, made, times[name], did, equal[name], set_ups.get(name)))
    for row in rows:
        row["break_even_images"] = _break_even(row, rows[0], task)
    for made in fronts:
        made.release()
    return rows, failed


def _fronts(
    task: Task, names: list[str], options: BenchOptions
) -> tuple[list[Front], dict[str, str]]:
    fronts, failed = [], {}
    for name in names:
        try:
            fronts.append(front(name, task.model, options.enable))
        except (DitGraphError, ValueError, RuntimeError) as error:
            failed[name] = one_line(error)
    return fronts, failed


def _row(
    task: Task, made: Front, times: Times, did: Activity | None, equal: bool,
    set_up: dict[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """One variant's numbers; None where they were not measured."""
    wall = percentile(times.wall, 0.5)
    steps = task.steps
    count = sum(p.numel() for p in task.repeated.parameters())
    first = times.first if set_up is None else set_up.get("first_s")
    later = wall if set_up is None else set_up.get("later_s")
    graph = None
    if made.handle is not None and made.handle.installs:
        (install,) = made.handle.installs.values()
        graph = install.runner.pool.bytes if install.runner is not None else 0
    return {
        "scenario": task.scenario,
        "model_cls": type(task.repeated).__name__,
        "num_params_B": round(count / 1e9, 3),
        "mode": made.variant,
        "images_per_s": round(task.images / wall, 4),
        "time_s": round(wall, 6),
        "step_ms_p50": round(wall / steps * 1e3, 3),
        "step_ms_p95": round(percentile(times.wall, 0.95) / steps * 1e3, 3),
        "device_s": round(percentile(times.device, 0.5), 6) if times.device else None,
        "gpu_busy_s": round(did.busy, 6) if did else None,
        "gpu_busy": round(did.busy / wall, 3) if did else None,
        "kernels_per_step": round(did.kernels / steps, 1) if did else None,
        "launches_per_step": round(did.launches / steps, 1) if did else None,
        "set_up_s": None if first is None or later is None else round(max(0.0, first - later), 3),
        "first_s": None if first is None else round(first, 3),
        "mem_GB": None if set_up is None else set_up.get("mem_GB"),
        "graph_MiB": None if graph is None else round(graph / 2**20, 1),
        "equal": equal,
        "stats": made.handle.stats() if made.handle is not None else None,
        "set_up": "fresh process" if set_up else "this process, kernels warm",
    }


def _break_even(row: dict[str, Any], eager: dict[str, Any], task: Task) -> int | None:
    """In pictures; a call draws a batch of them."""
    if row is eager or row["set_up_s"] is None or eager["set_up_s"] is None:
        return None
    calls = break_even(row["set_up_s"], row["time_s"], eager["set_up_s"], eager["time_s"])
    return None if calls is None else (calls - 1) * task.images + 1


def _fresh(name: str, task: Task, argv: Sequence[str] | None) -> dict[str, Any]:
    """The set-up of a variant in a process of its own."""
    given = list(sys.argv[1:] if argv is None else argv)
    command = [sys.executable, "-m", "dit_graph.bench", *given]
    command += ["--set-up-of", name, "--set-up-scenario", task.scenario]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise UsageError(f"{task.scenario}: the process for {name}'s set-up failed: {last}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _alone(options: BenchOptions, name: str, clock: Clock) -> dict[str, Any]:
    """Seconds of the first call and of a later one, `enable` or `compile` included."""
    found = (task for task in tasks(options, clock.on) if task.scenario == options.scenario)
    task = next(found, None)
    if task is None:
        raise UsageError(f"no scenario {options.scenario!r}")
    made: list[Front] = []

    def call() -> Any:
        if not made:
            made.append(front(name, task.model, options.enable))
        made[0].before_call()
        return task.call(made[0])

    with told(f"setting up {name}"):
        spent = [clock(call)[1] for _ in range(WARM + 3)]
    later = min(spent[WARM:])  # cold, recorded, compared and timed calls are all set-up
    peak = torch.cuda.max_memory_reserved(clock.on) / 1e9 if clock.cuda else None
    return {
        "first_s": sum(spent[:WARM]) - (WARM - 1) * later,
        "later_s": later,
        "mem_GB": None if peak is None else round(peak, 2),
    }


def _told(options: BenchOptions) -> dict[str, Any]:
    """The choices that decide the numbers."""
    return {
        "what": options.what, "model": options.model or "embedded", "images": options.images,
        "steps": options.steps, "dtype": str(options.dtype).removeprefix("torch."),
        "device": options.device, "remove_syncs": options.remove_syncs, "latent": options.latent,
        "compiled": sorted(set(options.compare) & set(COMPILED)),
    }  # fmt: skip


def _write(result: dict[str, Any], options: BenchOptions) -> None:
    """The files that were asked for, each whole or not there."""
    name = options.output
    if name != Path():
        _put(name.with_name(f"{name.name}.md"), table.markdown(result) + "\n")
        _put(name.with_name(f"{name.name}.json"), json.dumps(result, indent=1) + "\n")
        try:
            chart.draw(result, name.with_name(f"{name.name}.png"))
        except ConfigError as error:  # the numbers are there
            print(f"no {name.name}.png: {one_line(error)}", file=sys.stderr)
    if options.chart is not None:
        chart.draw(result, options.chart)


def _put(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
