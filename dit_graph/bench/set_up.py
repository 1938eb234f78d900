"""Takes what a contender's first pictures cost more than later ones, in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dit_graph.bench.contenders import Contender
from dit_graph.bench.measure import Clock, first_and_set_up, percentile
from dit_graph.bench.tasks import Task, tasks
from dit_graph.cli.errors import UsageError, told

if TYPE_CHECKING:
    from dit_graph.bench.options import BenchOptions

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Inductor's first run sets both, so a fresh process must be given its own."""
_RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def fresh(name: str, task: Task, argv: Sequence[str] | None, gpu: int | None) -> dict[str, Any]:
    """Run `alone` in a new process, on this process's GPU and with an empty compiler cache.

    Raises:
        UsageError: the process failed.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    command = [sys.executable, "-m", "dit_graph.bench", *given]
    command += ["--set-up-of", name, "--set-up-scenario", task.scenario]
    environment = {k: v for k, v in os.environ.items() if k not in _RANKS}
    if gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    with tempfile.TemporaryDirectory() as empty:  # A compiler starts as on a new host.
        environment |= {name: f"{empty}/{name}" for name in _CACHES}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise UsageError(f"{task.scenario}: the process for {name}'s set-up failed: {last}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def alone(options: "BenchOptions", name: str, clock: Clock) -> dict[str, Any]:
    """Take the seconds until the first picture is there and those of set-up, and torch's GB.

    Both go by the clock of this process, which draws, so that no other clock is subtracted.
    """
    found = (task for task in tasks(options, clock.on) if task.scenario == options.scenario)
    task = next(found, None)
    if task is None:
        raise UsageError(f"no scenario {options.scenario!r}")
    with told(f"setting up {name}"):
        made = Contender.of(name, task.model, options.enable)

        def call() -> Any:
            made.before_call()
            return task.call(made)

        spent = [clock(call)[1] for _ in range(task.warm + 2)]
    later = percentile(spent[task.warm :], 0.5)
    first, set_up = first_and_set_up(made.seconds, spent[: task.warm], later)
    peak = torch.cuda.max_memory_reserved(clock.on) / 1e9 if clock.cuda else None
    return {
        "first_s": first,
        "set_up_s": set_up,
        "mem_GB": None if peak is None else round(peak, 2),
    }
