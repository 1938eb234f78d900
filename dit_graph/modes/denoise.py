"""Denoising: which components repeat, when a picture begins, and how to warm up.

Scheduler, callbacks, guidance and the progress bar stay eager and are not touched; the only thing
put on the scheduler is an instance slot over `set_timesteps`, which marks a picture's start.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from diffusers import DiffusionPipeline, ModelMixin

from dit_graph.errors import ConfigError
from dit_graph.key import tensors_of
from dit_graph.slot import Slot

_DENOISERS = ("transformer", "unet", "controlnet")


def denoisers(target: Any) -> dict[str, torch.nn.Module]:
    """The modules of a pipeline that run once a step, or the module itself, by name."""
    if isinstance(target, torch.nn.Module):
        return {type(target).__name__: target}
    if not isinstance(target, DiffusionPipeline):
        raise ConfigError(
            f"enable takes a diffusers pipeline or a torch.nn.Module, got {type(target).__name__}"
        )
    components: dict[str, Any] = cast(Any, target).components
    found = {
        name: part
        for name, part in components.items()
        if name.startswith(_DENOISERS) and isinstance(part, ModelMixin)
    }
    if not found:
        parts = ", ".join(components)
        raise ConfigError(
            f"{type(target).__name__} has no transformer, unet or controlnet ({parts})"
        )
    return cast(dict[str, torch.nn.Module], found)


class Pictures:
    """Counts the pictures that a target begins; None while nothing can say so."""

    def __init__(self, target: Any, begun: Callable[[], None]) -> None:
        self._pipe = weakref.ref(target)
        self._begun = begun
        self._count: int | None = 0 if hasattr(target, "scheduler") else None
        self._scheduler: Any = None
        self._slot: Slot | None = None
        self()

    def __call__(self) -> int | None:
        scheduler = getattr(self._pipe(), "scheduler", None)
        if scheduler is not self._scheduler:
            self.release()
            self._scheduler = scheduler
            if scheduler is not None:
                self._slot = Slot(scheduler, "set_timesteps", self._set_timesteps)
                self._slot.install()
                self.begin()
        return self._count

    def begin(self) -> None:
        """A picture begins now; what `handle.new_picture()` calls."""
        self._count = (self._count or 0) + 1
        self._begun()

    def _set_timesteps(self, *args: Any, **kwargs: Any) -> Any:
        self.begin()
        assert self._slot is not None
        return self._slot.original(*args, **kwargs)

    def release(self) -> None:
        if self._slot is not None:
            self._slot.remove()
        self._slot = self._scheduler = None


def warm_pipeline(pipe: Any, sizes: Sequence[tuple[int, int]], kwargs: dict[str, Any]) -> None:
    """Two steps of the user's own pipeline at each (height, width) in pixels, largest first."""
    known = inspect.signature(pipe.__call__).parameters
    if not {"height", "width"} <= known.keys():
        raise ConfigError(f"{type(pipe).__name__} takes no height and width; call it once a size")
    fixed = {"num_inference_steps": 2, "output_type": "latent"}
    if taken := sorted({"height", "width", *fixed} & kwargs.keys()):
        raise ConfigError(f"warmup sets {', '.join(taken)} itself")
    for height, width in sorted(sizes, key=lambda size: -size[0] * size[1]):
        with unchanged(pipe, kwargs):
            pipe(height=height, width=width, **fixed, **kwargs)


def warm_module(module: torch.nn.Module, inputs: Sequence[Any]) -> None:
    """Two calls of a bare module for each input, a dict of keywords or a tuple, largest first."""

    def size(call: Any) -> int:
        return -sum(t.numel() for t in tensors_of(call))

    for call in sorted(inputs, key=size):
        args, kwargs = ((), call) if isinstance(call, dict) else (tuple(call), {})
        with torch.no_grad():
            module(*args, **kwargs)
            module(*args, **kwargs)


@contextmanager
def unchanged(pipe: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Run on a copy of the scheduler; put generators and the progress bar back afterwards."""
    given = kwargs.get("generator")
    generators = [*given] if isinstance(given, (list, tuple)) else [given] if given else []
    generators.append(torch.default_generator)
    if torch.cuda.is_available():
        generators += torch.cuda.default_generators
    states = [g.get_state() for g in generators]
    scheduler, bar = pipe.scheduler, getattr(pipe, "_progress_bar_config", None)
    pipe.scheduler = copy.deepcopy(scheduler)
    pipe.set_progress_bar_config(disable=True)
    try:
        yield
    finally:
        pipe.scheduler = scheduler
        if bar is None:
            del pipe._progress_bar_config
        else:
            pipe._progress_bar_config = bar
        for generator, state in zip(generators, states):
            generator.set_state(state)
