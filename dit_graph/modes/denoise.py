"""Denoising: which components repeat, and when a picture begins.

Scheduler, callbacks, guidance and the progress bar stay eager and are not touched; what is put on
the scheduler is an instance slot over `set_timesteps`, which marks a picture's start and says so to
every pipeline that shares the scheduler, and under `remove_syncs` those of `syncs.py`.
"""

import itertools
import logging
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

import torch

from dit_graph.config import Sync
from dit_graph.errors import ConfigError, DitGraphError
from dit_graph.modes.syncs import DeviceTimesteps
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
        try:
            pipe, _ = caller(sys._getframe(1))
        except Exception:  # an odd object on the stack
            pipe = None
        listeners = tuple(self._listeners)
        for listener in listeners:
            listener.begin(said=listener.said and pipe is None)
        out = self.original(*args, **kwargs)
        if self.timesteps is not None:
            try:
                self._place(self.timesteps, pipe, listeners)
            except Exception as error:  # the picture is drawn as without us
                self.timesteps.forget()
                log.debug("dit_graph: remove_syncs left a picture alone", exc_info=error)
        return out

    def _place(self, timesteps: DeviceTimesteps, pipe: Any, listeners: Any) -> None:
        asking = [one for one in listeners if one.removes and one.is_of(pipe)]
        if asking:
            timesteps.place(_weights_on(pipe), asking[0].removed)
        else:
            timesteps.forget()


class Pictures:
    """Numbers the pictures that a target begins.

    A number never comes twice, whichever target it is. `removes` are the host syncs to take out of
    the loop.
    """

    _numbers = count(1)

    def __init__(
        self, target: Any, begun: Callable[[], None], removes: Sequence[Sync] = ()
    ) -> None:
        self.removes = removes
        self.removed: Counter[str] = Counter()  # of the loop's waits, with every scheduler so far
        self.number: int | None = None  # of the last picture; None while nothing could say so
        self.said = False  # by the user, not by a scheduler
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
                self.begin()

    def hears(self, pipe: Any) -> bool:
        """Whether a call from `pipe` (None: a loop of the user's own) lies in a numbered picture.

        A pipeline that shares the module but not the scheduler begins its pictures unheard.
        """
        self.listen()
        if pipe is None or self._scheduler is None:
            return self.said
        heard = self._slot is not None and self._slot.leads_here()
        return heard and _scheduler_of(pipe) is self._scheduler

    @property
    def target_is_alive(self) -> bool:
        return self._target() is not None

    @property
    def syncs_removed(self) -> dict[str, int]:
        """What was taken out of the pictures so far, and how often."""
        return dict(self.removed)

    def is_of(self, target: Any) -> bool:
        return target is not None and self._target() is target

    def begin(self, said: bool = False) -> None:
        """A picture begins now; `said` where `handle.new_picture()` says so, or has said so for a
        loop of the user's own that sets its timesteps itself."""
        self.said = said
        self.number = next(self._numbers)
        try:
            self._begun()
        except DitGraphError:  # meant for the caller, under `strict`
            raise
        except Exception as error:
            log.debug("dit_graph: nobody could look at the slots", exc_info=error)

    def release(self) -> None:
        if self._slot is not None:
            self._slot.drop(self)
        self._slot = self._scheduler = self.number = None
        self.said = False


def _scheduler_of(target: Any) -> Any:
    """What says that a picture begins; a module's attribute of that name is its own affair."""
    if isinstance(target, torch.nn.Module):
        return None
    scheduler = getattr(target, "scheduler", None)
    return scheduler if callable(getattr(scheduler, "set_timesteps", None)) else None


def caller(frame: types.FrameType | None) -> tuple[Any, bool]:
    """The pipeline whose call leads here, None without one; and whether something may act between
    its steps: a callback that the call was given, or a guider, which adds and removes hooks."""
    pipeline = imported(PIPELINE)
    while frame is not None and pipeline:
        if frame.f_code.co_name == "__call__" and "self" in frame.f_code.co_varnames:
            here = frame.f_locals
            pipe = here.get("self")
            found = issubclass(type(pipe), pipeline)
            given = [here.get(name) for name in ("callback_on_step_end", "callback") if found]
            # Up to Python 3.12 a frame keeps what was looked at, old latents too. Nobody but the
            # frame, this name and the argument may refer to it: it is what `locals()` gives there.
            if type(here) is dict and sys.getrefcount(here) <= 3:
                here.clear()
            if found:
                acts = (*given, getattr(pipe, "guider", None))
                return pipe, any(act is not None for act in acts)
        frame = frame.f_back
    return None, False


def _weights_on(pipe: Any) -> torch.device:
    """Where the denoiser's weights are.

    diffusers' `_execution_device` asks every module of the pipeline about its hooks: 8 ms on the
    host of an H200 for DiT-XL/2, at which the device waits.
    """
    module = next(iter(denoisers(pipe).values()))
    found = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if found is None else found.device
