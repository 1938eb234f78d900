"""One denoising step of four real-size DiTs: eager, one bare graph, and dit_graph's backends.

What the numbers mean. Weights and inputs are random: speed does not depend on them. All variants of
a model share one set of weights and one process, and take turns, so that the host's mood hits all
of them alike; `ms` is the median over rounds of device time a call, events around a run of calls.
`bare` is the smallest thing that could work: one `torch.cuda.CUDAGraph`, inputs copied in, output
cloned. `bytes` is what the private pool holds. `equal` compares with eager on new inputs, bit for
bit. `host_us` is the runner's own time in a replayed call, graph launches left out.

    python benchmarks/forward.py --output benchmarks/results/forward.json

ends in one line of JSON a model. Needs a CUDA device with about 40 GB of free memory.
"""

import argparse
import copy
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

import dit_graph

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
Call = dict[str, Any]


def build(name: str, **config: Any) -> torch.nn.Module:
    cls = getattr(diffusers, name)  # what it imports is no part of the model
    torch.manual_seed(0)
    torch.set_default_dtype(DTYPE)
    with DEVICE:
        module = cls(**config)
    torch.set_default_dtype(torch.float32)
    return module.to(DEVICE, DTYPE).eval().requires_grad_(False)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def full(value: float, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.full((1,), value, device=DEVICE, dtype=dtype)


def dit_xl_2(width: int = 256, height: int = 256) -> Call:
    label = torch.zeros(1, dtype=torch.long, device=DEVICE)
    step = full(500, torch.long)
    return {"hidden_states": noise(1, 4, height // 8, width // 8), "timestep": step,
            "class_labels": label, "return_dict": False}  # fmt: skip


def sd35_medium(width: int = 512, height: int = 512) -> Call:
    return {"hidden_states": noise(1, 16, height // 8, width // 8),
            "encoder_hidden_states": noise(1, 333, 4096), "pooled_projections": noise(1, 2048),
            "timestep": full(500), "return_dict": False}  # fmt: skip


def z_image(width: int = 512, height: int = 512) -> Call:
    return {"x": [noise(16, 1, height // 8, width // 8)], "t": full(0.5),
            "cap_feats": [noise(77, 2560)], "return_dict": False}  # fmt: skip


def flux(width: int = 1024, height: int = 1024) -> Call:
    rows, columns = height // 16, width // 16
    ids = torch.zeros(rows, columns, 3, device=DEVICE, dtype=DTYPE)
    ids[..., 1] += torch.arange(rows, device=DEVICE)[:, None]
    ids[..., 2] += torch.arange(columns, device=DEVICE)[None]
    return {"hidden_states": noise(1, rows * columns, 64),
            "encoder_hidden_states": noise(1, 512, 4096), "pooled_projections": noise(1, 768),
            "timestep": full(0.5), "img_ids": ids.reshape(-1, 3),
            "txt_ids": torch.zeros(512, 3, device=DEVICE, dtype=DTYPE),
            "guidance": full(3.5, torch.float32), "return_dict": False}  # fmt: skip


MODELS: dict[str, tuple[str, dict[str, Any], Callable[..., Call]]] = {
    "DiT-XL/2 256": ("DiTTransformer2DModel", {
        "num_attention_heads": 16, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8,
        "num_layers": 28, "sample_size": 32, "patch_size": 2, "attention_bias": True,
        "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_zero", "norm_elementwise_affine": False}, dit_xl_2),
    "SD3.5-M 512": ("SD3Transformer2DModel", {
        "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 24,
        "attention_head_dim": 64, "num_attention_heads": 24, "joint_attention_dim": 4096,
        "caption_projection_dim": 1536, "pooled_projection_dim": 2048, "out_channels": 16,
        "pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13)),
        "qk_norm": "rms_norm"}, sd35_medium),
    "Z-Image 512": ("ZImageTransformer2DModel", {}, z_image),
    "Flux 1024": ("FluxTransformer2DModel", {"guidance_embeds": True}, flux),
}  # fmt: skip


class Bare:
    """One graph of the whole forward with its inputs and its output, and nothing else."""

    def __init__(self, module: torch.nn.Module, call: Call) -> None:
        self._flatten = torch.utils._pytree.tree_flatten
        leaves, spec = self._flatten(call)
        self._static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        static = torch.utils._pytree.tree_unflatten(self._static, spec)
        self.pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                module(**static)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=self.pool, stream=stream):
            self._out = module(**static)

    def __call__(self, **call: Any) -> Any:
        for static, leaf in zip(self._static, self._flatten(call)[0]):
            if isinstance(leaf, torch.Tensor):
                static.copy_(leaf)
        self._graph.replay()
        clone = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, self._out)
        return clone

    @property
    def bytes(self) -> int:
        return sum(
            s["total_size"] for s in torch.cuda.memory_snapshot()
            if tuple(s["segment_pool_id"]) == tuple(self.pool)
        )  # fmt: skip


def timed(fn: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Milliseconds a call: device (events) and wall."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    start.record()
    for _ in range(calls):
        fn()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls, (time.perf_counter() - began) / calls * 1e3


def equal(a: Any, b: Any) -> bool:
    leaves = [torch.utils._pytree.tree_leaves(t) for t in (a, b)]
    return all(torch.equal(x, y) for x, y in zip(*leaves))


def graphed(
    module: torch.nn.Module, call: Call, **options: Any
) -> tuple[Any, dit_graph.Handle, float]:
    """A second front of the same weights under dit_graph, recorded; seconds of the capture."""
    front = copy.copy(module)
    handle = dit_graph.enable(front, device="cuda", verify="off", gate="always", **options)
    handle.new_picture()
    front(**call)
    torch.cuda.synchronize()
    began = time.perf_counter()
    front(**call)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    front(**call)
    return front, handle, seconds


def pool_bytes(handle: dit_graph.Handle) -> int:
    return handle.pool_on(torch.device("cuda:0")).bytes


def segments(handle: dit_graph.Handle) -> str:
    lines = [line.strip() for line in handle.report().splitlines() if "segments" in line]
    return lines[0] if lines else "none"


def measure(name: str, rounds: int, calls: int) -> dict[str, Any]:
    cls, config, inputs = MODELS[name]
    module, call = build(cls, **config), inputs()
    row: dict[str, Any] = {"model": name}
    variants: dict[str, Callable[..., Any]] = {"eager": module}
    variants["bare"] = bare = Bare(module, call)
    row["bytes"] = {"bare": bare.bytes}
    row["capture_s"], handles = {}, {}
    for label, options in {
        "full": {"backend": "full"},
        "breakable": {},
        "attention": {"breaks": ("scaled_dot_product_attention",)},
    }.items():
        front, handle, seconds = graphed(module, call, **options)
        variants[label], handles[label] = front, handle
        row["capture_s"][label] = round(seconds, 3)
        row["bytes"][label] = pool_bytes(handle)
    fresh = inputs()
    expected = module(**fresh)
    row["equal"] = {k: equal(fn(**fresh), expected) for k, fn in variants.items() if k != "eager"}
    row["stats"] = {k: h.stats() for k, h in handles.items()}
    row["segments"] = {k: segments(h) for k, h in handles.items()}
    times: dict[str, list[tuple[float, float]]] = {k: [] for k in variants}
    order = list(variants)
    for turn in range(rounds):
        for label in order if turn % 2 == 0 else order[::-1]:
            fn = variants[label]
            fn(**call)
            times[label].append(timed(lambda fn=fn: fn(**call), calls))
    row["ms"] = {k: round(statistics.median(t[0] for t in v), 3) for k, v in times.items()}
    row["wall_ms"] = {k: round(statistics.median(t[1] for t in v), 3) for k, v in times.items()}
    row["ratio"] = {
        "full/bare": round(row["ms"]["full"] / row["ms"]["bare"], 4),
        "breakable/bare": round(row["ms"]["breakable"] / row["ms"]["bare"], 4),
        "attention/breakable": round(row["ms"]["attention"] / row["ms"]["breakable"], 4),
        "bytes breakable/full": round(row["bytes"]["breakable"] / max(row["bytes"]["full"], 1), 4),
        "bytes attention/full": round(row["bytes"]["attention"] / max(row["bytes"]["full"], 1), 4),
    }
    row["host_us"] = host_time(variants["breakable"], handles["breakable"], bare, call)
    for handle in handles.values():
        handle.disable()
    if name.startswith("Flux"):
        row["eight sizes"] = eight_sizes(module)
    return row


def host_time(
    front: Any, handle: dit_graph.Handle, bare: Any, call: Call, calls: int = 200
) -> dict[str, Any]:
    """Median microseconds on the host: whole calls, then the runner alone, then its parts.

    `runner alone` is a replayed call whose tape has no steps: everything but the graph launches. In
    a whole call the clone also waits for room behind the launched graph, as it does in `bare call`.
    """
    (install,) = handle.installs.values()
    runner = install.runner
    (entry,) = (e for e in runner.entries.values() if e.tapes)
    tape = entry.tapes[0]

    def median(fn: Callable[[], Any]) -> float:
        taken = []
        for _ in range(calls):
            torch.cuda.synchronize()
            began = time.perf_counter()
            fn()
            taken.append(time.perf_counter() - began)
        return round(statistics.median(taken) * 1e6, 1)

    whole = median(lambda: front(**call))
    steps, tape.steps = tape.steps, []
    alone = median(lambda: front(**call))
    tape.steps = steps
    bound = runner.target.signature.bind((), call)

    def locked() -> None:
        with runner.pool.using():
            pass

    return {
        "bare call": median(lambda: bare(**call)),
        "call": whole,
        "runner alone": alone,
        "bind and key": median(lambda: runner.target.signature.bind((), call)),
        "decide": median(lambda: runner._decide(bound)),
        "copy in": median(lambda: entry.static.copy_in(bound.tensors)),
        "result clone": median(lambda: tape.result(bound.tensors)),
        "lock and stream order": median(locked),
    }


def eight_sizes(module: torch.nn.Module) -> dict[str, Any]:
    """Graph bytes of the largest size alone and of all eight, largest first."""
    sizes = [(1024, 1024), (1152, 896), (896, 1088), (1024, 768), (768, 896), (768, 768),
             (640, 768), (512, 512)]  # fmt: skip
    front = copy.copy(module)
    handle = dit_graph.enable(front, device="cuda", verify="off", gate="always")
    handle.new_picture()
    held = []
    for width, height in sizes:
        call = flux(width, height)
        for _ in range(3):
            front(**call)
        held.append(pool_bytes(handle))
    assert handle.stats()["replays"] == len(sizes), handle.report()
    handle.disable()
    return {"bytes": held, "ratio": round(held[-1] / held[0], 4)}


def record() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    return {"gpu": torch.cuda.get_device_name(), "cpu": cpu, "python": platform.python_version(),
            "torch": torch.__version__, "cuda": torch.version.cuda,
            "diffusers": diffusers.__version__, "dit_graph": dit_graph.__version__}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--calls", type=int, default=15, help="calls a round and variant")
    parser.add_argument("--output", type=Path, help="where the record goes, .json")
    args = parser.parse_args()
    rows = []
    with torch.no_grad():
        for name in args.models:
            rows.append(measure(name, args.rounds, args.calls))
            print(json.dumps(rows[-1]), flush=True)
            if args.output:  # after each model, so that a run that is stopped leaves its rows
                text = json.dumps({"machine": record(), "rows": rows}, indent=1)
                args.output.write_text(text + "\n")
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
