"""Devices by name. `cuda` captures graphs; `recorder` does the same work on the CPU."""

from importlib import import_module

import torch

from dit_graph.devices.base import Device
from dit_graph.errors import ConfigError

_DEVICES = {
    "cuda": "dit_graph.devices.cuda:Cuda",
    "recorder": "dit_graph.devices.recorder:Recorder",
}
_AUTO = "cuda"  # This is what "auto" stands for, where a module lies on one.


def records_on(name: str, on: torch.device) -> bool:
    """Whether anything is recorded on `on`: "auto" leaves modules eager that lie elsewhere."""
    return name != "auto" or on.type == _AUTO


def device_named(name: str, on: torch.device) -> Device:
    """The device `name`, or the one of "auto", for a module whose parameters lie on `on`."""
    name = _AUTO if name == "auto" else name
    if name not in _DEVICES:
        raise ConfigError(f"unknown device {name!r}; known: {', '.join(_DEVICES)}")
    module, cls = _DEVICES[name].split(":")
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
