"""How a call becomes a Tape: the one question that every backend answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from dit_graph.capture.capture import Capture
from dit_graph.config import GraphConfig
from dit_graph.devices.base import Device, Memory


class Backend(ABC):
    """Keeps no state.

    `records` is False for a backend that never makes a tape, `breakable` for one whose tapes are
    one segment each.
    """

    name: str
    records = True
    breakable = True

    def new_capture(
        self, device: Device, memory: Memory, static: list[torch.Tensor],
        module: torch.nn.Module, config: GraphConfig,
    ) -> Capture:  # fmt: skip
        known = [*module.parameters(), *module.buffers()]
        names = {id(child): path for path, child in module.named_modules()}
        return Capture(device, memory, static, known, self.breakable, config.breaks, names)

    @abstractmethod
    def record(
        self, capture: Capture, module: torch.nn.Module, forward: Callable[..., Any],
        args: list[Any], kwargs: dict[str, Any], config: GraphConfig,
    ) -> Any:  # fmt: skip
        """Run `forward` once, leave the steps in `capture.tape` and return its result."""
