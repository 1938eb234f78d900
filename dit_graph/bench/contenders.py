"""Makes the contenders: the ways to run a model that are compared, over weights that all share."""

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

import dit_graph

EAGER = "eager"
_BACKENDS = {"full": "full", "breakable": "breakable", "regional+breakable": "breakable"}
REMOVED = "+remove-syncs"
GRAPHS: dict[str, dict[str, Any]] = {
    **{name: {"backend": backend, "remove_syncs": False} for name, backend in _BACKENDS.items()},
    **{name + REMOVED: {"backend": backend, "remove_syncs": True}
       for name, backend in _BACKENDS.items()},
}  # fmt: skip
"""`enable` gets these options for dit_graph's own; `regional` ones record compiled blocks."""
COMPILED = (
    "reduce-overhead", "regional", "max-autotune", "regional+breakable",
    f"regional+breakable{REMOVED}",
)  # fmt: skip
CONTENDERS = tuple(dict.fromkeys((EAGER, *GRAPHS, *COMPILED)))


def eager_first(names: Sequence[str]) -> list[str]:
    """Put eager first, because the others are compared with it."""
    return [EAGER, *(name for name in dict.fromkeys(names) if name != EAGER)]


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


def impossible(name: str, device: str, what: str) -> str:
    """Say why a contender cannot be measured on cuda, cpu or recorder; empty where it can."""
    if name in GRAPHS and device == "cpu":
        return f"{name}: nothing is recorded on a CPU, but by --device recorder"
    if name in COMPILED and device != "cuda":
        return f"{name} needs a CUDA device"
    if name.startswith("regional") and what == "prefill":
        return f"{name} compiles the blocks of a diffusers model"
    if name.endswith(REMOVED) and what != "picture":
        return f"{name} is about a picture's denoising loop"
    return ""


Call = Callable[[Contender], Any]
"""This is timed: one picture, one step or one prefill. Its tensors are compared."""
