"""What needs no second process: a process alone, how failures are told, counters, split models."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dit_graph.cli.errors import UsageError
from dit_graph.cli.ranks import Processes, join
from dit_graph.explain.report import summed
from dit_graph.state.blockers import parallel


def test_a_process_alone_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = join()
    assert alone == Processes() and alone.is_main
    assert alone.mine("abc") == ["a", "b", "c"]
    assert alone.gather(3) == [3] and alone.together(lambda: 5) == 5

    def fails() -> None:
        raise KeyError("as it is")

    with pytest.raises(KeyError):
        alone.failure(fails)


def test_failures_are_told_by_name_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    three = Processes(rank=1, count=3)
    assert three.summary(["", "", ""]) == ""
    assert three.summary(["no cat", "no cat", "no cat"]) == "no cat"
    told = three.summary(["no cat", "", "no dog"])
    assert told == "process 1 of 3: no cat; process 3 of 3: no dog"

    def fails(error: Exception) -> None:
        raise error

    assert three.failure(lambda: fails(UsageError("no cat"))) == "no cat"
    assert capsys.readouterr().err == ""
    assert three.failure(lambda: fails(KeyError("cat"))) == "KeyError: 'cat'"
    assert "Traceback" in capsys.readouterr().err, "what is no mistake of the user's is not hidden"


def test_counters_are_summed() -> None:
    one = {"calls": 3, "cold": 1, "captures": 1, "replays": 0, "dropped": 0,
           "eager": {"why": 1}}  # fmt: skip
    assert summed([one, one | {"eager": {}}]) == {
        "calls": 6, "cold": 2, "captures": 2, "replays": 0, "dropped": 0, "eager": {"why": 1}
    }  # fmt: skip
    assert summed([])["calls"] == 0 and summed([])["eager"] == {}


@pytest.mark.parametrize(
    "attributes, expected",
    [
        ({}, None),
        ({"_parallel_config": None, "_tp_size": 1}, None),
        ({"_tp_size": 4}, "tensor parallel over 4 processes"),
        ({"_parallel_config": {"tensor_parallel_config": {"tp_degree": 2, "_tp_degree": None}}},
         "tensor parallel over 2 processes"),
        ({"_parallel_config": {"context_parallel_config": {"ring_degree": 2, "ulysses_degree": 4}}},
         "context parallel over 8 processes"),
    ],
)  # fmt: skip
def test_split_models_are_known_by_their_state(
    attributes: dict[str, Any], expected: str | None
) -> None:
    def spaces(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return SimpleNamespace(**{name: spaces(inner) for name, inner in value.items()})

    module = nn.Sequential(nn.Linear(2, 2))
    vars(module[0]).update({name: spaces(value) for name, value in attributes.items()})
    said = parallel(module)
    assert said == (expected and f"{expected}: its collectives are not recorded")
