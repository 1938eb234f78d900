"""Denoising: which components repeat, and when a picture begins.

Scheduler, callbacks, guidance and the progress bar stay eager and are not touched; what is put on
the scheduler is an instance slot over `set_timesteps`, which tells every pipeline that shares the
scheduler that a picture begins, and under `remove_syncs` those of `syncs.py`.
"""

import itertools
import logging
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from dit_graph.config import Sync
from dit_graph.errors import ConfigError, DitGraphError
from dit_graph.modes.syncs import DeviceTimesteps, not_shown
from dit_graph.slot import Slot
from dit_graph.state.libraries import MODEL, PIPELINE, imported, is_pipeline

log = logging.getLogger("dit_graph")
_DENOISERS = ("transformer", "unet", "controlnet")


def denoisers(target: Any) -> dict[str, torch.nn.Module]:
    """The modules of a pipeline that run once a step, or the module itself, by name."""
    if isinstance(target, torch.nn.Module):
        if isinstance(target, torch.jit.ScriptModule):
            raise ConfigError("a ScriptModule has no Python forward; enable what it was made of")
        if getattr(target.forward, "__func__", None) is torch.nn.Module.forward:
            raise ConfigError(f"{type(target).__name__} has no forward; enable a module that has")
        return {type(target).__name__: target}
    if not is_pipeline(target):
        raise ConfigError(
            f"enable takes a diffusers pipeline or a torch.nn.Module, got {type(target).__name__}"
        )
    components: dict[str, Any] = cast(Any, target).components
    found = {
        name: part
        for name, part in components.items()
        if name.startswith(_DENOISERS) and isinstance(part, imported(MODEL))
    }
    if not found:
        parts = ", ".join(components)
        raise ConfigError(
            f"{type(target).__name__} has no transformer, unet or controlnet ({parts})"
        )
    return cast(dict[str, torch.nn.Module], found)


class TimestepsSlot(Slot):
    """The one slot over a scheduler's `set_timesteps`, however many pipelines share it."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler, "set_timesteps", self._begin)
        # weak: a scheduler may outlive a pipeline that used it
        self._listeners: weakref.WeakSet[Pictures] = weakref.WeakSet()
        self._scheduler = scheduler
        self.timesteps: DeviceTimesteps | None = None

    @classmethod
    def on(cls, scheduler: Any) -> "TimestepsSlot":
        """The slot that is in the scheduler, or a new one."""
        found = scheduler.__dict__.get("set_timesteps")
        if isinstance(found, cls) and found.active:
            return found
        slot = cls(scheduler)
        slot.install()
        return slot

    def add(self, listener: "Pictures") -> None:
        self._listeners.add(listener)
        self._remove_syncs()

    def drop(self, listener: "Pictures") -> None:
        """The slot goes away with its last listener."""
        self._listeners.discard(listener)
        self._remove_syncs()
        if not self._listeners:
            self.remove()

    def _remove_syncs(self) -> None:
        """Those that any listener wants removed; a shared scheduler has one loop at a time."""
        wanted = {sync for listener in self._listeners for sync in listener.removes}
        if self.timesteps is not None and self.timesteps.switches != wanted:
            self.timesteps.remove()
            self.timesteps = None
        if wanted and self.timesteps is None:
            self.timesteps = DeviceTimesteps(self._scheduler, wanted)

    def _begin(self, *args: Any, **kwargs: Any) -> Any:
        listeners = tuple(self._listeners)
        for listener in listeners:
            listener.begin()
        out = self.original(*args, **kwargs)
        if self.timesteps is not None:
            try:
                self._place(self.timesteps, _pipeline_at(sys._getframe(1)), listeners)
            except Exception as error:  # the picture is drawn as without us
                self.timesteps.forget()
                log.debug("dit_graph: remove_syncs left a picture alone", exc_info=error)
        return out

    def _place(self, timesteps: DeviceTimesteps, pipe: Any, listeners: Any) -> None:
        asking = next((one for one in listeners if one.removes and one.is_of(pipe)), None)
        if asking is None:
            timesteps.forget()
        elif asking.shown_alone and (reason := not_shown(self._scheduler, pipe)):
            timesteps.forget()
            asking.removed[f"off: {reason}"] += 1
        else:
            timesteps.place(_weights_on(pipe), asking.removed)


class Pictures:
    """Hears when a target begins a picture, through its scheduler.

    Args:
        begun: called then.
        removes: the host syncs to take out of the loop.
        shown_alone: only where that was shown to leave pictures the same.
    """

    def __init__(
        self, target: Any, begun: Callable[[], None], removes: Sequence[Sync] = (),
        shown_alone: bool = False,
    ) -> None:  # fmt: skip
        self.removes = removes
        self.shown_alone = shown_alone
        self.removed: Counter[str] = Counter()  # of the loop's waits, with every scheduler so far
        self._target = weakref.ref(target)
        self._begun = begun
        self._scheduler: Any = None
        self._slot: TimestepsSlot | None = None
        self.listen()

    def listen(self) -> None:
        """Put the slot on the scheduler that the target has now."""
        scheduler = _scheduler_of(self._target())
        if scheduler is not self._scheduler:
            self.release()
            self._scheduler = scheduler
            if scheduler is not None:
                self._slot = TimestepsSlot.on(scheduler)
                self._slot.add(self)

    @property
    def target_is_alive(self) -> bool:
        return self._target() is not None

    @property
    def syncs_removed(self) -> dict[str, int]:
        """What was taken out of the pictures so far, and how often."""
        return dict(self.removed)

    def is_of(self, target: Any) -> bool:
        return target is not None and self._target() is target

    def begin(self) -> None:
        """A picture begins now."""
        try:
            self._begun()
        except DitGraphError:  # meant for the caller, under `strict`
            raise
        except Exception as error:
            log.debug("dit_graph: nobody could look at the slots", exc_info=error)

    def release(self) -> None:
        if self._slot is not None:
            self._slot.drop(self)
        self._slot = self._scheduler = None


def _scheduler_of(target: Any) -> Any:
    """What says that a picture begins; a module's attribute of that name is its own affair."""
    if isinstance(target, torch.nn.Module):
        return None
    scheduler = getattr(target, "scheduler", None)
    return scheduler if callable(getattr(scheduler, "set_timesteps", None)) else None


def _pipeline_at(frame: types.FrameType | None) -> Any:
    """The pipeline whose call leads here; None in a loop of the user's own."""
    pipeline = imported(PIPELINE)
    while frame is not None and pipeline:
        if frame.f_code.co_name == "__call__" and "self" in frame.f_code.co_varnames:
            here = frame.f_locals
            pipe = here.get("self")
            # Up to Python 3.12 a frame keeps what was looked at, old latents too. Nobody but the
            # frame, this name and the argument may refer to it: it is what `locals()` gives there.
            if type(here) is dict and sys.getrefcount(here) <= 3:
                here.clear()
            if issubclass(type(pipe), pipeline):
                return pipe
        frame = frame.f_back
    return None


def _weights_on(pipe: Any) -> torch.device:
    """Where the denoiser's weights are.

    diffusers' `_execution_device` asks every module of the pipeline about its hooks: 8 ms on the
    host of an H200 for DiT-XL/2, at which the device waits.
    """
    module = next(iter(denoisers(pipe).values()))
    found = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if found is None else found.device
