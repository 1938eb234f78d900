"""Below the hooks of other libraries: where the callable lies that they all stand around.

accelerate keeps what it has wrapped in the module's `_old_forward`, diffusers in the references of
its hook registry, in whichever order they came. Any other wrapper is not looked behind. What
`Module.compile` made has the forward in it, and its hooks, where it has some.
"""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

COMPILED = "_compiled_call_impl"  # of a module: what is called in place of its forward and hooks
AROUND = frozenset({"forward", "_old_forward", "_diffusers_hook", "_hf_hook", COMPILED})
"""Attributes of a module by which libraries stand around its forward."""

_MOST = 64  # hooks around one another; a chain that comes back to itself ends there


def innermost(module: torch.nn.Module) -> tuple[dict[str, Any], str]:
    """The dict and the key in which the innermost callable of a module's `forward` lies.

    There is none yet where nobody stands around the class's own method.
    """
    if module.__dict__.get(COMPILED) is not None and not _is_hooked(module):
        return module.__dict__, COMPILED
    place: tuple[dict[str, Any], str] = module.__dict__, "forward"
    for _ in range(_MOST):
        space, key = place
        inner = _behind(module, space.get(key))
        if inner is None:
            break
        place = inner
    return place


def _is_hooked(module: torch.nn.Module) -> bool:
    own = module.__dict__.get("forward")
    theirs = own is not None and not isinstance(own, types.MethodType)
    return bool(theirs or module._forward_hooks or module._forward_pre_hooks)


def compiled_alike(compiled: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, compiled as `compiled` was; `fn` itself where torch does not tell how that was."""
    code, cells = getattr(compiled, "__code__", None), getattr(compiled, "__closure__", None)
    names = dict(zip(code.co_freevars, cells)) if code and cells else {}
    context = names["self"].cell_contents if "self" in names else None
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return context(fn) if dynamo and isinstance(context, dynamo._TorchDynamoContext) else fn


def _behind(module: torch.nn.Module, link: Any) -> tuple[dict[str, Any], str] | None:
    """Where that lies which a hook's callable calls; None for what is no hook's."""
    if type(link) is not functools.partial:
        return None
    library = getattr(link.func, "__module__", "")
    if library == "accelerate.hooks" and "_old_forward" in module.__dict__:
        return module.__dict__, "_old_forward"
    if library == "diffusers.hooks.hooks":
        for cell in getattr(link.func, "__closure__", None) or ():
            reference = cell.cell_contents
            if hasattr(reference, "pre_forward") and hasattr(reference, "original_forward"):
                whole = reference.original_forward is None
                return vars(reference), "forward" if whole else "original_forward"
    return None
