"""Tiny causal LMs whose prefill is recorded, their eager twins, and how near both must be."""

import copy
from typing import Any

import torch
import transformers
from transformers import StaticCache

import dit_graph
from tests.pair import PLAIN, Machine

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
HEAD = {"head_dim": 8}
SLIDING = {"sliding_window": 6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", HEAD),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", HEAD),
    "Mistral sliding": ("Mistral", HEAD | SLIDING),
    "Phi3": ("Phi3", {}),
    "Gemma": ("Gemma", HEAD),
    "Gemma2 sliding": ("Gemma2", HEAD | SLIDING),
    "Gemma3 sliding": ("Gemma3Text", HEAD | SLIDING | {
        "layer_types": ["sliding_attention", "full_attention"]}),
    "Qwen3 MoE": ("Qwen3Moe", HEAD | {
        "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}),
    "Mixtral MoE": ("Mixtral", HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
FIRST = ["Llama", "Qwen3", "Gemma", "Qwen3 MoE"]
BUCKETS = (2, 4, 8, 16)


def build(name: str, machine: Machine, **more: Any) -> Any:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**SIZES | config | more)
    head = "Gemma3ForCausalLM" if kind == "Gemma3Text" else f"{kind}ForCausalLM"
    return getattr(transformers, head)(made).to(machine.on).eval().requires_grad_(False)


def two(name: str, machine: Machine, **options: Any) -> tuple[Any, Any, dit_graph.Handle]:
    """A model whose prefill is recorded, its eager twin, and the handle."""
    model = build(name, machine)
    twin = copy.deepcopy(model)
    options = {"buckets": BUCKETS} | PLAIN | options
    return model, twin, dit_graph.enable(model, mode="prefill", device=machine.device, **options)


def ids(machine: Machine, seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 128, shape, generator=generator).to(machine.on)


def near(a: torch.Tensor, b: torch.Tensor, bound: float = 1e-5) -> bool:
    return bool((a - b).abs().max() <= bound * b.abs().max())


def static_cache(model: Any, fill: float) -> Any:
    """Slots for 24 tokens, all of them filled, as if other requests had used them."""
    cache = StaticCache(config=model.config, max_cache_len=24)
    head = getattr(model.config, "head_dim", None) or 8
    cache.early_initialization(
        batch_size=1, num_heads=2, head_dim=head, dtype=model.dtype, device=model.device
    )
    for layer in cache.layers:
        layer.keys.fill_(fill)
        layer.values.fill_(fill)
    return cache


def eager_reason(handle: dit_graph.Handle) -> str:
    (reason,) = handle.stats()["eager"]
    return str(reason)
