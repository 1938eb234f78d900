"""Prefill of causal LMs, on every device: any token count against unpadded eager."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

import dit_graph
from dit_graph.call.buckets import Buckets, schedule
from dit_graph.modes.prefill import live
from dit_graph.modes.prefill.apart import apart
from dit_graph.modes.prefill.prefill import DECODE
from dit_graph.tape.tape import Break
from tests.pair import PLAIN, Machine, torchs

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


@pytest.mark.parametrize("name", FIRST)
def test_every_token_count_leaves_other_slots_alone(machine: Machine, name: str) -> None:
    """Rows 47, 48: KV outside of the request keeps its bits; inside it is unpadded eager's."""
    model, twin, handle = two(name, machine)
    for n in range(2, 17):
        for again in range(3):
            tokens = ids(machine, 100 * n + again, 1, n)
            cache, expected_cache = (static_cache(m, 7.25) for m in (model, twin))
            out = model(tokens, past_key_values=cache)
            expected = twin(tokens, past_key_values=expected_cache)
            assert out.logits.shape == expected.logits.shape == (1, n, 128)
            assert near(out.logits, expected.logits), n
            for layer, other in zip(cache.layers, expected_cache.layers):
                for mine, its in ((layer.keys, other.keys), (layer.values, other.values)):
                    assert bool((mine[:, :, n:] == 7.25).all()), n
                    assert near(mine[:, :, :n], its[:, :, :n]), n
                    if n in BUCKETS:
                        assert torch.equal(mine, its), n
            if n in BUCKETS:
                assert torch.equal(out.logits, expected.logits), n
    stats = handle.stats()
    assert stats["eager"] == {} and stats["captures"] == len(BUCKETS)
    assert stats["replays"] == 45 - 2 * len(BUCKETS)


@pytest.mark.parametrize("name", FIRST)
def test_padded_rows_would_reach_the_cache_without_the_rule(
    machine: Machine, name: str, monkeypatch: Any
) -> None:
    real = live.LiveCall
    monkeypatch.setattr(
        "dit_graph.modes.prefill.prefill.LiveCall",
        lambda tokens, length, *rest: real(length, length, *rest),
    )
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        test_every_token_count_leaves_other_slots_alone(machine, name)


