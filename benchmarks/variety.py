"""What changing prompts and sizes cost: replay share, time against eager, and memory.

What the numbers mean. `prompts`: fifty prompts of thirty lengths, twenty steps each, on the forward
of Qwen-Image (every length is a signature of its own) and Lumina2 (the length is read inside the
forward: a variant each). Weights and inputs are random. All run under dit_graph with its defaults,
comparison and gate included, and every fifth prompt eagerly as well, right before or after;
`ms a step` is wall clock over whole prompts, recordings included. `sizes`: two hundred random sizes
of SD3.5-M, five steps each, under a memory budget, after each size ran eagerly once (kernels that
are loaded take device memory too). `used MiB` is the device memory in use beside what was there
before, after every twentieth size, unused cache given back first; `reserved MiB` the part of it
that torch's allocator holds; `after disable` is what is left of both in the end.

    python benchmarks/variety.py --output benchmarks/results/variety.json

ends in one line of JSON a case. Needs a CUDA device with about 70 GB of free memory.
"""

import argparse
import copy
import functools
import gc
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forward import DEVICE, MODELS, Call, build, equal, full, noise, record, sd35_medium
from host import qwen_image

import dit_graph

MIB = 1 << 20
LENGTHS = [17 + 7 * i for i in range(30)]


def lumina2(width: int = 512, height: int = 512, tokens: int = 64) -> Call:
    mask = torch.zeros(1, 256, device=DEVICE, dtype=torch.bool)
    mask[:, :tokens] = True
    return {"hidden_states": noise(1, 16, height // 8, width // 8), "timestep": full(0.5),
            "encoder_hidden_states": noise(1, 256, 2304), "encoder_attention_mask": mask,
            "return_dict": False}  # fmt: skip


PROMPTS: dict[str, tuple[str, dict[str, Any], Callable[..., Call]]] = {
    "Lumina2 512": ("Lumina2Transformer2DModel", {"cap_feat_dim": 2304}, lumina2),
    "Qwen-Image 512": ("QwenImageTransformer2DModel", {"num_layers": 60}, qwen_image),
}


def prompts(name: str, count: int = 50, steps: int = 20) -> dict[str, Any]:
    cls, config, inputs = PROMPTS[name]
    module = build(cls, **config)
    front = copy.copy(module)
    handle = dit_graph.enable(front, device="cuda")
    choose = random.Random(0)
    lengths = [*LENGTHS, *(choose.choice(LENGTHS) for _ in range(count - len(LENGTHS)))]
    choose.shuffle(lengths)
    seconds: dict[str, list[float]] = {"eager": [], "graphs": []}
    same = True
    for i, tokens in enumerate(lengths):
        call = inputs(tokens=tokens)
        latents = [torch.randn_like(call["hidden_states"]) for _ in range(steps)]
        results = {}
        both = ("eager", "graphs") if i % 2 else ("graphs", "eager")
        for label in both if i % 5 == 0 else ("graphs",):
            if label == "graphs":
                handle.new_picture()
            fn = module if label == "eager" else front
            torch.cuda.synchronize()
            began = time.perf_counter()
            for step in latents:
                results[label] = fn(**call | {"hidden_states": step})
            torch.cuda.synchronize()
            seconds[label].append(time.perf_counter() - began)
        same = same and ("eager" not in results or equal(*results.values()))
    stats = handle.stats()
    row = {
        "case": f"prompts {name}", "prompts": count, "lengths": len(set(lengths)), "steps": steps,
        "ms a step": {k: round(1e3 * sum(v) / len(v) / steps, 2) for k, v in seconds.items()},
        "eager prompts": len(seconds["eager"]), "equal": same,
        "replay share": round(stats["replays"] / stats["calls"], 3), "stats": stats,
        "graph MiB": round(handle.pool_on(DEVICE).bytes / MIB, 1),
    }  # fmt: skip
    handle.disable()
    return row


def used() -> tuple[float, float]:
    """MiB in use on the device, and held by torch's allocator."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB, torch.cuda.memory_reserved() / MIB


def sizes(count: int = 200, steps: int = 5, budget: int = 512 * MIB) -> dict[str, Any]:
    cls, config, _ = MODELS["SD3.5-M 512"]
    module = build(cls, **config)
    twin = copy.copy(module)
    choose, sides = random.Random(0), [16 * n for n in range(16, 65)]
    chosen = choose.sample([(w, h) for w in sides for h in sides], count)
    for width, height in [*chosen, (1024, 1024)]:
        twin(**sd35_medium(width, height))
    before = used()
    handle = dit_graph.enable(module, device="cuda", memory_budget=budget, gate="always")
    handle.new_picture()
    grown, same = [], True
    for i, size in enumerate(chosen, 1):
        call = sd35_medium(*size)
        for _ in range(steps):
            result = module(**call)
        same = same and equal(result, twin(**call))
        if i % 20 == 0:
            grown.append(used())
    row: dict[str, Any] = {
        "case": "sizes SD3.5-M", "sizes": count, "budget MiB": budget // MIB,
        "used MiB": [round(device - before[0], 1) for device, _ in grown],
        "reserved MiB": [round(reserved - before[1], 1) for _, reserved in grown],
        "equal": same, "stats": handle.stats(),
    }  # fmt: skip
    handle.disable()
    del result, call
    row["after disable MiB"] = [round(now - then, 2) for now, then in zip(used(), before)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = {"sizes": sizes} | {name: functools.partial(prompts, name) for name in PROMPTS}
    parser.add_argument("--cases", nargs="+", default=list(known), choices=list(known))
    parser.add_argument("--output", type=Path, help="where the record goes, .json")
    args = parser.parse_args()
    rows = []
    with torch.no_grad():
        for case in args.cases:
            rows.append(known[case]())
            print(json.dumps(rows[-1]), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            if args.output:
                text = json.dumps({"machine": record(), "rows": rows}, indent=1)
                args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
