"""Which of the states that its recordings were made in a module is in now."""

import re
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dit_graph.state.blockers import blocker, global_hook, parallel
from dit_graph.state.differences import differences
from dit_graph.state.snapshot import Snapshot
from dit_graph.state.view import STORAGE, View

MAX_STATES = 8  # that are kept of a module; the least recently used one makes room
CAREFUL = 17  # the call that finds a change and 16 after it compare before they launch
WINDOW, MANY = 8, 3  # so many new states within so many calls: nobody sets that by hand


class Owned(Protocol):
    """What belongs to a state: the recordings that were made in it."""

    @property
    def recorded(self) -> bool: ...
    def forget_recordings(self) -> None: ...


class State:
    """One state of a module, remembered by its description. Keeps nothing of the module alive."""

    def __init__(self, owned: Any, description: dict[Any, Any]) -> None:
        self.owned = owned
        self.description = description  # names modules, classes and tensors by id
        self.memory: list[StorageWeakRef] = []  # of the tensors: says when one's is gone
        self.blocker: str | None = None
        self.parallel: str | None = None


class _Owner(weakref.ref[Any]):
    """Tells when a module or class is gone."""

    __slots__ = ("key",)

    def __init__(self, one: Any, gone: Callable[[Any], None]) -> None:
        super().__init__(one, gone)  # type: ignore[call-arg]
        self.key = id(one)


