"""What stays eager, by name, and the encoders of pipelines beside it."""

import copy
from typing import Any

import pytest
import torch
import transformers

import dit_graph
from dit_graph.modes.prefill import live
from dit_graph.modes.prefill.prefill import DECODE
from tests.pair import PLAIN, Machine, torchs
from tests.shared.prefill.models import (
    BUCKETS,
    build,
    eager_reason,
    ids,
    near,
    two,
)


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
    """Too many tokens, too few for a bucket, a decode step, and what cannot be padded."""
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
