"""What a case is: a trap's small reproduction, and the switch that takes out the rule behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from tests.families import FAMILIES
from tests.pair import Machine, Pair
from tests.toys import rows

Check = Callable[[Machine], None]
Switch = Callable[[pytest.MonkeyPatch], None]
Calls = Callable[[int], dict[str, Any]]
"""Keyword arguments with new values for each seed."""


@dataclass(frozen=True)
class Case:
    """`check` holds; under `without` it raises `fails` with `says` in its message."""

    check: Check
    without: Switch
    fails: type[Exception]
    says: str
    silent: bool  # a wrong value and no error


CASES: dict[str, Case] = {}


def row(
    *,
    without: Switch,
    says: str = "differs from eager in result",
    fails: type[Exception] = AssertionError,
    silent: bool = True,
) -> Callable[[Check], Check]:
    """The function's name is the row's, and its docstring says what goes wrong without the rule."""

    def add(check: Check) -> Check:
        name = check.__name__.replace("_", " ")
        assert name not in CASES
        CASES[name] = Case(check, without, fails, says, silent)
        return check

    return add


# ---- inputs and adapters


def x_only(seed: int) -> dict[str, Any]:
    return {"x": rows(seed)}


def family(machine: Machine, name: str, **options: Any) -> Pair:
    return machine.pair(FAMILIES[name].build(), **options)


def inputs(name: str, caption: int = 5, **others: Any) -> Calls:
    return lambda seed: FAMILIES[name].inputs(10 * seed, caption) | others


LORA = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)


def add_lora(module: Any, name: str = "one") -> None:
    torch.manual_seed(7)
    module.add_adapter(LORA, name)


def lora_layers(module: nn.Module) -> list[Any]:
    return [child for child in module.modules() if hasattr(child, "lora_A")]


# ---- what a row promises


def both(pair: Pair, change: Callable[[Any], object]) -> None:
    for module in (pair.graphed, pair.eager):
        change(module)


def settle(pair: Pair, calls: Calls, times: int = 4) -> None:
    """Equal at every call, and replayed from the third one on."""
    before = pair.replays
    for seed in range(times):
        pair(**pair.machine.to(calls(seed)), seed=seed)
    assert pair.replays >= before + times - 2, f"not replayed\n{pair.handle.report()}"


def replayed(pair: Pair, calls: Calls, times: int = 2) -> None:
    """Equal at every call, and every call is a replay."""
    before = pair.replays
    for seed in range(20, 20 + times):
        pair(**pair.machine.to(calls(seed)), seed=seed)
    assert pair.replays == before + times, f"not replayed at once\n{pair.handle.report()}"


def recorded_again(pair: Pair, change: Callable[[Any], object], calls: Calls) -> None:
    """A change that no argument shows: seen, recorded once a state, replayed with its value."""
    before = pair.stats["captures"]
    both(pair, change)
    settle(pair, calls)
    assert pair.stats["captures"] in (before, before + 1), "recorded more than once"


def eager_because(pair: Pair, reason: str) -> None:
    said = list(pair.stats["eager"])
    assert any(reason in text for text in said), f"nothing says {reason!r}: {said}"


def never_eager(pair: Pair) -> None:
    assert pair.stats["eager"] == {}, f"eager: {pair.stats['eager']}"
