"""What keeps a module from being replayed as it stands."""

from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dit_graph.slot import Slot


def global_hook() -> str | None:
    """Global hooks can come and go at any call and belong to no module; None without any."""
    hooks = nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks
    return "a global forward hook would not run" if hooks else None


def mode_around() -> str:
    """A mode of the caller's that is to see every operation; a replay shows it none."""
    for i in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(i)
        if not isinstance(mode, DeviceContext):  # which is in the key
            return f"{type(mode).__name__}, a torch function mode, would see no operation"
    if torch._C._len_torch_dispatch_stack():
        mode = _get_current_dispatch_mode()
        return f"{type(mode).__name__}, a torch dispatch mode, would see no operation"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside a functorch transform, such as vmap"
    return ""


def parallel(module: torch.nn.Module) -> str | None:
    """That the module's forward talks with other processes, or None.

    Says the same in all of them: it looks at how the module is split, never at this one's part.
    """
    for child in module.modules():
        config = child.__dict__.get("_parallel_config")  # of diffusers' enable_parallelism
        if (split := getattr(config, "context_parallel_config", None)) is not None:
            return _split("context parallel", split.ring_degree * split.ulysses_degree)
        if (split := getattr(config, "tensor_parallel_config", None)) is not None:
            return _split("tensor parallel", getattr(split, "_tp_degree", None) or split.tp_degree)
        size = child.__dict__.get("_tp_size")  # of transformers' tp_plan
        if isinstance(size, int) and size > 1:
            return _split("tensor parallel", size)
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if (mesh := getattr(tensor, "device_mesh", None)) is not None:
                return _split("sharded as DTensors", mesh.size())
    return None


def _split(how: str, processes: int) -> str:
    return f"{how} over {processes} processes: its collectives are not recorded"


def blocker(module: torch.nn.Module, device: torch.device, region: bool = False) -> str | None:
    """Why this module cannot be replayed as it stands now, or None.

    `region`: it lies below all hooks of the module's own forward.
    """
    for path, child in module.named_modules():
        at = f" on {path}" if path else ""
        if path and (any(map(_acts, child._forward_hooks.values())) or child._forward_pre_hooks):
            return f"a forward hook{at} would not run"
        if isinstance(child, _NormBase) and child.training and child.track_running_stats:
            return f"batch norm in training mode: {path or type(child).__name__}"
        hook = child.__dict__.get("_hf_hook")
        outside = not path and (region or _hook_is_outside(module))
        if hook is not None and not outside:
            kind = type(hook).__name__
            offload = "offload" in kind.lower() or getattr(hook, "offload", False)
            return f"{'offload hooks present' if offload else 'an accelerate hook'}: {kind}{at}"
        registry = child.__dict__.get("_diffusers_hook")
        for name, inner in getattr(registry, "hooks", {}).items():
            if "offload" in type(inner).__name__.lower():
                return f"offload hooks present: {name}{at}"
    devices = {p.device for p in module.parameters()} - {device}
    return f"parameters are on {devices.pop()}, the graphs on {device}" if devices else None


def hook_on(module: torch.nn.Module) -> bool:
    """Whether somebody's hook stands around this module's forward."""
    own = module.__dict__
    forward_hooks = any(map(_acts, module._forward_hooks.values())) or module._forward_pre_hooks
    registry = getattr(own.get("_diffusers_hook"), "hooks", None)
    return bool(forward_hooks or registry or own.get("_hf_hook") is not None)


def _acts(hook: Any) -> bool:
    """transformers' own hooks only note hidden states, which are then results of the call."""
    return getattr(hook, "__module__", "") != "transformers.utils.output_capturing"


def _hook_is_outside(module: torch.nn.Module) -> bool:
    return isinstance(getattr(module, "_old_forward", None), Slot)
