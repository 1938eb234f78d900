"""Tells counts and recordings in short, and sums up the counts of several processes."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from dit_graph.explain.read import explain
from dit_graph.explain.text import lines


def summed(stats: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the counts of several processes; those of none are zeros."""
    stats = list(stats)
    found = _summed(stats)
    if regions := [one["regions"] for one in stats if "regions" in one]:
        found["regions"] = _summed(regions)
    return found


def _summed(stats: Iterable[dict[str, Any]]) -> dict[str, Any]:
    sums = Counter({"calls": 0, "cold": 0, "captures": 0, "replays": 0, "dropped": 0})
    eager: Counter[str] = Counter()
    for one in stats:
        sums.update({name: one[name] for name in sums})
        eager.update(one["eager"])
    return {**sums, "eager": dict(eager)}


def render(installs: Iterable[Any], notes: list[str], removed: dict[str, int] | None = None) -> str:
    """Tell the facts in short. `removed` is None where no host syncs are to be removed."""
    return "\n".join(lines(explain(installs, notes, False, removed), brief=True))
