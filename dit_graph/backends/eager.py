"""This backend never records: every call is eager."""

from collections.abc import Callable
from typing import Any

from dit_graph.backends.base import Backend
from dit_graph.capture.capture import Capture


class Eager(Backend):
    name = "eager"
    records = False

    def record(self, capture: Capture, forward: Callable[[], Any]) -> Any:
        raise AssertionError("the eager backend records nothing")
