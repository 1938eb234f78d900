"""`enable` and `disable`: puts a Runner in front of each denoiser's forward, and takes it away."""

import weakref
from typing import Any

import torch

from dit_graph.config import GraphConfig
from dit_graph.errors import AlreadyEnabled, NotEnabled
from dit_graph.handle import HANDLES, INSTALLS, KEPT, Handle, drop_dead
from dit_graph.install import Install
from dit_graph.modes import parts


def enable(pipe_or_module: Any, config: GraphConfig | None = None, **options: Any) -> Handle:
    """Record the repeated forward of a pipeline's denoisers, or of one module, and replay it.

    Args:
        pipe_or_module: a diffusers pipeline (its `transformer*`, `unet*` and `controlnet*` models
            are graphed), any `torch.nn.Module`, or with `mode="prefill"` a transformers causal LM.
        config: a GraphConfig, or its fields as `options`.

    Returns:
        The handle; the same one again for an equal config.

    Raises:
        AlreadyEnabled: a module is graphed with another config.
        ConfigError: an option or the target cannot work.
        Unsupported: the allocator has no graph pools, or a module is spread over devices.

    With `DIT_GRAPH_DISABLE=1` in the environment every call is the plain one, whatever was enabled.
    """
    chosen = GraphConfig.of(config, options)
    known = _handle_of(pipe_or_module)
    modules = parts(pipe_or_module, chosen)
    for name, (module, wanted) in modules.items():
        _refuse_another_config(name, module, wanted)
    if known is not None and known.covers({name: module for name, (module, _) in modules.items()}):
        return known
    if known is not None:
        known.disable()
    handle = Handle(pipe_or_module, chosen)
    try:
        for name, (module, wanted) in modules.items():
            install = INSTALLS.get(id(module))
            if install is None:
                INSTALLS[id(module)] = install = Install(name, module, handle, wanted)
            else:
                install.handles.append(handle)
            handle.installs[name] = install
            handle.components[name] = weakref.ref(getattr(pipe_or_module, name, module))
            handle.tallies[name] = install.tally
    except Exception:
        handle.disable()
        raise
    for install in tuple(handle.installs.values()):
        drop_dead(install)
    HANDLES[id(pipe_or_module)] = handle
    if not isinstance(pipe_or_module, torch.nn.Module):
        vars(pipe_or_module)[KEPT] = handle
    return handle


def disable(target: Any) -> None:
    """Undo `enable` on a pipeline, a module or a handle; the last user of a module restores it.

    Raises:
        NotEnabled: the target is not graphed.
    """
    handle = target if isinstance(target, Handle) else _handle_of(target)
    if handle is None:
        raise NotEnabled(f"this {type(target).__name__} is not graphed")
    handle.disable()


def _handle_of(target: Any) -> Handle | None:
    handle = HANDLES.get(id(target))
    return handle if handle is not None and handle.is_of(target) else None


def _refuse_another_config(name: str, module: torch.nn.Module, wanted: GraphConfig) -> None:
    """Raises AlreadyEnabled where anybody who is still there has enabled the module otherwise."""
    install = INSTALLS.get(id(module))
    if install is None or install.config == wanted:
        return
    drop_dead(install)
    if not install.removed:
        differs = install.config.against(wanted)
        raise AlreadyEnabled(f"{name} is already graphed with {differs}; disable it first")
