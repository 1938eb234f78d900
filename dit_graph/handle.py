"""The handle that `enable` gives: what it says of its recordings, and how it gives all back."""

import copy
import logging
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch

from dit_graph.config import GraphConfig
from dit_graph.devices import device_named
from dit_graph.errors import NotEnabled, NotReplayed
from dit_graph.explain import Explanation, explain
from dit_graph.explain.report import render
from dit_graph.install import Install, switched_off
from dit_graph.memory.pool import Pool
from dit_graph.modes.denoise import Pictures
from dit_graph.modes.warm_calls import runs
from dit_graph.runner.tally import Tally, totals
from dit_graph.warmup import record_all

log = logging.getLogger("dit_graph")


# the module keeps its install (slot → install → handles), so both go when the module goes
INSTALLS: "weakref.WeakValueDictionary[int, Install]" = weakref.WeakValueDictionary()
HANDLES: "weakref.WeakValueDictionary[int, Handle]" = weakref.WeakValueDictionary()
KEPT = "_dit_graph_handle"  # where a pipeline keeps its handle: its modules may be replaced
_GONE = "the pipeline or module of this handle is gone, and its recordings with it"


class Handle:
    """What `enable` gives: the graphs of one pipeline or module. A context manager too.

    Keeps neither modules nor recordings alive, only the counts: a module keeps its install, and
    that its handles.
    """

    def __init__(self, target: Any, config: GraphConfig) -> None:
        self.config = config
        self._target = weakref.ref(target)
        self._pool: weakref.ref[Pool] | None = None
        self._disabled = False
        self._last: tuple[dict[str, Any], str, Explanation] | None = None  # once disabled
        self._said: set[str] = set()
        self.installs: weakref.WeakValueDictionary[str, Install] = weakref.WeakValueDictionary()
        # of the pipeline, by name; an install may lie inside of one
        self.components: dict[str, weakref.ref[Any]] = {}
        self.tallies: dict[str, Tally] = {}
        shown_alone = config.remove_syncs == "auto"
        self.pictures = Pictures(target, self._check, config.syncs, shown_alone)

    def pool_on(self, device: torch.device) -> Pool:
        """The pool that all runners of this handle share, made for `device` when first asked."""
        pool = None if self._pool is None else self._pool()
        if pool is None:
            found = device_named(self.config.device, device)
            budget = self.config.budget_on(found.total_bytes())
            pool = Pool(found, self.config.max_graphs, budget)
            self._pool = weakref.ref(pool)
        return pool

    def new_picture(self) -> None:
        """Does nothing: the module's state is compared at every call. Kept for who calls it.

        Raises:
            NotEnabled: after `disable`, or when the target is gone.
        """
        self._alive()

    def warmup(
        self,
        sizes: Sequence[tuple[int, int]] | None = None,
        *,
        inputs: Sequence[Any] | None = None,
        **pipeline_kwargs: Any,
    ) -> None:
        """Record before the first real call: until each signature that comes is recorded. What
        cannot be is logged, by component, signature and reason.

        Args:
            sizes: (height, width) in pixels; the pipeline runs two steps a size, largest first,
                with `output_type="latent"`, and again where a signature came once in them; its
                scheduler, generators and hooks stay as they were.
            inputs: for a bare module: one dict of keyword arguments, or tuple, a signature.
            pipeline_kwargs: what the pipeline is called with, for example `prompt="a fox"`; in
                prefill `batch=1`, and all buckets are recorded.

        Raises:
            ConfigError: neither or both of sizes and inputs, or a pipeline without sizes.
            NotEnabled: after `disable`, or when the target is gone.
        """
        target = self._alive()
        installs = tuple(self.installs.values())
        bodies = [install.module for install in installs]
        calls = runs(target, bodies, self.config, sizes, inputs, pipeline_kwargs)
        if switched_off():
            log.warning("dit_graph: nothing is recorded by warmup: %s", switched_off())
            return
        try:
            record_all(installs, calls)
        finally:
            self.pictures.listen()  # the pipeline's own scheduler is back

    def stats(self) -> dict[str, Any]:
        """`calls`, `cold`, `captures`, `replays` and `dropped` as ints, `eager` as reason → count.

        A dropped replay was launched while the module was in another state, and its call was
        answered anew: it is counted there too. A call that the regions answered is a replay where
        at least one ran and all that ran were replayed. Where there are regions, `regions` has the
        same counts of theirs.
        """
        return copy.deepcopy(self._last[0]) if self._last else totals(self.tallies.values())

    def report(self) -> str:
        """What is recorded, what is not and why, as text; after `disable` what its counts were."""
        return self._last[1] if self._last else self._render()

    def _render(self) -> str:
        return render(self.installs.values(), self._notes(), self._syncs_removed())

    def explain(self, *, time: bool = False) -> Explanation:
        """The segment map of every recording; `str`, `to_dict` and `plot` show it.

        Args:
            time: also run the steps of each recording one by one and take their times, where a run
                has no effect; the others say why not. After `disable` there are none to run.
        """
        if self._last:
            return self._last[2]
        removed = self._syncs_removed()
        return explain(self.installs.values(), self._notes(), time, removed)

    def disable(self) -> None:
        """Give every forward back; see `dit_graph.disable`."""
        if self._disabled:
            return
        self._disabled = True
        self.pictures.release()
        target = self._target()
        if HANDLES.get(id(target)) is self:  # a later `enable` may have made another
            del HANDLES[id(target)]
            vars(target).pop(KEPT, None)
        pool = None if self._pool is None else self._pool()
        installs = tuple(self.installs.values())
        for install in installs:
            if self in install.handles:
                install.handles.remove(self)
            drop_dead(install)
            if not install.handles and not install.removed:
                install.remove()
                INSTALLS.pop(id(install.module), None)
        if pool is not None:
            pool.device.trim()
        self._last = self.stats(), self._render(), self.explain()
        self.installs.clear()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()  # a copy of the pipeline is not graphed

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    def covers(self, modules: dict[str, Any]) -> bool:
        """Whether these are the modules that are graphed, by name."""
        return {name: install.module for name, install in self.installs.items()} == modules

    def is_of(self, target: Any) -> bool:
        """An id comes again once its object is gone, and a shared module keeps the handle."""
        return self._target() is target

    def _alive(self) -> Any:
        target = self._target()
        if self._disabled:
            raise NotEnabled("this handle was disabled; call enable again")
        if target is None:
            raise NotEnabled(_GONE)
        return target

    def _check(self) -> None:
        """A picture begins: does every call still lead here?"""
        if switched_off():
            return
        notes = [note for install in self.installs.values() if (note := install.check())]
        notes += self._replaced()
        for note in notes:
            if note not in self._said:
                self._said.add(note)
                log.warning("dit_graph: %s", note)
        if notes and self.config.strict:
            raise NotReplayed("; ".join(notes))

    def _notes(self) -> list[str]:
        """What stands between the target and its recordings, and what is left of modules that are
        gone."""
        notes = self._replaced() if self._target() is not None else [_GONE]
        for name, tally in self.tallies.items():
            if name not in self.installs:
                counts = totals([tally])
                eager = counts.pop("eager")
                counts.pop("regions", None)
                said = [f"{what} {count}" for what, count in counts.items()]
                said += [f"eager {count}: {reason}" for reason, count in eager.items()]
                notes.append(f"{name} is gone: {', '.join(said)}")
        return notes

    def _syncs_removed(self) -> dict[str, int] | None:
        removed = self.pictures.syncs_removed
        return (
            removed
            if removed or (self.config.syncs and self.config.remove_syncs != "auto")
            else None
        )

    def _replaced(self) -> list[str]:
        target = self._target()
        if target is None or isinstance(target, torch.nn.Module):
            return []
        found = []
        for name, component in self.components.items():
            now = getattr(target, name, None)
            if now is not component():
                by = f" by {type(now).__name__}"
                found.append(f"not installed: {name} was replaced{by} after enable; enable again")
        return found


def drop_dead(install: Install) -> None:
    """Disable the handles of pipelines that are gone: nobody else can."""
    for handle in tuple(install.handles):
        if not handle.pictures.target_is_alive:
            cast(Handle, handle).disable()
