"""The Python state and the weights that a recording stands on: read, compared, put back.

A `Fingerprint` is a flat list of containers with what they held, and of tensors with their
addresses. It is compared by identity, then by value, and never hashed.
"""

import types
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from diffusers.hooks.hooks import HookRegistry

from dit_graph.guards import DeviceNumber

_OPAQUE = (
    type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
    str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Generator,
)  # fmt: skip
_FOREIGN = {"logging", "threading", "inspect", "weakref", "functools", "_thread", "pathlib"}


class Fingerprint:
    """What a module holds now: every plain attribute, list, dict and helper object, by place.

    Reads through submodules, attention processors, hook registries and their states. Classes,
    functions and globals are taken by identity and not looked into.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._places: list[tuple[str, Any, Any]] = []
        self._tensors: list[torch.Tensor] = []
        seen: set[int] = set()
        todo: list[tuple[str, Any]] = [("", module)]
        while todo:
            path, value = todo.pop()
            if isinstance(value, _OPAQUE) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                self._tensors.append(value)
                continue
            container = _container(value)
            if isinstance(container, (dict, list, set)):
                self._places.append((path, container, container.copy()))
            todo += _children(path, value, container)
        self._pointers = [_address(t) for t in self._tensors]

    def first_change(self) -> str | None:
        """Where the state differs now, or None."""
        for path, container, before in self._places:
            if change := next(_differences(container, before), None):
                return f"{path}{change[0]}".lstrip(".") or "a parameter"
        if [_address(t) for t in self._tensors] != self._pointers:
            return "storage of a parameter, buffer or tensor attribute"
        return None

    def changes(self) -> list[str]:
        """All places that differ; a stand-in left in the state becomes its number."""
        found = []
        for path, container, before in self._places:
            for name, key, value in list(_differences(container, before)):
                found.append(f"{path}{name}".lstrip("."))
                if type(value) is DeviceNumber:
                    container[key] = value.value
        if [_address(t) for t in self._tensors] != self._pointers:
            found.append("storage of a parameter, buffer or tensor attribute")
        return found

    def restore(self) -> None:
        """Put every container back as it was."""
        for _, container, before in self._places:
            if next(_differences(container, before), None) is None:
                continue
            if isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                container.update(before)


def _address(t: torch.Tensor) -> int:
    return t.data_ptr() if t.layout is torch.strided and type(t) in _PLAIN_TENSORS else id(t)


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _container(value: Any) -> Any:
    if isinstance(value, (dict, list, set, tuple)):
        return value
    if isinstance(value, HookRegistry):
        return value.hooks  # its bookkeeping changes as contexts come and go
    module = type(value).__module__
    ours = module.startswith("dit_graph.") and not module.startswith("dit_graph.embedded")
    if ours or module.partition(".")[0] in _FOREIGN:
        return None
    return getattr(value, "__dict__", None)


def _children(path: str, value: Any, container: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(container, dict):
        for key, child in container.items():
            yield f"{path}{_step(value, key)}", child
    elif isinstance(container, (list, tuple)):
        for i, child in enumerate(container):
            yield f"{path}[{i}]", child


def _step(owner: Any, key: Any) -> str:
    if key in ("_modules", "_parameters", "_buffers") and isinstance(owner, torch.nn.Module):
        return ""
    return f".{key}" if isinstance(key, str) else f"[{key!r}]"


def _differences(now: Any, before: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(now, set):
        if now != before:
            yield "", None, None
        return
    if len(now) == len(before):
        pair = (now.values(), before.values()) if isinstance(now, dict) else (now, before)
        if all(map(is_, *pair)):
            return
    items = now.items() if isinstance(now, dict) else enumerate(now)
    old = before if isinstance(now, dict) else dict(enumerate(before))
    for key, value in items:
        new = not _idle(value) if key not in old else not _unchanged(value, old[key])
        if new:
            yield _step(None, key), key, value
    if len(now) < len(before):
        yield " (something was removed)", None, None


def _idle(value: Any) -> bool:
    """diffusers adds an empty registry to a model that it looks at for hooks."""
    return isinstance(value, HookRegistry) and not value.hooks


def _unchanged(now: Any, before: Any) -> bool:
    if now is before:
        return True
    plain = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
    if isinstance(now, tuple) and type(now) is type(before) and len(now) == len(before):
        return all(map(_unchanged, now, before))
    if type(now) is not type(before):
        return False
    if isinstance(now, types.MethodType):
        return bool(now == before)
    return isinstance(now, plain) and (now == before or now != now)


def blocker(module: torch.nn.Module, device: torch.device) -> str | None:
    """Why this module cannot be replayed as it stands now, or None."""
    for path, child in module.named_modules():
        at = f" on {path}" if path else ""
        if path and (child._forward_hooks or child._forward_pre_hooks):
            return f"a forward hook{at} would not run"
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


def _hook_is_outside(module: torch.nn.Module) -> bool:
    from dit_graph.slot import Slot

    return isinstance(getattr(module, "_old_forward", None), Slot)


def needs_grad(module: torch.nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
