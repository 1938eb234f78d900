"""The last calls of a runner: whether recordings push each other out faster than they are used."""

from collections import deque
from typing import Any

WINDOW = 64
_OFTEN = 4  # of these calls: a signature that would be replayed at least twice


class RecentCalls:
    """Which entries the last calls were of, and which of them were replayed."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Any, bool]] = deque(maxlen=WINDOW)

    def note(self, entry: Any, replayed: bool) -> None:
        self._calls.append((entry, replayed))

    def clear(self) -> None:
        """What was recorded has gone: nothing to judge by."""
        self._calls.clear()

    def thrashing(self, entry: Any, idle: int) -> str:
        """Why a full memory should take no new recording of `entry`, or an empty string.

        Args:
            idle: for how many calls the recordings that would make room have not been used.
        """
        hits = sum(replayed for _, replayed in self._calls)
        if len(self._calls) < WINDOW or 2 * hits >= WINDOW:
            return ""
        came = sum(other is entry for other, _ in self._calls)
        if idle >= WINDOW and came >= _OFTEN:
            return ""
        return (
            "thrashing: recordings push each other out before they are replayed; raise"
            " memory_budget or max_graphs, or use fewer sizes and caption lengths"
        )