@pytest.mark.parametrize("backend", ["breakable", "full", "debug", "eager"])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_and_backend(machine: Machine, name: str, backend: str) -> None:
    model, twin, handle = two(name, machine, backend=backend, buckets=(8, 16))
    for again in range(3):
        for n in range(4, 17):
            tokens = ids(machine, 100 * n + again, 1, n)
            out, expected = model(tokens), twin(tokens)
            assert near(out.logits, expected.logits), n
            for a, b in zip(out.past_key_values.layers, expected.past_key_values.layers):
                assert a.keys.shape == b.keys.shape and near(a.keys, b.keys)
                assert near(a.values, b.values)
            if n in (8, 16):
                assert torch.equal(out.logits, expected.logits), n
    stats = handle.stats()
    if backend == "eager":
        assert stats["replays"] == 0 and stats["eager"]
    else:
        assert is_replayed(machine, name, backend, stats, 30)


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("static", [False, True])
def test_greedy_text_is_the_same(machine: Machine, name: str, static: bool) -> None:
    model, twin, handle = two(name, machine, buckets=(8, 16, 32))
    options: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False}
    if static:
        options |= {"cache_implementation": "static", "disable_compile": True}
    for n in (5, 8, 11, 7, 16, 30, 9):
        tokens = ids(machine, n, 1, n)
        assert torch.equal(model.generate(tokens, **options), twin.generate(tokens, **options)), n
    stats = handle.stats()
    assert set(stats["eager"]) == {DECODE} and stats["eager"][DECODE] == 7 * 63
    assert stats["replays"] >= 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("backend", ["breakable", "full"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3 sliding", "Qwen3 MoE"])
def test_batches_of_prompts_of_different_lengths(
    machine: Machine, name: str, backend: str, side: str
) -> None:
    model, twin, handle = two(name, machine, backend=backend, buckets=(8, 16))
    for seed in range(4):
        lengths = [(7, 3, 5), (6, 6, 2), (7, 1, 7), (8, 4, 3)][seed]
        longest = max(lengths)
        tokens, mask = ids(machine, seed, 3, longest), torch.zeros(3, longest, dtype=torch.long)
        for row, n in enumerate(lengths):
            mask[row, slice(longest - n, None) if side == "left" else slice(n)] = 1
        mask = mask.to(machine.on)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        call = {"attention_mask": mask, "position_ids": positions}
        out, expected = model(tokens, **call).logits, twin(tokens, **call).logits
        live_rows = mask.bool()
        assert near(out[live_rows], expected[live_rows]), seed
    assert is_replayed(machine, name, backend, handle.stats(), 1)


def is_replayed(machine: Machine, name: str, backend: str, stats: Any, least: int) -> bool:
    """Or eager by name: on CUDA a grouped product of float32 reads its offsets on the host, and
    one graph has nowhere to do that."""
    if machine.on != "cpu" and backend == "full" and "MoE" in name:
        return stats["replays"] == 0 and all("grouped_mm" in reason for reason in stats["eager"])
    return stats["replays"] >= least and stats["eager"] == {}


def test_a_mask_is_heard(machine: Machine) -> None:
    """Left padding that is ignored silently: other tokens under the mask change nothing."""
    model, _, handle = two("Llama", machine, buckets=(8,))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]], device=machine.on)
    results = []
    for seed in range(4):
        tokens = ids(machine, 0, 1, 7)
        tokens[:, :3] = ids(machine, seed, 1, 3)
        results.append(model(tokens, attention_mask=mask).logits[:, 3:])
    assert all(torch.equal(r, results[0]) for r in results) and handle.stats()["replays"] == 2
    ignored = model(tokens).logits[:, 3:]
    assert not torch.equal(ignored, results[0])


