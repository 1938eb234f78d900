"""A tiny causal LM for `python -m dit_graph.prefill`."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<unk>", "<end>", *(f"w{n}" for n in range(62))]
POSITIONS = 96


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Llama and its tokenizer, one token a word. Its config asks for sampling."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=POSITIONS,
        initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config.update(do_sample=True, temperature=5.0, max_new_tokens=3)
    model.save_pretrained(folder)
    words = models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the tiny model in `llama`."""
    monkeypatch.chdir(tmp_path)
    Path("llama").symlink_to(saved)
