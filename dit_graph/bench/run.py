"""Runs the benchmark: every scenario with every contender, then the record.

Set-up times come from fresh processes, because a kernel that one contender has warmed is warm for
the next; everything else comes from one process, in turns, because the host's mood hits all alike.
Under a launcher each process does its share of the images at the same time.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from dit_graph.bench import chart, record, table
from dit_graph.bench.contenders import COMPILED, EAGER, Contender, eager_first, impossible
from dit_graph.bench.measure import Activity, Clock, activity, measured
from dit_graph.bench.rows import Row, merged, row, unused, with_gain
from dit_graph.bench.set_up import alone, fresh
from dit_graph.bench.tasks import Task, tasks
from dit_graph.cli.errors import UsageError, one_line, told, writing
from dit_graph.cli.ranks import Processes
from dit_graph.errors import ConfigError, DitGraphError

if TYPE_CHECKING:
    from dit_graph.bench.options import BenchOptions

_NO_DEVICE = (
    "no CUDA device: times are those of the CPU and say nothing about a GPU, so no gain and no "
    "picture from which on it pays; GPU-busy share, kernels, launches and bytes are not measured"
)
_WARM = "set-up: in this process, its kernels warm, so that eager has none"


@dataclass
class _Share:
    """The main process gets to know by this what one process has measured."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: str = ""


def run(options: "BenchOptions", argv: Sequence[str] | None, processes: Processes) -> None:
    """Measure, print the table, write what was asked for; the last line is the record as JSON.

    `argv` is the command line that `options` come from, for the fresh processes.
    """
    name = processes.device if options.device == "cuda" else "cpu"
    clock = Clock(torch.device(name if ":" in name or name == "cpu" else f"{name}:0"))
    if options.alone is not None:
        print(json.dumps(alone(options, options.alone, clock)))
        return
    share = _Share()
    bench = _Bench(options, argv, clock, processes)
    try:
        share.failed = processes.failure(lambda: bench.run(share))
    except BaseException as error:  # What is measured is told, whatever ends the rest.
        if processes.is_main and share.rows:
            _tell(bench.result([share], one_line(error)), options)
        raise
    shares = processes.gather(share)
    failed = processes.summary([share.failed for share in shares])
    if processes.is_main and any(share.rows for share in shares):
        _tell(bench.result(shares, failed), options)
    if failed:
        raise UsageError(failed)


