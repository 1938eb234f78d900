"""Makes the contenders: the ways to run a model that are compared, over weights that all share."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from diffusers.hooks.first_block_cache import FirstBlockCacheConfig, apply_first_block_cache
from diffusers.hooks.hooks import CacheContext, HookRegistry
from diffusers.hooks.hooks import _set_cache_context as set_cache_context

import dit_graph

EAGER = "eager"
REMOVED, CACHE = "+remove-syncs", "+cache"
_OWN: dict[str, dict[str, Any]] = {
    "full": {"backend": "full"},
    "breakable": {"backend": "breakable"},
    "blocks": {"regions": "blocks"},
    "regional+breakable": {"backend": "breakable"},
    "regional+blocks": {"regions": "blocks"},
}
_COMPILED = ("reduce-overhead", "regional", "max-autotune", "regional+breakable", "regional+blocks")
_CACHED = (EAGER, "breakable", "regional", "regional+breakable")
GRAPHS: dict[str, dict[str, Any]] = {
    **{name: {**options, "remove_syncs": False} for name, options in _OWN.items()},
    **{name + REMOVED: {**options, "remove_syncs": True} for name, options in _OWN.items()},
    **{name + CACHE: {**_OWN[name], "remove_syncs": False} for name in _CACHED if name in _OWN},
}
"""`enable` gets these options for dit_graph's own; `regional` ones record compiled blocks."""
COMPILED = tuple(
    name for name in (*_COMPILED, *GRAPHS, *(one + CACHE for one in _CACHED))
    if name.removesuffix(REMOVED).removesuffix(CACHE) in _COMPILED
)  # fmt: skip
CONTENDERS = tuple(dict.fromkeys((EAGER, *GRAPHS, *COMPILED, *(name + CACHE for name in _CACHED))))


def eager_first(names: Sequence[str]) -> list[str]:
    """Put eager first, because the others are compared with it; those with a step cache are
    compared with eager under the same one."""
    cached = [EAGER + CACHE] if any(name.endswith(CACHE) for name in names) else []
    return list(dict.fromkeys((EAGER, *cached, *names)))


def compared_with(name: str) -> str:
    """Whose result a contender's should be."""
    return EAGER + CACHE if name.endswith(CACHE) else EAGER


@dataclass
class Contender:
    """This is one way to run a model, with what that way needs of its own.

    `target` is the pipeline or causal LM to call. `handle` is dit_graph's, None for the others.
    `seconds` is what enabling or compiling took. `turn` counts its calls: two in a row draw
    different things, so that a recording which kept an input would be seen.
    """

    name: str
    target: Any
    handle: Any = None
    seconds: float = 0.0
    turn: int = 0

    @classmethod
    def of(cls, name: str, model: Any, enable: dict[str, Any]) -> Self:
        """Make the named one of `model`; `enable` has the options that dit_graph's own share.

        A pipeline gets a transformer and a scheduler of its own, a causal LM itself again.
        """
        if isinstance(model, torch.nn.Module):
            target: Any = twin(model)
            transformer: Any = target
            mode: dict[str, Any] = {"mode": "prefill"}
        else:
            target = copy.copy(model)
            transformer, mode = twin(denoiser(model)), {}
            setattr(target, _denoiser_name(model), transformer)
            target.scheduler = copy.deepcopy(model.scheduler)
        made, began = cls(name, target), time.perf_counter()
        if name.endswith(CACHE):
            put_on_cache(transformer)
        if name.startswith("regional"):
            compile_blocks(transformer)
        elif name in COMPILED:
            transformer.compile(mode=name)
        if name in GRAPHS:
            made.handle = dit_graph.enable(target, **GRAPHS[name], **mode, **enable)
        made.seconds = time.perf_counter() - began
        return made

    def release(self) -> None:
        if self.handle is not None:
            self.handle.disable()
        if self.name in COMPILED:
            torch.compiler.reset()

    def before_call(self) -> None:
        self.turn += 1
        if self.name == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()


def twin(module: torch.nn.Module) -> torch.nn.Module:
    """Make the same module tree again over the same parameters and buffers."""
    shared = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(t): t for t in shared})


def denoiser(pipe: Any) -> Any:
    """Find the module of a pipeline that runs once a step."""
    return getattr(pipe, _denoiser_name(pipe))


def _denoiser_name(pipe: Any) -> str:
    return "unet" if getattr(pipe, "transformer", None) is None else "transformer"


def compile_blocks(module: Any) -> None:
    """Compile each repeated block of a diffusers model, as its `compile_repeated_blocks` does.

    Where its class does not name them, they are the modules of one class in a list of its own.

    Raises:
        ValueError: there are none.
    """
    if getattr(module, "_repeated_blocks", None):
        module.compile_repeated_blocks(fullgraph=True)
        return
    lists = [list(child) for child in module.children() if isinstance(child, torch.nn.ModuleList)]
    alike = [blocks for blocks in lists if len(blocks) > 1 and len(set(map(type, blocks))) == 1]
    if not alike:
        raise ValueError(f"{type(module).__name__} has no repeated blocks to compile")
    for block in itertools.chain(*alike):
        block.compile(fullgraph=True)


_CONTEXT = CacheContext("all")


def put_on_cache(module: Any) -> None:
    """Put diffusers' FirstBlockCache on, which skips every second call of a model here.

    What it skips otherwise follows from the weights, and these are random. The first block runs in
    each call, as it always does.

    Raises:
        ValueError: diffusers has no such cache for this model.
    """
    registry = HookRegistry.check_if_exists_or_initialize(module)
    config = FirstBlockCacheConfig(threshold=0.0)
    apply_first_block_cache(module, config)
    registry.invalidate_child_registries_cache()
    found = (child.__dict__.get("_diffusers_hook") for child in module.modules())
    head = next(
        hook for one in found for hook in getattr(one, "hooks", {}).values()
        if hasattr(hook, "threshold")
    )  # fmt: skip
    calls: dict[Any, Any] = {}

    def alternate(module: Any, args: Any, kwargs: Any) -> None:
        context = head.state_manager._context
        if context is None:  # its pipeline tells caches nothing
            context = _CONTEXT
            set_cache_context(module, context)
        turn = next(calls.setdefault(context.name, itertools.count()))
        head.threshold = math.inf if turn % 2 else -1.0

    module.register_forward_pre_hook(alternate, with_kwargs=True)


def impossible(name: str, device: str, what: str) -> str:
    """Say why a contender cannot be measured on cuda, cpu or recorder; empty where it can."""
    if name in GRAPHS and device == "cpu":
        return f"{name}: nothing is recorded on a CPU, but by --device recorder"
    if name in COMPILED and device != "cuda":
        return f"{name} needs a CUDA device"
    if name.startswith("regional") and what == "prefill":
        return f"{name} compiles the blocks of a diffusers model"
    if name.endswith(CACHE) and what == "prefill":
        return f"{name}: a step cache is a diffusers model's"
    if name.endswith(REMOVED) and what != "picture":
        return f"{name} is about a picture's denoising loop"
    return ""


Call = Callable[[Contender], Any]
"""This is timed: one picture, one step or one prefill. Its tensors are compared."""
