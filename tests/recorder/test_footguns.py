"""Every hard case that shows on the recorder: right with its rule, and seen to be wrong without.

The silent ones come first: a wrong value and no error.
"""

import pytest

from tests.footguns import adapters, aliasing, company, failures, host_values, signatures
from tests.footguns.case import CASES
from tests.pair import Machine

ROWS = [
    "1", "2", "6", "9", "10", "11", "12", "15",
    "16", "18", "20", "21", "22", "24", "25", "27", "28", "S1", "S4", "S7", "S9", "S10",
    "31", "32", "33", "34", "39/40", "41/S12", "S13",
    "57", "58", "59", "63", "64/65", "101",
    "70/72", "73", "74", "75/76", "77/78/79", "81", "82",
    "86", "87", "N1", "N2", "N3", "N4", "N5", "N6", "91", "98/99",
]  # fmt: skip
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
