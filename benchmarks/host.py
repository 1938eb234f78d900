"""Host time of a replayed step and of a picture's first step, for three real-size DiTs.

What the numbers mean. Median microseconds on the host from the call to its return, the device idle
before each: how long the pipeline's Python is held up. `step` is a step inside a picture, `first`
the first step of one, in which the module's whole state is compared. `empty step` and `empty first`
leave the graph launch out: what is left is dit_graph's own work. `launch` is a bare graph with its
copies.

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


def median_us(call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    taken = []
    for _ in range(100):
        before()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return round(statistics.median(taken) * 1e6, 1)


def launch(module: torch.nn.Module, call: Call) -> float | None:
    """None where one graph cannot hold the forward: Qwen-Image copies from the host in it."""
    try:
        bare = Bare(module, call)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return median_us(lambda: bare(**call))


def measure(name: str) -> dict[str, Any]:
    cls, config, inputs = CASES[name]
    module, call = build(cls, **config), inputs()
    row: dict[str, Any] = {"model": name, "launch": launch(module, call)}
    handle = dit_graph.enable(module, device="cuda", **plain_options())
    handle.new_picture()
    for _ in range(4):
        module(**call)
    (install,) = handle.installs.values()
    (entry,) = (e for e in install.runner.entries.values() if e.tapes)
    for label in ("", "empty "):
        steps = entry.tapes[0].steps
        if label:
            entry.tapes[0].steps = []
        row[f"{label}step"] = median_us(lambda: module(**call))
        row[f"{label}first"] = median_us(lambda: module(**call), handle.new_picture)
        entry.tapes[0].steps = steps
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
