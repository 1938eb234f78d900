"""What every action on the calls of one module needs to know. Does nothing itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dit_graph.call.key import Signature
from dit_graph.config import GraphConfig
from dit_graph.memory.pool import Pool
from dit_graph.runner.entry import Entries
from dit_graph.runner.tally import Tally
from dit_graph.state.watcher import ModuleWatcher


@dataclass(eq=False)
class Graphed:
    """One module under dit_graph.

    Args:
        module: whose forward it is.
        original: the forward that was there before.
        signature: of that forward.
        eager: what answers a call that is not recorded, `original` unless a mode has its own.
        state: what the recordings of the module stand on.
    """

    name: str
    module: torch.nn.Module
    original: Callable[..., Any]
    signature: Signature
    config: GraphConfig
    pool: Pool
    state: ModuleWatcher
    tally: Tally

    def __post_init__(self) -> None:
        self.entries = Entries(self.tally)
        self.eager = self.original
        self.generators = self.pool.device.generators()
        self.stays_out: set[Any] = set()  # operations that could not be captured: breaks
        self.talks = False  # a collective was met: no process may run the forward twice

    @property
    def runs_once(self) -> bool:
        """Whether an eager call must not be tried again: it writes what no recording knows of."""
        return self.eager != self.original

    def seeds(self) -> list[torch.Tensor]:
        """Where the default generators stand."""
        return [generator.get_state() for generator in self.generators]

    def reseed(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states):
            generator.set_state(state)
