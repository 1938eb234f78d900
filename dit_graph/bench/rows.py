"""Makes a row of the numbers of one contender in one scenario, and one of several processes' rows.

Names follow diffusers' own benchmark where they mean the same (`scenario`, `model_cls`,
`num_params_B`, `time_s`, `mem_GB`, `github_sha`).

A step's milliseconds are a call's over its steps, all else that it does included, and their
percentiles are those of calls. `first_s` is the time to the first result, enabling or compiling
included; `set_up_s` is what the first calls took more than later ones. `mem_GB` is what torch
reserved in a fresh process, `allocated_GB` the most that it had allocated in this one while the
contender ran, with the weights that all share.
"""

from collections.abc import Sequence
from typing import Any

from dit_graph.bench.contenders import EAGER, Contender
from dit_graph.bench.measure import Activity, Apart, Times, break_even, first_and_set_up, percentile
from dit_graph.bench.tasks import Task

Row = dict[str, Any]


def row(
    task: Task, made: Contender, times: Times, did: Activity | None, apart: Apart,
    set_up: dict[str, Any] | None,
) -> Row:  # fmt: skip
    """Make one contender's row; numbers that were not measured are None.

    `apart` is from eager's result. Without `set_up`, which a fresh process finds, the first calls
    of this one count.
    """
    wall, steps = percentile(times.wall, 0.5), task.steps
    first, extra = _first_and_extra(made, times, wall, set_up)
    return {
        "scenario": task.scenario,
        "model_cls": type(task.repeated).__name__,
        "num_params_B": round(sum(p.numel() for p in task.repeated.parameters()) / 1e9, 3),
        "tokens": task.tokens,
        "mode": made.name,
        "processes": 1,
        "images_per_s": round(task.images / wall, 4),
        "time_s": round(wall, 6),
        "step_ms_p50": round(wall / steps * 1e3, 3),
        "step_ms_p95": round(percentile(times.wall, 0.95) / steps * 1e3, 3),
        "device_s": round(percentile(times.device, 0.5), 6) if times.device else None,
        "gpu_busy_s": round(did.busy, 6) if did else None,
        "gpu_busy": round(did.busy / wall, 3) if did else None,
        "kernels_per_step": round(did.kernels / steps, 1) if did else None,
        "launches_per_step": round(did.launches / steps, 1) if did else None,
        "set_up_s": round(extra, 3),
        "first_s": round(first, 3),
        "mem_GB": None if set_up is None else set_up["mem_GB"],
        "allocated_GB": None if times.peak is None else round(times.peak / 1e9, 2),
        "graph_MiB": _graph_memory(made, times),
        "equal": apart.equal,
        "difference": apart.most,
        "images": task.images,
        "gain": None,
        "break_even_images": None,
        "set_up": "fresh process" if set_up else "this process, kernels warm",
        "stats": made.handle.stats() if made.handle is not None else None,
    }


def _first_and_extra(
    made: Contender, times: Times, wall: float, set_up: dict[str, Any] | None
) -> tuple[float, float]:
    if set_up is not None:
        return set_up["first_s"], set_up["set_up_s"]
    if made.name == EAGER:  # With warm kernels it has nothing to set up.
        return wall, 0.0
    return first_and_set_up(times.made, times.warm, wall)


def _graph_memory(made: Contender, times: Times) -> float | None:
    """Sum up the MiB of recordings on the device; None without recordings or without a device."""
    if made.handle is None or not times.device:
        return None
    runners = [install.runner for install in made.handle.installs.values()]
    pools = {id(runner.pool): runner.pool.bytes for runner in runners if runner is not None}
    return round(float(sum(pools.values())) / 2**20, 1)


def unused(row: Row) -> str:
    """Say that a row of graphs has replayed nothing, and why; empty where it has."""
    stats = row["stats"]
    if stats is None or stats["replays"]:
        return ""
    reasons = "; ".join(stats["eager"]) or "too few calls"
    return f"{row['mode']} replayed nothing ({reasons}): its times are those without graphs"


def with_gain(rows: list[Row]) -> list[Row]:
    """Add to each row its gain over eager of its scenario, and from which picture on it pays.

    No gain without a device, on which alone it says anything. It pays "never" where later pictures
    take no less time; it is not known (None) where the two set-ups were not taken alike.
    """
    for row in rows:
        of_eager = (r for r in rows if (r["scenario"], r["mode"]) == (row["scenario"], EAGER))
        eager = next(of_eager, row)
        row["break_even_images"] = None
        on_device = row is not eager and row["device_s"] is not None
        row["gain"] = round(eager["time_s"] / row["time_s"], 3) if on_device else None
        if on_device and row["set_up"] == eager["set_up"]:
            calls = break_even(row["set_up_s"], row["time_s"], eager["set_up_s"], eager["time_s"])
            pays = "never" if calls is None else (calls - 1) * row["images"] + 1
            row["break_even_images"] = pays
    return rows


_LARGEST = (
    "time_s", "step_ms_p50", "step_ms_p95", "device_s", "mem_GB", "allocated_GB", "graph_MiB",
    "difference", "set_up_s", "first_s",
)  # fmt: skip


def merged(of_processes: Sequence[Sequence[Row]]) -> list[Row]:
    """Make one row of each scenario and contender that every process measured.

    Throughput adds up, and of times and bytes the largest stands, because all wait for the slowest;
    counts on the device are the first process's.
    """
    keys = [{(row["scenario"], row["mode"]) for row in rows} for rows in of_processes]
    common = set.intersection(*keys)
    found = []
    for first in of_processes[0]:
        key = first["scenario"], first["mode"]
        if key not in common:
            continue
        same = [r for rows in of_processes for r in rows if (r["scenario"], r["mode"]) == key]
        out = {**first, "processes": len(same), "equal": all(row["equal"] for row in same)}
        out["images_per_s"] = round(sum(row["images_per_s"] for row in same), 4)
        for name in _LARGEST:
            known = [row[name] for row in same if row[name] is not None]
            out[name] = max(known) if len(known) == len(same) else None
        out["stats"] = [row["stats"] for row in same] if len(same) > 1 else first["stats"]
        found.append(out)
    return with_gain(found)
