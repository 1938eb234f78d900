"""`python -m dit_graph.bench` on CUDA: what only a device gives is measured."""

import json
from typing import Any

import pytest

from dit_graph.bench.options import BenchOptions, main

QUICK = ["--images", "2", "--steps", "8", "--set-up", "here"]


@pytest.fixture(autouse=True)
def replays_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate goes by time, and what a machine is busy with must decide no test."""
    enable = property(lambda options: {"device": "auto", "gate": "always"})
    monkeypatch.setattr(BenchOptions, "enable", enable)


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert main([*QUICK, *argv]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not any("failed" in note for note in result["notes"]), result["notes"]
    assert result["machine"]["gpu"] and result["machine"]["driver"]
    found: list[dict[str, Any]] = result["rows"]
    return found


def test_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["breakable", "breakable+remove-syncs", "full"]
    found = rows(capsys, "--compare", ",".join(asked))
    assert [row["mode"] for row in found] == ["eager", *asked]
    eager, *graphs = found
    for row in found:
        assert row["equal"] and row["device_s"] > 0 and row["gpu_busy_s"] > 0
        # busy and wall clock are of two calls, so that busy may be the longer one
        assert row["gpu_busy"] == pytest.approx(row["gpu_busy_s"] / row["time_s"], abs=0.01)
        assert row["kernels_per_step"] > 50 and row["launches_per_step"] >= 1
        assert row["allocated_GB"] > 0
    for row in graphs:
        assert row["stats"]["replays"] > 0 and row["gain"] > 0 and row["graph_MiB"] > 0
        assert row["launches_per_step"] < eager["launches_per_step"] / 2


def test_compiled_contenders_are_measured_too(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["regional", "reduce-overhead", "regional+breakable"]
    found = rows(capsys, "--what", "step", "--compare", ",".join(asked))
    assert [row["mode"] for row in found] == ["eager", *asked]
    assert all(row["difference"] is not None and row["difference"] < 0.2 for row in found)
    assert found[3]["stats"]["replays"] > 0 and found[3]["graph_MiB"] > 0
    assert found[3]["difference"] == found[1]["difference"], "the compiled blocks' own numbers"


def test_compiled_blocks_of_a_class_that_does_not_name_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["--model", "dit-xl-2", "--sizes", "256", "--compare", "regional,regional+breakable"]
    _, blocks, graphs = rows(capsys, *more)
    assert graphs["stats"]["replays"] > 0 and not graphs["stats"]["eager"]
    assert graphs["difference"] == blocks["difference"] > 0
    assert graphs["launches_per_step"] < blocks["launches_per_step"] / 2


def test_a_named_shape(capsys: pytest.CaptureFixture[str]) -> None:
    eager, graphs = rows(capsys, "--model", "dit-xl-2", "--sizes", "256", "--compare", "breakable")
    assert graphs["equal"] and eager["model_cls"] == "DiTTransformer2DModel"
    assert eager["num_params_B"] == pytest.approx(0.75, rel=0.02) and eager["tokens"] == 256


def test_an_llm(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--what", "prefill", "--model", "qwen3-0.6b", "--tokens", "64,100"]
    found = rows(capsys, *more, "--compare", "breakable")
    assert [row["tokens"] for row in found] == [64, 64, 100, 100]
    assert found[1]["equal"] and found[3]["difference"] < 0.1
