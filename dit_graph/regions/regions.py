"""A module's regions answer in the place of its recording: one forward in Python, blocks replayed.

The forward and the hooks around its blocks run as they are, so whatever they decide between two
blocks is decided anew at every call. Each block is a module with a runner of its own, reached
through a slot below all hooks of its forward.
"""

import fnmatch
import logging
import re
from collections.abc import Callable
from typing import Any

import torch

from dit_graph import breaks
from dit_graph.call.key import GraphKey
from dit_graph.links import AROUND, innermost
from dit_graph.regions.divided import Divided
from dit_graph.regions.find import cache_on, regions_of
from dit_graph.regions.region import CallOfAll, Region, current
from dit_graph.runner.entry import Entry
from dit_graph.runner.fallback import Fallback
from dit_graph.runner.proof import Gate
from dit_graph.runner.tally import Heard
from dit_graph.runner.target import Shared, Target
from dit_graph.slot import Slot

log = logging.getLogger("dit_graph")
MOST_PASSED = 64  # calls without a look at whether the whole can be recorded again
RESTED = 3  # looks at an unchanged state, after which the whole is tried again


class Regions:
    """The regions of one module, as they are laid out between the hooks that it has now."""

    def __init__(self, whole: Target) -> None:
        self._whole = whole
        self._shared = Shared()
        self._fallback = Fallback(whole)
        self._known: dict[int, Region] = {}  # by module: hooks that go come again
        self._now: list[Region] = []
        self._carried: list[Any] | None = None  # by all of them; None where that is to be seen
        self._stale = False  # hooks inside of a region may have come or gone
        self._within: dict[str, bool] = {}  # places of state, by whether they lie in a region
        self._of: dict[GraphKey | None, Divided] = {}
        self._wait, self._interval = 0, 1
        self._looked = False
        self._reason = ""  # for which they answered last
        self._rested = 0  # looks in a row that found the whole's state unchanged
        self.cache = cache_on(whole.module)

    @property
    def now(self) -> list[Region]:
        """Those that answer, in the order of the model."""
        return list(self._now)

    def refresh(self) -> None:
        """A picture begins, or the whole's state has changed: look at hooks again."""
        self._stale = True
        self._within.clear()
        self.cache = cache_on(self._whole.module)

    # ---- whether the whole is tried

    def look(self) -> bool:
        """Whether the whole module is to be looked at in this call, or its regions just go on.

        Its state changes at each of their calls, and to describe it is not free.
        """
        self._wait -= 1
        if self._carried is not None and self._hooks_changed():
            self._carried, self._reason = None, ""
            self._whole.state.start_over()
            self.cache = cache_on(self._whole.module)
            for region in self._now:
                region.step_aside()
        due = self._wait < 0 or self._carried is None
        self._looked = not self._whole.state.states or (due and not self.cache)
        return self._looked

    def unrested(self) -> str:
        """Why the whole is not tried yet, or an empty string: its state has not come to rest.

        Asked in a call that looks at it, once its state is compared.
        """
        self._rested = 0 if self._whole.state.change else self._rested + 1
        return self._reason if self._rested < RESTED else ""

    def holds(self, place: str) -> bool:
        """Whether what lies at a place of the whole's state lies in a region too."""
        if place not in self._within:
            paths = (path for path, _ in regions_of(self._whole.module))
            inside = (place[len(path) + 1 :] for path in paths if place.startswith(f"{path}."))
            first = (re.split(r"\W", rest, maxsplit=1)[0] for rest in inside)
            self._within[place] = any(name not in AROUND for name in first)
        return self._within[place]

    def _wait_on(self) -> None:
        """After a look that led here again: wait longer for the next, but soon where the state has
        come to rest."""
        if self._looked:
            self._interval = 1 if self._rested else min(MOST_PASSED, 2 * self._interval)
            self._wait = self._interval - 1

    # ---- one call

    def answer(
        self, entry: Entry | None, new: Callable[[], Entry], key: GraphKey | None, reason: str,
        args: Any, kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run the forward, with its regions replayed where they can be.

        Args:
            entry: of the call; one that is `new` where there is none yet and they do.
        """
        self._wait_on()
        with self._whole.pool.lock:
            regions = self._lay_out() if self._carried is None or self._stale else self._now
            divided = self._of.setdefault(key, Divided(self._new_gate()))
            divided.reason = reason
            why_not = divided.why_not() if regions else reason
            if not why_not and entry is None:
                entry = new()
            if entry is not None:
                entry.divided = None if why_not else divided
            self._reason = "" if why_not else reason
        if why_not or entry is None:
            return self._fallback(entry, why_not, args, kwargs)
        return self._answer(entry, divided, key, args, kwargs)

    def _answer(
        self, entry: Entry, divided: Divided, key: GraphKey | None, args: Any, kwargs: Any
    ) -> Any:
        gate = divided.timing
        call = CallOfAll(self._shared, gate is not None and gate.wants_eager(), divided.counter())
        timer = None if gate is None else self._whole.pool.device.timer()
        self._shared.now.group = self if key is None else key
        self._shared.now.extra = None if key is None else repr(key.context.extra_key)
        run = self._eager(call, args, kwargs)
        try:
            if timer is not None:
                timer.start()
            with breaks.answering(self._whole.signature.arguments(args, kwargs)):
                out = self._fallback.answer(run, (args, kwargs))
            if timer is not None:
                timer.stop()
        except BaseException:
            entry.counts.eager[divided.reason] += 1
            raise
        with self._whole.pool.lock:
            divided.count(entry, call)
            divided.learn(call, timer)
        return out

    def _eager(self, call: CallOfAll, args: Any, kwargs: Any) -> Callable[[], Any]:
        """What runs the forward, in which the regions know of this call."""

        def run() -> Any:
            before, current.call = current.call, call
            call.heard = Heard()
            if call.outside is not None:
                call.outside.go_on()
            try:
                return self._whole.eager(*args, **kwargs)
            finally:
                current.call = before
                if call.outside is not None:
                    call.outside.pause()

        return run

    def _new_gate(self) -> Gate | None:
        config, device = self._whole.config, self._whole.pool.device
        times = config.gate == "measure" and config.verify != "always" and device.time_counts
        return Gate(config.min_gain) if times else None

    # ---- which regions

    def _hooks_changed(self) -> bool:
        return any(a is not b for a, b in zip(self._carry(), self._carried or []))

    def _carry(self) -> list[Any]:
        """What stands at the forward of the whole and of each region: another one where hooks or
        patches come or go."""
        whole = self._whole.module
        own = whole.__dict__.get("forward"), type(whole).forward
        return [*own, *(region.module.__dict__.get("forward") for region in self._now)]

    def _lay_out(self) -> list[Region]:
        """Find the regions between the hooks that there are now."""
        there = set(map(id, self._whole.module.modules()))
        for gone in [key for key in self._known if key not in there]:
            self._known.pop(gone).close()
        found = list(filter(self._is_free, regions_of(self._whole.module)))
        for region in self._known.values():
            region.active = False
            region.step_aside()
        for path, module in found:
            if id(module) not in self._known:
                region = Region(path, module, self._whole, self._shared)
                self._known[id(module)] = region
                self._whole.tally.regions.append(region.tally)
        regions = [self._known[id(module)] for _, module in found]
        for region, (path, _) in zip(regions, found):
            region.active = True
            region.path = region.runner.target.path = path
            region.put_in()
        if regions != self._now:
            log.info("dit_graph: %s: %d regions", self._whole.name, len(regions))
            self._of = {key: Divided(self._new_gate()) for key in self._of}
            self._interval = 1
        self._now, self._stale = regions, False
        self._carried = self._carry()
        return regions

    def _is_free(self, part: tuple[str, torch.nn.Module]) -> bool:
        """Whether neither a pattern of the config nor a slot of somebody's is there."""
        path, module = part
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in self._whole.config.breaks):
            return False
        space, key = innermost(module)
        return not isinstance(space.get(key), Slot) or id(module) in self._known

    def close(self) -> None:
        for region in self._known.values():
            region.close()
