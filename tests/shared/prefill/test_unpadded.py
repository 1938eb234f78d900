"""Bodies that padding would change, which are found and never padded."""

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

import dit_graph
from dit_graph.modes.prefill.apart import apart
from tests.pair import PLAIN, Machine
from tests.shared.prefill.models import (
    HEAD,
    SIZES,
    SLIDING,
    build,
    ids,
    near,
)


def unlike(
    machine: Machine,
    kind: str,
    calls: list[dict[str, Any]],
    backend: str = "breakable",
    **config: Any,
) -> str:
    """A model that is not padded: equal to its twin in every call; the reason that is counted."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**config)
    model = getattr(transformers, f"{kind}ForCausalLM")(made).to(machine.on).eval()
    model.requires_grad_(False)
    twin = copy.deepcopy(model)
    options = PLAIN | {"buckets": (8, 16), "backend": backend}
    handle = dit_graph.enable(model, mode="prefill", device=machine.device, **options)
    for call in calls:
        out, expected = model(**call), twin(**call)
        assert torch.equal(out.logits, expected.logits)
        mine, its = out.past_key_values, expected.past_key_values
        if its is not None:
            assert mine.get_seq_length() == its.get_seq_length()
            for a, b in zip(mine.layers, its.layers):
                assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    stats = handle.stats()
    assert stats["replays"] == 0 and stats["captures"] == 0
    return " ".join(stats["eager"])


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("DiffLlama", SIZES | HEAD),  # what is cached is not what attention gets
        ("GptOss", SIZES | HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_a_body_that_padding_would_change_is_never_padded(
    machine: Machine, kind: str, config: dict[str, Any]
) -> None:
    """The plain forward answers the first call of a kind, and the padded one must come near it."""
    calls = [{"input_ids": ids(machine, n, 1, n)} for n in (7, 7, 7, 8, 12)]
    reason = unlike(machine, kind, calls, **config)
    assert "of the plain forward" in reason or "it cannot be padded" in reason, reason


def test_a_cache_that_would_get_other_values(machine: Machine) -> None:
    """Attention in the graph gets DiffLlama's values after they were cached: they alone differ."""
    calls = [{"input_ids": ids(machine, n, 1, n)} for n in (7, 7, 7, 8)]
    reason = unlike(machine, "DiffLlama", calls, "full", **SIZES | HEAD)
    assert "values of layer" in reason, reason


DEEPSEEK = SIZES | {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def test_a_cache_of_something_else_under_a_mask(machine: Machine) -> None:
    """DeepSeek caches the latent: its decode steps could not go on from keys and values."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7], device=machine.on)
    calls = [{"input_ids": ids(machine, n, 2, 7), "attention_mask": mask} for n in range(4)]
    reason = unlike(machine, "DeepseekV3", calls, **DEEPSEEK)
    assert "keys of layer 0" in reason, reason


@pytest.mark.parametrize("static", [False, True])
def test_tokens_that_a_mask_leaves_out_do_not_count(machine: Machine, static: bool) -> None:
    """Nobody reads them, and kernels differ in what they make of rows that see nothing."""
    config = build("Llama", machine).config

    def cached(change: tuple[int, float]) -> Any:
        """Five tokens in the cache already, and two new ones."""
        cache = StaticCache(config=config, max_cache_len=12) if static else DynamicCache()
        states = torch.ones(2, 2, 7, 8, device=machine.on)
        states[0, :, change[0]] += change[1]
        cache.update(states, states, 0)
        return cache

    mask = torch.ones(2, 7, dtype=torch.long, device=machine.on)
    mask[0, [0, 5]] = 0
    h = torch.ones(2, 2, 4, device=machine.on)
    other = h.clone()
    other[0, 0] = float("nan")
    assert apart(other, h, mask, None, None) == ""
    other[1, 0] = 2.0
    assert apart(other, h, mask, None, None).startswith("its hidden states")
    assert apart(h, h, mask, cached((0, 1.0)), cached((0, 0.0))) == ""
    assert apart(h, h, mask, cached((5, 1.0)), cached((5, 0.0))) == ""
    assert apart(h, h, mask, cached((6, 1.0)), cached((6, 0.0))).startswith("its keys of layer 0")
    assert apart(h, h, mask, cached((1, 1.0)), cached((1, 0.0))).startswith("its keys of layer 0")
    if static:
        mine, its = cached((0, 0.0)), cached((0, 0.0))
        mine.layers[0].keys[:, :, 9] = 1.0  # where no token is yet
        assert apart(h, h, mask, mine, its).startswith("its keys of layer 0")


def restarting(machine: Machine, n: int, second: int) -> torch.Tensor:
    """The positions of two prompts in one row."""
    return torch.cat([torch.arange(second), torch.arange(n - second)])[None].to(machine.on)


@pytest.mark.parametrize("what", ["window", "packed"])
def test_what_shows_only_later_is_proven_then(machine: Machine, what: str) -> None:
    """The masks that the config stands for are not the body's: prompts up to the window say
    nothing of that, nor those whose positions rise."""
    torch.manual_seed(0)
    if what == "window":
        config = SIZES | HEAD | SLIDING | {"layer_types": ["full_attention"] * 2}
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**config))
        calls = [{"input_ids": ids(machine, i, 1, n)} for i, n in enumerate((5, 5, 6, 8, 7, 8, 12))]
    else:
        config = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
        model = transformers.BioGptForCausalLM(transformers.BioGptConfig(**config))
        calls = [
            {"input_ids": ids(machine, i, 1, n), "position_ids": restarting(machine, n, second)}
            for i, (n, second) in enumerate([(7, 0), (7, 0), (6, 0), (8, 3), (7, 3), (8, 2)])
        ]
    model = model.to(machine.on).eval().requires_grad_(False)
    model.set_attn_implementation("eager")
    for parameter in model.parameters():  # so that attention matters
        if parameter.dim() > 1:
            parameter.mul_(4)
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"buckets": (8, 16), "device": machine.device} | PLAIN
    handle = dit_graph.enable(model, mode="prefill", **options)
    for call in calls:
        out, expected = model(**call, use_cache=False), twin(**call, use_cache=False)
        assert near(out.logits, expected.logits)
    stats = handle.stats()
    assert stats["replays"] >= 1
    assert list(stats["eager"]) == ["its hidden states are not those of the plain forward"]


def test_positions_that_come_from_the_mask(machine: Machine) -> None:
    mask = torch.tensor([[1] * 7, [0, 0, 0, 1, 1, 1, 1]], device=machine.on)
    call = {"input_ids": ids(machine, 0, 2, 7), "attention_mask": mask, "use_cache": False}
    config = {
        "vocab_size": 128, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "word_embed_proj_dim": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    assert "positions from the mask" in unlike(machine, "OPT", [call] * 3, **config)