class StateWatcher:
    """Compares a module with the states that are known of it.

    Args:
        module: whose state it is.
        device: where its weights must be to be recorded.
        own: makes what belongs to a new state.
        region: the module is one below all hooks of its own forward, which are no part of it.
    """

    def __init__(
        self, module: torch.nn.Module, device: torch.device, own: Callable[[], Owned],
        region: bool = False,
    ) -> None:  # fmt: skip
        self._module = module
        self._region = region
        self._device = device
        self._own = own
        self._views: list[View] = []  # of the module as it was last; none where a part of it went
        self._owners: dict[int, _Owner] = {}
        self._gone: set[int] = set()
        self._written: set[str] = set()  # by the forward itself, by place
        self._careful = 0
        self.compared = False  # in this call
        self.change = ""  # what differed in it
        self._stayed = False  # the weights lie where they lay, as this call has seen
        self._new = deque([""] * WINDOW, WINDOW)  # a call's new state, by the place that changed
        self.states: list[State] = []  # the last used one first, which is the module's now

    @property
    def now(self) -> State:
        return self.states[0]

    @property
    def blocker(self) -> str | None:
        """Why nothing can be replayed now, or None."""
        return self.now.parallel or global_hook() or self.now.blocker

    @property
    def written(self) -> bool:
        """Whether the forward was seen to write Python state."""
        return bool(self._written)

    @property
    def parallel(self) -> bool:
        """Whether the module is split over processes, which its forward then talks with."""
        return bool(self.states) and self.now.parallel is not None

    @property
    def unsteady(self) -> str:
        """The place that changes at every call, so that no state gets recordings now."""
        new = list(filter(None, self._new))
        return new[-1] if len(new) >= MANY else ""

    def begin(self) -> None:
        """A call comes."""
        self._new.append("")
        self.compared = self._stayed = False
        self.change = ""
        self._careful = max(0, self._careful - 1)

    def start_over(self) -> None:
        """Hooks came or went: what changed before that says nothing of what comes."""
        self._new.extend([""] * WINDOW)

    @property
    def may_wait(self) -> bool:
        """Whether a replay may be launched before the state is compared.

        Not where weights have moved, as they may be freed; and not for some calls after a change,
        so that of states in turns few replays are dropped.
        """
        view = self._view
        if self.compared or self._careful or view is None:
            return False
        self._stayed = view.weights_stayed()
        return self._stayed

    def compare(self) -> str:
        """Find out which state the module is in; returns what differs from the last one."""
        self.compared = True
        view = self._view
        if view is not None and view.is_same() and (self._stayed or view.weights_stayed()):
            return ""
        view, found = self._read()
        self.change = self._enter(view, found)
        self._forget_gone()
        return self.change

    @property
    def _view(self) -> View | None:
        """What the module held when it was last read; None once a part of that is gone."""
        views = tuple(self._views)
        return views[0] if views and not self._gone else None

    def _read(self) -> tuple[View, dict[Any, Any]]:
        """The module as it is now, and the description of that."""
        view = next(iter(tuple(self._views)), None)
        if view is None:
            view = View(self._module, self._region)
        else:
            view.refresh()
        self._views[:] = [view]
        views, gone = self._views, self._gone

        def died(owner: _Owner) -> None:
            gone.add(owner.key)
            views.clear()  # which keeps the parts of what has died

        for one in view.owners():
            if (known := self._owners.get(id(one))) is None or known() is None:
                self._owners[id(one)] = _Owner(one, died)
        return view, view.description()

    def _enter(self, view: View, found: dict[Any, Any]) -> str:
        if not self.states:
            self._add(view, found)
            return ""
        places = [place for place, _ in self._differences(view, found)]
        if not places:
            return ""
        self._careful = CAREFUL
        if all(map(self._is_written, places)):
            self._take_over(view, found, grew=False)
            return places[0]
        known = next((state for state in self.states if state.description == found), None)
        if known is None:
            self._add(view, found)
            self._new[-1] = "" if self.now.blocker else places[0]  # where nothing is recorded
        else:
            self.states.remove(known)
            self.states.insert(0, known)
        return places[0]

    def _is_written(self, place: str) -> bool:
        """Whether the forward itself writes there, or into what lies there."""
        return any(re.fullmatch(re.escape(w) + r"([.\[ ].*)?", place) for w in self._written)

    def _differences(self, view: View, found: dict[Any, Any]) -> list[tuple[str, bool]]:
        """Where the module differs from the state that it was in last, and whether a memo grew."""
        before = self.now.description
        if found == before:
            return []
        places: list[tuple[str, bool]] = []
        for key in {**before, **found}:
            if (old := before.get(key)) != (new := found.get(key)):
                if key in view.nodes and old is not None:
                    places += differences(old, new, view.nodes[key].path)
                elif isinstance(key, tuple) and None not in (old, new):
                    name = STORAGE if key[0] == "tensor" else f"{key[1].__name__}.{key[2]}"
                    places.append((name, False))
        named = [(place.lstrip("."), grew) for place, grew in places]
        return named or [(STORAGE, False)]  # inside a wrapper, which is the object that it was

    def _add(self, view: View, found: dict[Any, Any]) -> None:
        state = State(self._own(), found)
        state.memory = _memory(view)
        state.parallel = parallel(self._module)
        state.blocker = self._blocked(view)
        self.states.insert(0, state)
        if len(self.states) > MAX_STATES:
            idle = [state for state in self.states[1:] if not state.owned.recorded]
            self._forget((idle or self.states)[-1])

    def _blocked(self, view: View) -> str | None:
        return view.blocker or blocker(self._module, self._device, self._region)

    def _forget(self, state: State) -> None:
        self.states.remove(state)
        state.owned.forget_recordings()

    def _forget_gone(self) -> None:
        """States that stood on what is gone cannot come back."""
        gone = set(self._gone)
        self._gone -= gone
        for state in self.states[1:]:
            if state.description.keys() & gone or any(memory.expired() for memory in state.memory):
                self._forget(state)
        for key in gone:
            if (owner := self._owners.get(key)) is not None and owner() is None:
                del self._owners[key]

    def snapshot(self) -> Snapshot:
        """What the module holds, before a call that may write into it. After `compare` only."""
        view = self._view
        return Snapshot(self._read()[0] if view is None else view)

    def moved(self) -> bool:
        """Whether the module differs from what was compared last, inside a call too."""
        view = self._view
        return view is None or not (view.is_same() and view.weights_stayed())

    def accept(self) -> tuple[list[str], list[str]]:
        """Take over what a forward wrote itself; returns where, and where it wrote before, too.

        Recordings that were made before stay right where its memo tables only grew.
        """
        view = self._view
        if view is not None and view.is_same() and view.weights_stayed():
            return [], []
        view, found = self._read()
        changes = self._differences(view, found)
        places = [place for place, _ in changes]
        repeated = [place for place in places if place in self._written]
        self._written.update(places)
        if places:
            self._take_over(view, found, all(grew for _, grew in changes))
        return places, repeated

    def _take_over(self, view: View, found: dict[Any, Any], grew: bool) -> None:
        """What has changed is the forward's own doing: in all states the same."""
        before = dict(self.now.description)
        changed = [key for key in {**before, **found} if before.get(key) != found.get(key)]
        for state in self.states:
            for key in changed:
                if state.description.get(key) == before.get(key):
                    state.description[key] = found.get(key)
                    if key not in found:
                        del state.description[key]
            if not grew:
                state.owned.forget_recordings()
        self.now.description = found
        self.now.memory = _memory(view)
        self.now.blocker = self._blocked(view)

    def needs_grad(self, tensors: list[torch.Tensor]) -> bool:
        view = self._view
        weights = self._module.parameters() if view is None else view.tensors()
        return any(t.requires_grad for t in (*tensors, *weights))

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Tensors of the module that a forward may write."""
        view = self._view
        if view is not None and not view.has_buffers:
            return []
        found = self._module.buffers() if view is None else view.tensors()
        return [t for t in found if not isinstance(t, torch.nn.Parameter)]

    def weights(self) -> list[torch.Tensor]:
        return [*self._module.parameters(), *self._module.buffers()]


def _memory(view: View) -> list[StorageWeakRef]:
    """Weak references to what its tensors lie in; one to a tensor would forbid `swap_tensors`."""
    storages = {id(t): t.untyped_storage() for t in view.tensors()}
    return list(map(StorageWeakRef, storages.values()))
