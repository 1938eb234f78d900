"""`python -m dit_graph.prefill --device recorder`: the text of graphs is the eager one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import dit_graph
from dit_graph.cli import prefill
from dit_graph.embedded import smollm2
from tests.recorder.prefill.conftest import WORDS

PROMPTS = ["w1 w2 w3", "w4 w5 w6", "w7 w8", "w9 w10 w11 w12", " ".join(WORDS[2:42]), "w13 w14 w15"]


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
    assert plain["stats"] == {
        "calls": 0,
        "cold": 0,
        "captures": 0,
        "replays": 0,
        "dropped": 0,
        "eager": {},
    }


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