@pytest.mark.parametrize("name", ["Llama", "Gemma2 sliding", "Gemma3 sliding", "Qwen3 MoE"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_chunks_and_second_turns(machine: Machine, name: str, kind: str) -> None:
    """Row 19: two chunks of equal length and other offset."""
    model, twin, handle = two(name, machine, buckets=(8,))

    def cache(m: Any) -> Any:
        if kind == "dynamic":
            return DynamicCache(config=m.config)
        return StaticCache(config=m.config, max_cache_len=40)

    for seed in range(4):
        mine, its = cache(model), cache(twin)
        for chunk in range(4):
            tokens = ids(machine, 10 * seed + chunk, 1, (8, 8, 6, 8)[chunk])
            out = model(tokens, past_key_values=mine).logits
            expected = twin(tokens, past_key_values=its).logits
            assert near(out, expected), (seed, chunk)
            assert mine.get_seq_length() == its.get_seq_length()
    assert handle.stats()["eager"] == {} and handle.stats()["replays"] == 14


def test_stale_rows_of_a_larger_batch(machine: Machine) -> None:
    """Row 53: request 1 uses more rows than request 2 of the same bucket."""
    model, twin, handle = two("Llama", machine, buckets=(16,))
    for n in (16, 9, 15, 8, 16, 10):
        tokens = ids(machine, n, 1, n)
        assert near(model(tokens).logits, twin(tokens).logits), n
    assert handle.stats()["replays"] == 4


def test_bfloat16_is_as_near_as_eager_is(machine: Machine) -> None:
    """Row 55: padded bf16 against fp32 is no further off than unpadded bf16."""
    model, twin, _ = two("Llama", machine, buckets=(16,))
    exact = copy.deepcopy(twin)
    model.bfloat16(), twin.bfloat16()
    errors, same = {"padded": 0.0, "plain": 0.0}, 0
    for n in range(8, 17):
        tokens = ids(machine, n, 1, n)
        wanted = exact(tokens).logits
        padded, plain = model(tokens).logits, twin(tokens).logits
        errors["padded"] = max(errors["padded"], float((padded - wanted).abs().max()))
        errors["plain"] = max(errors["plain"], float((plain - wanted).abs().max()))
        same += int(padded[0, -1].argmax()) == int(plain[0, -1].argmax())
    assert errors["padded"] <= 1.5 * errors["plain"] and same == 9


def test_other_threads_may_call_while_one_records(machine: Machine) -> None:
    """Decode steps and prompts of other buckets, among first calls that are being recorded."""
    model, twin, handle = two("Qwen3 MoE", machine)
    start = Barrier(6)

    def work(i: int) -> None:
        start.wait(60)
        with torch.no_grad():
            for n in range(12):
                tokens = ids(machine, 100 * i + n, 1, 1 + (5 * i + n) % 16)
                assert near(model(tokens).logits, twin(tokens).logits), (i, n)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    stats = handle.stats()
    assert stats["calls"] == 72 and stats["replays"] >= 10 and set(stats["eager"]) <= {DECODE}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_attention_implementation(machine: Machine, attention: str) -> None:
    model, twin, handle = two("Gemma3 sliding", machine, buckets=(16,))
    for m in (model, twin):
        m.set_attn_implementation(attention)
    for n in (9, 12, 16, 10):
        tokens = ids(machine, n, 1, n)
        assert near(model(tokens).logits, twin(tokens).logits), n
    assert handle.stats()["replays"] == 2
    assert model.config._attn_implementation == attention


# ---- what cannot be padded


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


def test_positions_that_come_from_the_mask(machine: Machine) -> None:
    mask = torch.tensor([[1] * 7, [0, 0, 0, 1, 1, 1, 1]], device=machine.on)
    call = {"input_ids": ids(machine, 0, 2, 7), "attention_mask": mask, "use_cache": False}
    config = {
        "vocab_size": 128, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "word_embed_proj_dim": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    assert "positions from the mask" in unlike(machine, "OPT", [call] * 3, **config)


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


# ---- eager, by name


def eager_reason(handle: dit_graph.Handle) -> str:
    (reason,) = handle.stats()["eager"]
    return str(reason)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"shape": (1, 17)}, "17 tokens are past the largest bucket 16"),
        ({"shape": (1, 3), "buckets": (8, 16)}, "3 tokens would be padded to 8, over 2 times"),
        ({"shape": (1, 1)}, DECODE),
        ({"shape": (1, 8), "output_attentions": True}, "argument output_attentions"),
    ],
)
def test_what_stays_eager_says_why(machine: Machine, call: dict[str, Any], says: str) -> None:
    """Rows 38 and the largest bucket."""
    call = dict(call)
    shape, buckets = call.pop("shape"), call.pop("buckets", BUCKETS)
    model, twin, handle = two("Llama", machine, buckets=buckets)
    for seed in range(3):
        tokens = ids(machine, seed, *shape)
        assert torch.equal(model(tokens, **call).logits, twin(tokens, **call).logits)
    assert eager_reason(handle).startswith(says) and handle.stats()["calls"] == 3


@pytest.mark.parametrize("name", ["Qwen3", "Gemma2 sliding", "Llama"])
@pytest.mark.parametrize("backend", ["breakable", "full"])
def test_an_encoder_of_prompts_of_different_lengths(
    machine: Machine, name: str, backend: str
) -> None:
    """As diffusers pipelines call it: the body, left or right padding, hidden states of a layer."""
    encoder = build(name, machine).model
    twin = copy.deepcopy(encoder)
    options = PLAIN | {"buckets": (8, 16), "backend": backend}
    handle = dit_graph.enable(encoder, mode="prefill", device=machine.device, **options)
    for n in (5, 12, 7, 16, 8, 9, 6, 14):
        tokens, mask = ids(machine, n, 2, n), torch.ones(2, n, dtype=torch.long)
        mask[1, n - 2 :] = 0
        call = {"input_ids": tokens, "attention_mask": mask.to(machine.on)}
        out = encoder(**call, output_hidden_states=True)
        expected = twin(**call, output_hidden_states=True)
        assert len(out.hidden_states) == len(expected.hidden_states) == 3
        live_rows = mask.bool()
        for a, b in zip(out.hidden_states, expected.hidden_states):
            assert a.shape == b.shape and near(a[live_rows], b[live_rows]), n
    assert handle.stats()["replays"] == 4 and handle.stats()["eager"] == {}


