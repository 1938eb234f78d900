"""The whole call is one break: the same buffers and replay path, and no graph."""

from collections.abc import Callable
from typing import Any

import torch

from dit_graph.backends.base import Backend
from dit_graph.capture import Capture
from dit_graph.config import GraphConfig


class Debug(Backend):
    name = "debug"

    def record(
        self,
        capture: Capture,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        config: GraphConfig,
    ) -> Any:
        with capture.recording():
            return capture.marked(forward, args, kwargs, pure=False, reason="backend debug")
