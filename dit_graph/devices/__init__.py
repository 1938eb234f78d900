"""Devices by name. `cuda` captures graphs; `recorder` does the same work on the CPU."""

from importlib import import_module

import torch

from dit_graph.devices.base import Device
from dit_graph.errors import ConfigError

_KNOWN = {"cuda": "dit_graph.devices.cuda:Cuda", "recorder": "dit_graph.devices.recorder:Recorder"}


def device_named(name: str, on: torch.device) -> Device:
    """The device `name`, for a module whose parameters lie on `on`."""
    if name not in _KNOWN:
        raise ConfigError(f"unknown device {name!r}; known: {', '.join(_KNOWN)}")
    module, cls = _KNOWN[name].split(":")
    device: Device = getattr(import_module(module), cls)(on)
    device.check()
    return device


def current_place(name: str) -> torch.device:
    """Where `name` works now, for a module that has no tensors to say so."""
    if name == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def default_generators() -> list[torch.Generator]:
    """The generators that `torch.rand` and the like draw from where none is given."""
    found = [torch.default_generator]
    return found + list(torch.cuda.default_generators) if torch.cuda.is_available() else found
