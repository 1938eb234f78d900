"""Prefill of real-size LLMs: eager, `breakable` and `full`, by token count.

What the numbers mean. Weights and prompts are random. `ms` is the median wall clock of
`model(input_ids, logits_to_keep=1)` with a new cache, the device idle before and after, variants in
turn in one process. `busy` is the share of eager's wall clock in which the device runs kernels,
from the profiler. `build` is `handle.warmup()` over the default buckets up to `--most`: seconds,
and bytes of graph memory after it. `ragged 8` is a batch of eight prompts of different lengths,
left-padded; its tokens are the padded count. `near` compares logits with eager, relative. `gated`
is `breakable` with the gate as users have it: where a replay does not pay it has turned to eager
before the times are taken (`verdict`).

    python benchmarks/prefill.py --output benchmarks/results/prefill.json

ends in one line of JSON a model. Needs a CUDA device with about 40 GB of free memory; `--tiny` goes
through the same steps with tiny models on the recorder, for which times say nothing.
"""

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import dit_graph

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
RAGGED = (512, 300, 200, 128, 77, 64, 32, 16)
MODELS: dict[str, tuple[type, Any]] = {
    "Qwen3-0.6B": (Qwen3ForCausalLM, Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True)),
    "Qwen3-4B": (Qwen3ForCausalLM, Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True)),
    "Llama-3.1-8B": (LlamaForCausalLM, LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072)),
}  # fmt: skip


def build(name: str, on: str, tiny: bool) -> Any:
    cls, config = MODELS[name]
    config = copy.deepcopy(config)
    if tiny:
        config.update({"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                       "vocab_size": 128, "layer_types": None})  # fmt: skip
        config.layer_types = ["full_attention"] * 2
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    with torch.device(on):
        model = cls(config)
    torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def front_of(model: Any) -> Any:
    """The same weights behind a causal LM and a body of their own."""
    front = copy.copy(model)
    front._modules = dict(model._modules)
    front.model = copy.copy(model.model)
    return front


def wait(on: str) -> None:
    if on != "cpu":
        torch.cuda.synchronize()


def median_ms(fns: dict[str, Callable[[], Any]], on: str, calls: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in fns}
    for turn in range(calls):
        for name in list(fns) if turn % 2 == 0 else list(fns)[::-1]:
            wait(on)
            began = time.perf_counter()
            fns[name]()
            wait(on)
            taken[name].append(1e3 * (time.perf_counter() - began))
    return {name: round(statistics.median(v[2:]), 3) for name, v in taken.items()}


def busy_share(fn: Callable[[], Any], on: str) -> float | None:
    """None without a device."""
    if on == "cpu":
        return None
    fn()
    wait(on)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(5):
            fn()
        wait(on)
    kernels = sum(event.self_device_time_total for event in profiled.key_averages())
    wait(on)
    began = time.perf_counter()
    for _ in range(5):
        fn()
    wait(on)
    return round(kernels * 1e-6 / (time.perf_counter() - began), 3)


def ragged(lengths: tuple[int, ...], vocabulary: int, on: str) -> dict[str, torch.Tensor]:
    longest = max(lengths)
    mask = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, n in enumerate(lengths):
        mask[row, longest - n :] = 1
    tokens = torch.randint(1, vocabulary, mask.shape)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    call = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    return {name: t.to(on) for name, t in call.items()}


def verdict(handle: dit_graph.Handle, seen: set[Any]) -> str:
    """What the gate says of the bucket that came last."""
    (install,) = handle.installs.values()
    assert install.runner is not None
    new = [entry for key, entry in install.runner.entries.items() if key not in seen]
    seen.update(install.runner.entries)
    return "; ".join(entry.verdict for entry in new)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    on, device = ("cpu", "recorder") if args.tiny else ("cuda:0", "cuda")
    model = build(name, on, args.tiny)
    fronts: dict[str, Any] = {"eager": model}
    row: dict[str, Any] = {"model": name, "build": {}, "rows": []}
    handles = {}
    for label in ("breakable", "full", "gated"):
        fronts[label] = front = front_of(model)
        backend, gate = ("breakable", "measure") if label == "gated" else (label, "always")
        handles[label] = handle = dit_graph.enable(
            front, mode="prefill", device=device, backend=backend, max_tokens=args.most,
            verify="off", gate=gate, memory_budget="50%", max_graphs=256,
        )  # fmt: skip
        if label == "gated" or args.no_build:  # records at its first calls
            continue
        wait(on)
        began = time.perf_counter()
        handle.warmup()
        wait(on)
        row["build"][label] = {
            "seconds": round(time.perf_counter() - began, 2),
            "bytes": handle.pool_on(torch.device(on)).bytes, "stats": handle.stats(),
        }  # fmt: skip
    vocabulary = model.config.vocab_size
    calls = {f"{n}": {"input_ids": torch.randint(1, vocabulary, (1, n), device=on)}
             for n in TOKENS if n <= args.most}  # fmt: skip
    lengths = tuple(n for n in RAGGED if n <= args.most)
    calls[f"ragged {len(lengths)} ({max(lengths)})"] = ragged(lengths, vocabulary, on)
    seen: set[Any] = set()
    for label, call in calls.items():
        fns = {k: (lambda m=m, call=call: m(**call, logits_to_keep=1)) for k, m in fronts.items()}
        for fn in list(fns.values())[1:]:
            for _ in range(9):  # what was not warmed up, and the gate's calls
                fn()
                wait(on)
        ms = median_ms(fns, on, args.calls)
        expected = fns["eager"]().logits
        near = {k: float(((fns[k]().logits - expected).abs().max() / expected.abs().max()).item())
                for k in handles}  # fmt: skip
        row["rows"].append({
            "tokens": label, "ms": ms, "busy": busy_share(fns["eager"], on),
            "gain": {k: round(ms["eager"] / ms[k], 2) for k in handles},
            "breakable/full": round(ms["breakable"] / ms["full"], 3), "near": near,
            "verdict": verdict(handles["gated"], seen),
        })  # fmt: skip
    row["stats"] = {k: handle.stats() for k, handle in handles.items()}
    for handle in handles.values():
        handle.disable()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--most", type=int, default=2048, help="the largest bucket")
    parser.add_argument("--calls", type=int, default=12, help="calls a variant and token count")
    parser.add_argument("--no-build", action="store_true", help="do not time the warm-up")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the recorder")
    parser.add_argument("--output", type=Path, help="where the record goes, .json")
    args = parser.parse_args()
    rows = []
    with torch.no_grad():
        for name in args.models:
            rows.append(measure(name, args))
            print(json.dumps(rows[-1]), flush=True)
            gc.collect()
            if args.output:
                from forward import record

                machine = {} if args.tiny else record()
                text = json.dumps({"machine": machine, "rows": rows}, indent=1)
                args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
