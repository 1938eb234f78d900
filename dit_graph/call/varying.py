"""Finds the plain argument that is another one at every call: named, not a graph each."""

from collections import deque

from dit_graph.call.key import Call, GraphKey

_RECENT = 8
_CALLS = 1024  # kinds of calls that are remembered
_MANY = 3  # other values among the recent calls that still look like a setting


class VaryingValues:
    """Remembers, per call without its plain values, which keys came lately."""

    def __init__(self) -> None:
        self._recent: dict[GraphKey, deque[GraphKey]] = {}

    def varying(self, call: Call) -> str:
        """Why this call should not become a recording of its own, or an empty string."""
        rest = call.key.without_values()
        if rest == call.key:
            return ""
        if len(self._recent) > _CALLS:
            self._recent.clear()
        recent = self._recent.setdefault(rest, deque(maxlen=_RECENT))
        before = recent[-1] if recent else call.key
        recent.append(call.key)
        if before == call.key or len(set(recent)) <= _MANY:
            return ""
        pairs = enumerate(zip(before.leaves, call.key.leaves))
        index = next((i for i, (a, b) in pairs if a != b), None)
        if index is None:
            return "extra_key is another value at every call"
        return f"{call.leaf_name(index)} is another value at every call; pass it as a tensor"
