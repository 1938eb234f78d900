"""One module whose forward is recorded, and all that the actions on its calls share.

Does nothing by itself.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from dit_graph.call.key import GraphKey, Signature
from dit_graph.config import GraphConfig
from dit_graph.memory.pool import Pool
from dit_graph.runner.entry import Entries, Entry
from dit_graph.runner.tally import Tally
from dit_graph.state.watcher import StateWatcher


@dataclass(eq=False)
class Target:
    """A module whose calls are recorded and replayed.

    Args:
        module: whose forward it is.
        original: the forward that was there before.
        signature: of that forward.
        eager: what answers a call that is not recorded, `original` unless a mode has its own.
    """

    name: str
    module: torch.nn.Module
    original: Callable[..., Any]
    signature: Signature
    config: GraphConfig
    pool: Pool
    tally: Tally

    def __post_init__(self) -> None:
        own = functools.partial(Entries, self.tally)
        self.state = StateWatcher(self.module, self.pool.device.on, own)
        self.eager = self.original
        self.generators = self.pool.device.generators()
        self.stays_out: set[Any] = set()  # operations that could not be captured: breaks
        self.has_collectives = False  # a collective was met: no process may run the forward twice

    @property
    def entries(self) -> Entries:
        """Of the state that the module was in when it was compared last."""
        entries: Entries = self.state.now.owned
        return entries

    def every_entry(self) -> Iterator[tuple[GraphKey, Entry]]:
        """Of all states that are known, the last used one first."""
        return chain.from_iterable(state.owned.items() for state in self.state.states)

    @property
    def runs_once(self) -> bool:
        """Whether an eager call must not be made a second time.

        In prefill the eager answer is the caller's own call, which writes the caller's cache: no
        recording knows what it has written when it fails half-way.
        """
        return self.eager != self.original

    def seeds(self) -> list[torch.Tensor]:
        """The states of the default generators, for `reseed`."""
        return [generator.get_state() for generator in self.generators]

    def reseed(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states):
            generator.set_state(state)