def test_an_encoder_of_padded_prompts_at_exact_shapes(machine: Machine) -> None:
    """A pipeline that pads every prompt: T5, CLIP and LLM encoders as plain modules."""
    clip = transformers.CLIPTextConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    t5 = transformers.T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    for encoder, more in (
        (transformers.CLIPTextModel(clip), {}),
        (transformers.T5EncoderModel(t5), {}),
        (build("Qwen3", machine).model, {"use_cache": False}),
    ):
        pair = machine.pair(encoder.requires_grad_(False))
        for seed in range(6):
            mask = torch.ones(1, 12, dtype=torch.long, device=machine.on)
            mask[:, 12 - seed :] = 0
            call = {"input_ids": ids(machine, seed, 1, 12), "attention_mask": mask, **more}
            out = pair.graphed(**call, output_hidden_states=True)
            expected = pair.eager(**call, output_hidden_states=True)
            for a, b in zip(out.hidden_states, expected.hidden_states):
                assert torch.equal(a, b), (type(encoder).__name__, seed)
        assert pair.replays >= 2, pair.handle.report()


def test_embeddings_and_no_cache(machine: Machine) -> None:
    model, twin, handle = two("Qwen3", machine, buckets=(8,))
    for seed in range(4):
        embeds = model.get_input_embeddings()(ids(machine, seed, 1, 6))
        for call in ({"use_cache": False}, {}):
            out, expected = model(inputs_embeds=embeds, **call), twin(inputs_embeds=embeds, **call)
            assert near(out.logits, expected.logits)
            assert (out.past_key_values is None) == (expected.past_key_values is None)
    assert handle.stats()["replays"] == 4


def test_a_decode_step_is_no_error_under_strict(machine: Machine) -> None:
    model, twin, _ = two("Llama", machine, buckets=(8,), strict=True)
    tokens = ids(machine, 0, 1, 6)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), twin.generate(tokens, **options))
    with pytest.raises(dit_graph.NotReplayed, match="past the largest bucket"):
        model(ids(machine, 0, 1, 9))


def test_verification_and_another_adapter(machine: Machine) -> None:
    model, twin, handle = two("Llama", machine, buckets=(8,), verify="first")
    for seed in range(4):
        tokens = ids(machine, seed, 1, 7)
        assert near(model(tokens).logits, twin(tokens).logits)
    assert "bit-equal when compared" in handle.report()
    for m in (model, twin):
        m.model.layers[0].mlp.down_proj.weight.data = m.model.layers[0].mlp.down_proj.weight * 2
    for seed in range(4):
        tokens = ids(machine, seed, 1, 7)
        assert near(model(tokens).logits, twin(tokens).logits)
    assert handle.stats()["captures"] == 2


def test_a_step_that_fails_writes_each_layer_once(machine: Machine, monkeypatch: Any) -> None:
    """The cache was written for both layers; eager answers and does not write it again."""
    model, twin, handle = two("Llama", machine, buckets=(8,))
    for seed in range(3):
        model(ids(machine, seed, 1, 7))
    real, calls = live.attention_named, []

    @torchs
    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # one a layer
            raise RuntimeError("no luck")
        return real(*args, **kwargs)

    monkeypatch.setattr(live, "attention_named", failing)
    tokens = ids(machine, 9, 1, 7)
    out, expected = model(tokens), twin(tokens)
    assert near(out.logits, expected.logits) and "no luck" in eager_reason(handle)
    assert out.past_key_values.get_seq_length() == 7
    for a, b in zip(out.past_key_values.layers, expected.past_key_values.layers):
        assert near(a.keys, b.keys)


# ---- buckets


def entries(handle: dit_graph.Handle) -> list[Any]:
    (install,) = handle.installs.values()
    assert install.runner is not None
    return list(install.runner.entries.values())


