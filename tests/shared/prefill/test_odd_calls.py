"""Calls whose masks, caches or arguments padding has to do without."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

import dit_graph
from tests.pair import PLAIN, Machine
from tests.shared.prefill.models import (
    BUCKETS,
    HEAD,
    SIZES,
    eager_reason,
    ids,
    near,
    two,
)


@pytest.mark.parametrize("what", ["broadcast", "too short", "too long", "nothing"])
def test_an_odd_mask_does_not_end_padding(machine: Machine, what: str) -> None:
    model, twin, handle = two("Llama", machine, buckets=(8,))
    tokens, made = ids(machine, 0, 2, 7), {}
    mask = torch.ones(1, 7, dtype=torch.long, device=machine.on)
    if what == "too short":
        mask = mask[:, :5].expand(2, -1)
    elif what == "too long":
        mask = torch.cat([mask, torch.zeros_like(mask)], 1).expand(2, -1)
        made = {m: StaticCache(config=m.config, max_cache_len=14) for m in (model, twin)}
    elif what == "nothing":
        mask = torch.zeros_like(mask).expand(2, -1)
    for _ in range(3):
        assert near(model(tokens).logits, twin(tokens).logits)
        a, b = (
            m(tokens, attention_mask=mask, past_key_values=made.pop(m, None)).logits
            for m in (model, twin)
        )
        assert near(a, b)
    for seed in range(4):
        tokens = ids(machine, seed, 2, 7)
        assert near(model(tokens).logits, twin(tokens).logits)
    stats = handle.stats()
    says = {
        "too short": {"attention_mask is shorter than the tokens and those in the cache": 3},
        "nothing": {"attention_mask leaves every token out": 3},
    }
    assert stats["replays"] >= 5 and stats["eager"] == says.get(what, {})


def test_a_window_of_which_no_token_counts(machine: Machine) -> None:
    config = transformers.MistralConfig(**SIZES | HEAD, sliding_window=3)
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).to(machine.on).eval().requires_grad_(False)
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"buckets": (8, 16), "device": machine.device} | PLAIN
    handle = dit_graph.enable(model, mode="prefill", **options)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0]], device=machine.on)
    for seed in range(5):
        call = {"input_ids": ids(machine, seed, 1, 7), "attention_mask": mask}
        assert near(model(**call).logits[:, :3], twin(**call).logits[:, :3])
    assert handle.stats()["replays"] == 3 and handle.stats()["eager"] == {}


def test_a_static_cache_is_asked_for_its_length_once_at_most(
    machine: Machine, monkeypatch: Any
) -> None:
    """It has it on the device. Where no mask is given and no window set, nobody has to know."""
    model, _, handle = two("Llama", machine, buckets=(8,))
    asked = []
    monkeypatch.setattr("dit_graph.modes.prefill.prefill.tokens_in", lambda c: asked.append(c) or 0)
    mask = torch.ones(1, 7, dtype=torch.long, device=machine.on)
    for seed in range(6):
        cache = StaticCache(config=model.config, max_cache_len=8)
        asked.clear()
        model(ids(machine, seed, 1, 7), past_key_values=cache)
        assert len(asked) == (seed == 0)  # where it is proven
        asked.clear()
        cache = StaticCache(config=model.config, max_cache_len=8)
        model(ids(machine, seed, 1, 7), past_key_values=cache, attention_mask=mask)
        assert len(asked) == 1
    assert handle.stats()["replays"] >= 8


def test_hidden_states_have_eagers_strides(machine: Machine) -> None:
    model, twin, handle = two("Llama", machine, buckets=(8,))
    for seed in range(4):
        tokens = ids(machine, seed, 2, 7)
        out, expected = (m.model(tokens, output_hidden_states=True) for m in (model, twin))
        mine, its = (
            [o.last_hidden_state, *o.hidden_states] for o in (out, expected)
        )  # fmt: skip
        assert [h.stride() for h in mine] == [h.stride() for h in its]
    assert handle.stats()["replays"] == 2


def test_arguments_that_do_not_fit_are_the_models_own_error(machine: Machine) -> None:
    model, twin, handle = two("Llama", machine, buckets=(8,))
    tokens = ids(machine, 0, 1, 7)
    positions = torch.arange(8, device=machine.on)[None]
    for _ in range(3):
        model(tokens, position_ids=positions[:, :7])
    assert handle.stats()["replays"] == 1
    for n in (5, 8):
        for m in (model, twin):
            with pytest.raises(RuntimeError, match="size of tensor"):
                m(tokens, position_ids=positions[:, :n])


def test_a_cache_that_the_config_does_not_use(machine: Machine) -> None:
    model, twin, handle = two("Qwen3", machine, buckets=(8,))
    model.config.use_cache = twin.config.use_cache = False
    for seed in range(3):
        caches = DynamicCache(), DynamicCache()
        tokens = ids(machine, seed, 1, 7)
        out, expected = (
            m(tokens, past_key_values=c) for m, c in zip((model, twin), caches)
        )  # fmt: skip
        assert out.keys() == expected.keys() and torch.equal(out.logits, expected.logits)
        assert caches[0].get_seq_length() == caches[1].get_seq_length()
    assert handle.stats()["eager"] == {"a cache is given and use_cache is False": 3}


def test_strict_is_heard_in_the_first_call(machine: Machine) -> None:
    model, _, _ = two("Llama", machine, buckets=(8,), strict=True, on_new_shape="eager")
    with pytest.raises(dit_graph.NotReplayed, match="not warmed up"):
        model(ids(machine, 0, 1, 7))


@pytest.mark.parametrize(
    ("argument", "config"),
    [
        ({"is_causal": False}, {}),
        ({}, {"output_attentions": True, "attn_implementation": "eager"}),
        ({}, {"output_hidden_states": True}),
    ],
)
def test_arguments_and_settings_that_prefill_does_not_know(
    machine: Machine, argument: dict[str, Any], config: dict[str, Any]
) -> None:
    model, twin, handle = two("Llama", machine, buckets=(8,))
    for m in (model, twin):
        if "attn_implementation" in config:
            m.set_attn_implementation("eager")
        for name in set(config) - {"attn_implementation"}:
            setattr(m.config, name, True)
    for n in range(3):
        out, expected = (m.model(ids(machine, n, 1, 7), **argument) for m in (model, twin))
        assert torch.equal(out.last_hidden_state, expected.last_hidden_state)
        assert out.keys() == expected.keys()
    assert handle.stats()["replays"] == 0 and eager_reason(handle)


def test_models_that_share_a_config_in_threads(machine: Machine) -> None:
    made = transformers.LlamaConfig(**SIZES | HEAD)
    models = [transformers.LlamaForCausalLM(made).to(machine.on).eval() for _ in range(4)]
    twins = copy.deepcopy(models)
    for m in (*models, *twins):
        m.requires_grad_(False)
    options = PLAIN | {"buckets": BUCKETS}
    for m in models:
        dit_graph.enable(m, mode="prefill", device=machine.device, **options)

    def work(i: int) -> None:
        with torch.no_grad():
            for n in range(2, 17):
                tokens = ids(machine, 100 * i + n, 1, n)
                assert near(models[i](tokens).logits, twins[i](tokens).logits), (i, n)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert made._attn_implementation == "sdpa"
