"""Every hard case that shows on the recorder: right with its rule, and seen to be wrong without.

The silent ones come first: a wrong value and no error.
"""

import pytest

from tests.footguns import adapters, aliasing, company, failures, host_values, signatures
from tests.footguns.case import CASES
from tests.pair import Machine

ROWS = [
    "buckets in one pool",
    "results of a break are gone",
    "a workspace first made under capture",
    "weights cast up and down",
    "the first of two results is kept",
    "the output is the next input",
    "output objects",
    "python data on the device",
    "a float argument",
    "the scale of a processor",
    "a mask that is cast beforehand",
    "a break that needs the live batch",
    "a number on the module",
    "tensors inside containers",
    "tensors by keyword",
    "hooks on a block",
    "windows of the same total",
    "sizes of equal packed shape",
    "a rotary table first built under capture",
    "the scale in attention kwargs",
    "adapter weights and flags",
    "a lora is fused",
    "many resolutions and back",
    "other batch sizes",
    "another rank than warmed up",
    "more frames than recorded",
    "memory is bounded",
    "captions are never padded",
    "masks that come and go",
    "a lora is loaded",
    "an adapter switch that fails",
    "weights are swapped",
    "weights are assigned",
    "offload hooks",
    "the device moves",
    "host reads in the forward",
    "a step of the scheduler",
    "the first call does extra work",
    "the collector and another thread",
    "captures that fail",
    "a replay that fails",
    "work that nobody recorded",
    "random numbers",
    "a callers generator",
    "cpu scalars",
    "compiled blocks",
    "hooks that take the slot",
    "state before a guard",
    "every prompt has its length",
    "a break that feeds the next",
    "gradients",
    "step caches",
]
MODULES = (aliasing, host_values, adapters, signatures, failures, company)


NAMES = sorted(CASES, key=lambda name: (not CASES[name].silent, ROWS.index(name)))


def test_every_row_is_here() -> None:
    assert sorted(CASES) == sorted(ROWS)
    assert {case.check.__module__ for case in CASES.values()} == {m.__name__ for m in MODULES}


def test_no_rule_stands_for_many_rows() -> None:
    switches = [case.without for case in CASES.values()]
    assert max(map(switches.count, switches)) <= 2
    assert len(set(switches)) >= len(ROWS) - 2


@pytest.mark.parametrize("name", NAMES)
def test_row(machine: Machine, name: str) -> None:
    CASES[name].check(machine)


@pytest.mark.parametrize("name", NAMES)
def test_row_is_wrong_without_its_rule(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = CASES[name]
    case.without(monkeypatch)
    with pytest.raises(case.fails) as failure:
        case.check(machine)
    assert case.says in str(failure.value), failure.value
