"""Host time of a replayed step, and an isolated one against a bare graph, for three real-size DiTs.

What the numbers mean. Median microseconds on the host from the call to its return, the device idle
before each: how long the pipeline's Python is held up. `step` is a replayed call, `empty step` the
same without the graph launch: dit_graph's own work. `launch` is a bare graph with its copies.
`compare` is one comparison of the module's whole state. `isolated` and `isolated bare` are from the
call to the end of the device's work, in turns: what a step takes that waits for the one before, and
what the smallest thing takes that could work.

    python benchmarks/host.py --output benchmarks/results/host.json

ends in one line of JSON a model. Needs a CUDA device with about 60 GB of free memory. To compare
with another version put its `dit_graph` first on PYTHONPATH.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forward import DEVICE, MODELS, Bare, Call, build, full, noise, record

import dit_graph


def qwen_image(width: int = 512, height: int = 512, tokens: int = 64) -> Call:
    rows, columns = height // 16, width // 16
    return {"hidden_states": noise(1, rows * columns, 64),
            "encoder_hidden_states": noise(1, tokens, 3584),
            "encoder_hidden_states_mask": torch.ones(1, tokens, device=DEVICE, dtype=torch.bool),
            "timestep": full(0.5), "img_shapes": [[(1, rows, columns)]],
            "return_dict": False}  # fmt: skip


CASES: dict[str, tuple[str, dict[str, Any], Callable[..., Call]]] = {
    "DiT-XL/2 256": MODELS["DiT-XL/2 256"],
    "Flux 1024": MODELS["Flux 1024"],
    "Qwen-Image 512": ("QwenImageTransformer2DModel", {"num_layers": 60}, qwen_image),
}


def plain_options() -> dict[str, Any]:
    """Replays only, in versions that have more."""
    known = {field.name for field in dataclasses.fields(dit_graph.GraphConfig)}
    return {k: v for k, v in {"verify": "off", "gate": "always"}.items() if k in known}


def median_us(call: Callable[[], Any]) -> float:
    taken = []
    for _ in range(100):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return round(statistics.median(taken) * 1e6, 1)


def bare_graph(module: torch.nn.Module, call: Call) -> Bare | None:
    """None where one graph cannot hold the forward: Qwen-Image copies from the host in it."""
    try:
        return Bare(module, call)
    except RuntimeError:
        torch.cuda.synchronize()
        return None


def isolated_us(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """In turns, each from an idle device to an idle device."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(100):
        for name, call in calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            taken[name].append(time.perf_counter() - began)
    return {name: round(statistics.median(times) * 1e6, 1) for name, times in taken.items()}


def measure(name: str) -> dict[str, Any]:
    cls, config, inputs = CASES[name]
    module, call = build(cls, **config), inputs()
    bare = bare_graph(module, call)
    row: dict[str, Any] = {"model": name}
    if bare is not None:
        row["launch"] = median_us(lambda: bare(**call))
    handle = dit_graph.enable(module, device="cuda", **plain_options())
    for _ in range(4):
        module(**call)
    (install,) = handle.installs.values()
    (entry,) = (e for e in install.runner.entries.values() if e.tapes)
    for label in ("", "empty "):
        steps = entry.tapes[0].steps
        if label:
            entry.tapes[0].steps = []
        row[f"{label}step"] = median_us(lambda: module(**call))
        entry.tapes[0].steps = steps
    calls: dict[str, Callable[[], Any]] = {"isolated": lambda: module(**call)}
    if bare is not None:
        calls["isolated bare"] = lambda: bare(**call)
    row |= isolated_us(calls)
    row["compare"] = median_us(install.runner.target.state.compare)
    row["equal"] = torch.equal(module(**call)[0], install._original(**call)[0])
    row["stats"] = handle.stats()
    handle.disable()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--output", type=Path, help="where the record goes, .json")
    args = parser.parse_args()
    rows = []
    with torch.no_grad():
        for name in args.models:
            rows.append(measure(name))
            print(json.dumps(rows[-1]), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    if args.output:
        args.output.write_text(json.dumps({"machine": record(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