def test_the_tail_of_a_boundary_buffer_is_zero(machine: Machine, monkeypatch: Any) -> None:
    """Right after each attention, whatever lay in its buffer before; later steps use it again."""
    model, twin, _ = two("Llama", machine, buckets=(8,))
    for n in (6, 7, 8):
        model(ids(machine, n, 1, n))
    real, found = Break.__call__, []

    def poisoned(step: Break) -> None:
        tensors = [t for t in step.leaves if isinstance(t, torch.Tensor)]
        (buffer,) = [t for t in tensors if t.shape == (1, 8, 4, 8)]
        buffer.fill_(torch.nan)
        real(step)
        found.append(buffer.clone())

    monkeypatch.setattr(Break, "__call__", poisoned)
    for n in (5, 8, 6):
        found.clear()
        tokens = ids(machine, n, 1, n)
        assert near(model(tokens).logits, twin(tokens).logits)
        assert len(found) == 2, "an attention a layer"
        for buffer in found:
            assert bool((buffer[:, n:] == 0).all()) and not bool(buffer[:, :n].isnan().any()), n


@pytest.mark.parametrize("backend", ["breakable", "full"])
def test_an_eager_verdict_pads_nothing(machine: Machine, backend: str, monkeypatch: Any) -> None:
    """What the gate finds as fast in eager runs as if nothing was enabled, bit for bit."""
    model, twin, handle = two("Llama", machine, backend=backend, buckets=(8,))
    for n in (6, 7, 8):
        model(ids(machine, n, 1, n))
    for entry in entries(handle):
        entry.block("replay 2 ms vs eager 1 ms")
    monkeypatch.setattr("dit_graph.modes.prefill.prefill.Prefill.padded_forward", None)
    for n in (5, 6, 8):
        tokens = ids(machine, n, 1, n)
        out, expected = model(tokens), twin(tokens)
        assert type(out) is type(expected) and torch.equal(out.logits, expected.logits)
        for a, b in zip(out.past_key_values.layers, expected.past_key_values.layers):
            assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    assert handle.stats()["eager"] == {"replay 2 ms vs eager 1 ms": 3}