@dataclass
class _Bench:
    """Measure in this process; `processes` take their turns together."""

    options: "BenchOptions"
    argv: Sequence[str] | None
    clock: Clock
    processes: Processes

    def run(self, share: _Share) -> None:
        options, together = self.options, self.processes.together
        share.notes += [] if self.clock.cuda else [_NO_DEVICE]
        names = eager_first(options.compare)
        why = {n: impossible(n, options.device, options.what) for n in names}
        share.notes += [f"not measured: {reason}" for reason in why.values() if reason]
        share.notes += [_WARM] if options.set_up == "here" else []
        shared = self.processes.rank, self.processes.count
        scenarios = tasks(options, self.clock.on, shared)
        while (task := together(lambda: next(scenarios, None))) is not None:
            if task.left_out:
                share.notes.append(f"not run: {', '.join(task.left_out)}")
            self._scenario(task, [name for name in names if not why[name]], share)
            if self.processes.count == 1:  # A run that is killed leaves what it has.
                _write(self.result([share], "the run has not ended"), options)

    def result(self, shares: Sequence[_Share], failed: str = "") -> dict[str, Any]:
        """Put the record of all processes together."""
        notes = list(dict.fromkeys(note for share in shares for note in share.notes))
        return {
            "machine": self._machine, "options": _choices(self.options),
            "notes": [*notes, f"failed: {failed}"] if failed else notes,
            "rows": merged([share.rows for share in shares if share.rows]),
        }  # fmt: skip

    @cached_property
    def _machine(self) -> dict[str, Any]:
        return record.machine(self.clock.on)

    def _scenario(self, task: Task, names: list[str], share: _Share) -> None:
        """Measure one scenario, as often in every process, because they wait for each other."""
        contenders, failed = self._contenders(task, names)
        images = len(self.processes.mine(range(max(self.options.images, self.processes.count))))
        images = max(self.processes.gather(images))
        rounds = max(2, -(-images // task.images))
        quiet = not self.processes.is_main
        calls = len(contenders) * (task.warm + rounds)
        with tqdm(total=calls, unit="call", desc=task.scenario, disable=quiet) as bar:

            def meet(value: Any = None) -> list[Any]:
                bar.update(value is None)
                return self.processes.gather(value)

            found = measured(contenders, task.call, self.clock, task.warm, rounds, meet)
        failed |= found.failed
        if EAGER in failed:
            raise UsageError(f"{task.scenario}: eager itself fails: {failed[EAGER]}")
        rows: list[Row] = []
        for made in [made for made in contenders if made.name in found.times]:
            name = made.name
            set_up = self._set_up(name, task, share)
            did = self._activity(made, task, share)
            rows.append(row(task, made, found.times[name], did, found.apart[name], set_up))
        if not found.finite:
            failed["equality"] = "eager's own result is not finite numbers; nothing is shown by it"
        share.notes += [f"{task.scenario}: {name}: {text}" for name, text in failed.items()]
        share.notes += [f"{task.scenario}: {text}" for text in map(unused, rows) if text]
        share.rows += with_gain(rows)
        for made in contenders:
            made.release()

    def _set_up(self, name: str, task: Task, share: _Share) -> dict[str, Any] | None:
        """Ask fresh processes, one at a time; None where that was not asked for, or failed."""
        found = None
        for turn in range(self.processes.count):
            if turn == self.processes.rank and self.options.set_up == "fresh":
                print(f"set-up of {name} in a fresh process ...", file=sys.stderr)
                try:
                    found = fresh(name, task, self.argv, self.clock.on.index)
                except UsageError as error:
                    share.notes.append(one_line(error))
            self.processes.gather(None)
        return found

    def _activity(self, made: Contender, task: Task, share: _Share) -> Activity | None:
        """Profile one call; None where that failed, as it may for want of memory."""

        def look() -> Activity | None:
            try:
                return activity(made, task.call, self.clock)
            except torch.OutOfMemoryError as error:
                text = f"{task.scenario}: {made.name}: no profile: {one_line(error)}"
                share.notes.append(text)
                return None

        return self.processes.together(look)

    def _contenders(self, task: Task, names: list[str]) -> tuple[list[Contender], dict[str, str]]:
        """Make the contenders, eager first; keep those that every process could make."""
        contenders, failed = [], {}
        for name in names:
            try:
                contenders.append(Contender.of(name, task.model, self.options.enable))
            except (DitGraphError, ValueError, RuntimeError) as error:
                failed[name] = one_line(error)
        for others in self.processes.gather(failed):
            failed = others | failed
        return [made for made in contenders if made.name not in failed], failed


def _choices(options: "BenchOptions") -> dict[str, Any]:
    """Name the choices that decide the numbers."""
    return {
        "what": options.what, "model": options.model or "embedded", "images": options.images,
        "steps": options.steps, "dtype": str(options.dtype).removeprefix("torch."),
        "device": options.device, "latent": options.latent, "set_up": options.set_up,
        "compiled": sorted(set(options.compare) & set(COMPILED)),
    }  # fmt: skip


def _tell(result: dict[str, Any], options: "BenchOptions") -> None:
    """Give the table, the files, the record as the last line, and then charts, which may fail."""
    print(table.markdown(result))
    _write(result, options)
    print(json.dumps(result))
    _draw(result, options)


def _write(result: dict[str, Any], options: "BenchOptions") -> None:
    """Write the files that were asked for, each whole or not at all."""
    name = options.output
    if name == Path():
        return
    for ending, text in (("md", table.markdown(result)), ("json", json.dumps(result, indent=1))):
        path = name.with_name(f"{name.name}.{ending}")
        partial = path.with_name(f".{path.name}.partial")
        with writing(path):
            partial.write_text(text + "\n")
            partial.replace(path)


def _draw(result: dict[str, Any], options: "BenchOptions") -> None:
    """Draw the charts that were asked for."""
    name = options.output
    if name != Path():
        try:
            chart.draw(result, name.with_name(f"{name.name}.png"))
        except (ConfigError, OSError) as error:  # The numbers are there.
            print(f"no {name.name}.png: {one_line(error)}", file=sys.stderr)
    if options.chart is not None:
        with told(f"--chart {options.chart}"):
            chart.draw(result, options.chart)
