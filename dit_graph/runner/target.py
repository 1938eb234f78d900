"""One module whose forward is recorded, and all that the actions on its calls share.

Does nothing by itself.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch

from dit_graph.call.key import Call, GraphKey, Signature
from dit_graph.config import GraphConfig
from dit_graph.memory.pool import Generation, Pool
from dit_graph.runner.entry import Entries, Entry
from dit_graph.runner.tally import Tally
from dit_graph.state.watcher import StateWatcher
from dit_graph.tape.buffers import StaticBuffers


class _Now(threading.local):
    group: object = None  # its signature, whose regions count as one
    extra: Any = None  # what `extra_key` gave for it


@dataclass(eq=False)
class Shared:
    """What the regions of one module have in common.

    Args:
        now: of the whole module's call that runs on this thread.
        staged: arguments by key: one region runs at a time, so all with one key stage them in the
            same memory.
    """

    now: _Now = field(default_factory=_Now)
    staged: "WeakValueDictionary[GraphKey, StaticBuffers]" = field(
        default_factory=WeakValueDictionary
    )
    said: set[str] = field(default_factory=set)
    stays_out: set[Any] = field(default_factory=set)


@dataclass(eq=False)
class Target:
    """A module whose calls are recorded and replayed.

    Args:
        module: whose forward it is.
        original: the forward that was there before.
        signature: of that forward.
        path: of a region, in the module that is enabled.
        shared: of a region.
        eager: what answers a call that is not recorded, `original` unless a mode has its own.
        said: what was logged.
        stays_out: operations that could not be captured: breaks.
    """

    name: str
    module: torch.nn.Module
    original: Callable[..., Any]
    signature: Signature
    config: GraphConfig
    pool: Pool
    tally: Tally
    path: str = ""
    shared: Shared | None = None

    def __post_init__(self) -> None:
        own = functools.partial(Entries, self.tally)
        region = self.shared is not None
        self.state = StateWatcher(self.module, self.pool.device.on, own, region)
        self.eager = self.original
        self.generators = self.pool.device.generators()
        self.said: set[str] = set() if self.shared is None else self.shared.said
        self.stays_out: set[Any] = set() if self.shared is None else self.shared.stays_out
        self.divides = False  # it has regions
        self.has_collectives = False  # a collective was met: no process may run the forward twice

    def new_generation(self) -> Generation:
        """Where the next recording goes. Regions lie together, but for one whose forward writes
        Python state: what it keeps would take the others' memory along."""
        if self.shared is None:
            return self.pool.generation()
        return self.pool.generation(self.shared.now.group, alone=self.state.written)

    def staged(self, call: Call) -> StaticBuffers:
        """Memory for a call's tensors."""
        if self.shared is None:
            return StaticBuffers(call.tensors)
        found = self.shared.staged.get(call.key)
        if found is None:
            self.shared.staged[call.key] = found = StaticBuffers(call.tensors)
        return found

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