def test_an_eager_call_without_memory_runs_once(machine: Machine, monkeypatch: Any) -> None:
    """A second run would find the first one's layers in the cache."""
    model, _, handle = two("Llama", machine, buckets=(8,))
    for n in (6, 7, 8):
        model(ids(machine, n, 1, n))
    for entry in entries(handle):
        entry.block("replay 2 ms vs eager 1 ms")
    cache, ran = DynamicCache(config=model.config), []

    last = model.model.norm
    real = type(last).forward

    def full(norm: Any, hidden: torch.Tensor) -> Any:
        if norm is last:  # all layers have written their keys by then
            ran.append(1)
            raise torch.OutOfMemoryError("out of memory")
        return real(norm, hidden)

    monkeypatch.setattr(type(last), "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        model(ids(machine, 1, 1, 6), past_key_values=cache)
    assert len(ran) == 1 and cache.get_seq_length() == 6


def test_the_schedule() -> None:
    sizes = schedule(2048)
    assert sizes[:10] == (4, 8, 12, 16, 20, 24, 28, 32, 48, 64)
    assert sizes[-6:] == (960, 1024, 1280, 1536, 1792, 2048)
    assert schedule(5000)[-3:] == (4096, 4608, 5000) and schedule(10) == (4, 8, 10)
    Buckets(schedule(8192))


def test_buckets_that_are_no_sequence() -> None:
    with pytest.raises(dit_graph.ConfigError, match="must be a sequence of token counts, got 5"):
        dit_graph.GraphConfig(mode="prefill", buckets=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [[], [8, 4], [4, 4], [0], [4, 8.0], [True]])
def test_wrong_buckets_are_an_error_at_construction(sizes: Any) -> None:
    """Row 37."""
    with pytest.raises(dit_graph.ConfigError, match="buckets"):
        dit_graph.GraphConfig(mode="prefill", buckets=sizes)


def test_the_smallest_bucket_that_holds() -> None:
    buckets = Buckets([4, 8, 16])
    found = [buckets.find(n)[0] for n in (1, 2, 4, 5, 8, 9, 16, 17)]
    assert found == [0, 4, 4, 8, 8, 16, 16, 0]


# ---- what is refused, and what comes back


def test_wrong_targets(machine: Machine) -> None:
    with pytest.raises(dit_graph.ConfigError, match="takes a transformers causal LM"):
        dit_graph.enable(torch.nn.Linear(2, 2), mode="prefill", device=machine.device)
    model = build("Llama", machine)
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(dit_graph.ConfigError, match="linear_attention layers"):  # row 50
        dit_graph.enable(model, mode="prefill", device=machine.device)
    model.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(dit_graph.ConfigError, match="takes one mask for all"):
        dit_graph.enable(model, mode="prefill", device=machine.device)

    model.config.layer_types = None
    model.config.sliding_window = 6  # which Llama's forward does not ask for
    with pytest.raises(dit_graph.ConfigError, match="names a window"):
        dit_graph.enable(model, mode="prefill", device=machine.device)

    bert = transformers.BertLMHeadModel(transformers.BertConfig(**SIZES)).to(machine.on)
    with pytest.raises(
        dit_graph.ConfigError, match=r"not causal|no transformer body|way of its own"
    ):
        dit_graph.enable(bert, mode="prefill", device=machine.device)


def test_layer_types_of_a_model_with_one_mask(machine: Machine) -> None:
    model, twin, handle = two("Llama", machine, buckets=(8,))
    model.config.layer_types = twin.config.layer_types = ["full_attention"] * 2
    for n in (5, 6, 7, 8):
        tokens = ids(machine, n, 1, n)
        assert near(model(tokens).logits, twin(tokens).logits)
    assert handle.stats()["replays"] == 2


def test_disable_leaves_nothing(machine: Machine) -> None:
    model, twin, handle = two("Qwen3 MoE", machine, buckets=(8,))
    config = copy.deepcopy(model.config.to_dict())
    for seed in range(3):
        model(ids(machine, seed, 1, 7))
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == twin.config._attn_implementation
    handle.disable()
    assert all("forward" not in m.__dict__ for m in model.modules())
    tokens = ids(machine, 5, 1, 7)
    assert torch.equal(model(tokens).logits, twin(tokens).logits)


def test_warm_up_records_the_largest_first(machine: Machine) -> None:
    model, twin, handle = two("Llama", machine)
    handle.warmup()
    assert handle.stats()["captures"] == len(BUCKETS)
    (runner,) = (install.runner for install in handle.installs.values())
    order = [next(k for k in key.leaves if k[0] == "tensor" and len(k[1]) == 2)[1][1]
             for key in runner.entries]  # fmt: skip
    assert order == sorted(BUCKETS, reverse=True)
    for n in range(2, 17):
        tokens = ids(machine, n, 1, n)
        assert near(model(tokens).logits, twin(tokens).logits)
    assert handle.stats()["replays"] == 15


@pytest.mark.parametrize(
    "kwargs", [{"prompt": "a"}, {"sizes": [(64, 64)]}, {"batch": 0}, {"batch": "a"}]
)
def test_wrong_warm_ups(machine: Machine, kwargs: Any) -> None:
    model, _, handle = two("Llama", machine, buckets=(8,))
    with pytest.raises(dit_graph.ConfigError, match=r"takes batch alone|batch must be a whole"):
        handle.warmup(**kwargs)
    assert model is not None and handle.stats()["calls"] == 0  # the handle does not keep it


def test_outside_of_no_grad_it_is_eager_by_name(machine: Machine) -> None:
    model, twin, handle = two("Llama", machine, buckets=(8,))
    model.requires_grad_(True)
    tokens = ids(machine, 0, 1, 7)
    with torch.enable_grad():
        out = model(tokens).logits
        out.sum().backward()
    assert near(out, twin(tokens).logits) and "gradients" in eager_reason(handle)
    assert model.model.layers[0].mlp.down_proj.weight.grad is not None
