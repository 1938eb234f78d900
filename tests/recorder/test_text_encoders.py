"""A pipeline's text encoders: an LLM in prefill mode, CLIP and T5 at exact shapes."""

from typing import Any

import pytest
import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, ZImagePipeline
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dit_graph
from tests.families import FAMILIES
from tests.pair import PLAIN
from tests.recorder.test_denoise import OPTIONS, flux_pipeline

WORDS = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    *["a", "red", "blue", "fox", "cat", "house", "in", "the", "snow", "on", "of", "user"],
]


def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>", model_max_length=32,
    )  # fmt: skip
    fast.chat_template = "{% for m in messages %}user {{ m['content'] }} {% endfor %}"
    return fast


def vae() -> Any:
    return AutoencoderKL(block_out_channels=(4,), latent_channels=4, norm_num_groups=1).eval()


def z_image() -> Any:
    torch.manual_seed(0)
    qwen = transformers.Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    pipe = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(block_out_channels=(4,), latent_channels=16, norm_num_groups=1).eval(),
        text_encoder=transformers.Qwen3Model(qwen).eval().requires_grad_(False),
        tokenizer=tokenizer(),
        transformer=FAMILIES["zimage"].build(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux() -> FluxPipeline:
    pipe = flux_pipeline()
    torch.manual_seed(0)
    clip = transformers.CLIPTextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=77, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    t5 = transformers.T5Config(
        vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    encoders = transformers.CLIPTextModel(clip), transformers.T5EncoderModel(t5)
    first, second = (encoder.eval().requires_grad_(False) for encoder in encoders)
    pipe.register_modules(
        text_encoder=first, text_encoder_2=second, tokenizer=tokenizer(), tokenizer_2=tokenizer()
    )
    return pipe


def draw(pipe: Any, prompt: str, seed: int, **more: Any) -> torch.Tensor:
    return pipe(
        prompt, height=16, width=16, num_inference_steps=2, output_type="latent",
        generator=torch.Generator().manual_seed(seed), **more,
    ).images  # fmt: skip


PROMPTS = ["a red fox", "a blue cat in the snow", "the house", "a fox on the house", "snow"]


@pytest.mark.parametrize("make", [z_image, flux])
def test_encoders_are_recorded_and_the_pictures_stay(make: Any) -> None:
    pipe, eager = make(), make()
    more: dict[str, Any] = {"max_sequence_length": 32}
    handle = dit_graph.enable(pipe, text_encoders=True, **OPTIONS)
    for seed, prompt in enumerate(PROMPTS):
        assert torch.equal(draw(pipe, prompt, seed, **more), draw(eager, prompt, seed, **more))
    encoders = [install for name, install in handle.installs.items() if "encoder" in name]
    assert len(encoders) == (1 if make is z_image else 2)
    for install in encoders:
        entries = install.runner.entries.values()
        assert sum(entry.counts.replays for entry in entries) >= 3, handle.report()
    assert handle is dit_graph.enable(pipe, text_encoders=True, **OPTIONS)
    with pytest.raises(dit_graph.AlreadyEnabled):
        dit_graph.enable(pipe, **OPTIONS)
    dit_graph.disable(pipe)
    assert all("forward" not in i.module.__dict__ for i in handle.installs.values())


def test_a_change_of_an_encoder_is_heard_without_a_new_picture() -> None:
    """Encoders run before `set_timesteps`, or without it: they are compared at every call."""
    pipe, eager = z_image(), z_image()
    handle = dit_graph.enable(pipe, text_encoders=True, **OPTIONS)
    draw(pipe, "a fox", 0, max_sequence_length=32)
    with torch.no_grad():
        for i, prompt in enumerate(PROMPTS):
            if i == 3:
                for each in (pipe, eager):
                    projection = each.text_encoder.layers[0].self_attn.q_proj
                    projection.weight.data = projection.weight * 2
            embeds = [p.encode_prompt(prompt, max_sequence_length=32)[0] for p in (pipe, eager)]
            assert all(map(torch.equal, *embeds)), prompt
    assert handle.stats()["captures"] >= 1


def test_encoders_are_left_alone_by_default() -> None:
    pipe = flux()
    handle = dit_graph.enable(pipe, **OPTIONS)
    assert list(handle.installs) == ["transformer"]
    with pytest.raises(dit_graph.ConfigError, match="needs a pipeline"):
        dit_graph.enable(torch.nn.Linear(2, 2), text_encoders=True, **PLAIN, **OPTIONS)


def test_a_replaced_encoder_is_named() -> None:
    pipe = z_image()
    handle = dit_graph.enable(pipe, text_encoders=True, **OPTIONS)
    assert "replaced" not in handle.report()
    pipe.text_encoder = z_image().text_encoder
    assert "not installed: text_encoder was replaced by Qwen3Model" in handle.report()
