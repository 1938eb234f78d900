"""How a call becomes a Tape: the one question that every backend answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from dit_graph.capture.capture import Capture


class Backend(ABC):
    """Keeps no state.

    `records` is False for a backend that never makes a tape, `breakable` for one whose tapes are
    one segment each.
    """

    name: str
    records = True
    breakable = True

    @abstractmethod
    def record(self, capture: Capture, forward: Callable[[], Any]) -> Any:
        """Run `forward` once, leave the steps in `capture.tape` and return its result."""
