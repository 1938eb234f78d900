"""This backend never records: every call is eager."""

from collections.abc import Callable
from typing import Any

import torch

from dit_graph.backends.base import Backend
from dit_graph.capture.capture import Capture
from dit_graph.config import GraphConfig


class Eager(Backend):
    name = "eager"
    records = False

    def record(
        self, capture: Capture, module: torch.nn.Module, forward: Callable[..., Any],
        args: list[Any], kwargs: dict[str, Any], config: GraphConfig,
    ) -> Any:  # fmt: skip
        raise AssertionError("the eager backend records nothing")
