"""What keeps a module from being replayed as it stands."""

from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.nn.modules.batchnorm import _NormBase

from dit_graph.slot import Slot


def global_hook() -> str | None:
    """Global hooks can come and go at any call and belong to no module; None without any."""
    hooks = nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks
    return "a global forward hook would not run" if hooks else None


def blocker(module: torch.nn.Module, device: torch.device) -> str | None:
    """Why this module cannot be replayed as it stands now, or None."""
    for path, child in module.named_modules():
        at = f" on {path}" if path else ""
        if path and (any(map(_acts, child._forward_hooks.values())) or child._forward_pre_hooks):
            return f"a forward hook{at} would not run"
        if isinstance(child, _NormBase) and child.training and child.track_running_stats:
            return f"batch norm in training mode: {path or type(child).__name__}"
        hook = child.__dict__.get("_hf_hook")
        if hook is not None and (path or not _hook_is_outside(module)):
            kind = type(hook).__name__
            offload = "offload" in kind.lower() or getattr(hook, "offload", False)
            return f"{'offload hooks present' if offload else 'an accelerate hook'}: {kind}{at}"
        registry = child.__dict__.get("_diffusers_hook")
        for name, inner in getattr(registry, "hooks", {}).items():
            if "offload" in type(inner).__name__.lower():
                return f"offload hooks present: {name}{at}"
    devices = {p.device for p in module.parameters()} - {device}
    return f"parameters are on {devices.pop()}, the graphs on {device}" if devices else None


def _acts(hook: Any) -> bool:
    """transformers' own hooks only note hidden states, which are then results of the call."""
    return getattr(hook, "__module__", "") != "transformers.utils.output_capturing"


def _hook_is_outside(module: torch.nn.Module) -> bool:
    return isinstance(getattr(module, "_old_forward", None), Slot)


def needs_grad(module: torch.nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
