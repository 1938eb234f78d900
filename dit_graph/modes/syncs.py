"""Host syncs of a denoising loop, taken out from outside of the classes: `remove_syncs`.

A loop that waits for the device in every step leaves it idle while the host prepares the next one.
Two causes lie in how timesteps are kept. A pipeline whose scheduler has them on the CPU uploads one
a step, which waits; one that has them on the device makes the scheduler read them back to look
something up. Here the model gets views of timesteps that lie on the device once, and the
scheduler's methods get the host's value of the same timestep, in the same dtype.
"""

from collections import Counter
from collections.abc import Set
from typing import Any

import torch

from dit_graph.config import Sync
from dit_graph.slot import Slot

_METHODS = ("step", "scale_model_input")
_COMPUTES = {
    "FlowMapEulerDiscreteScheduler", "LCMScheduler", "MiniMaxH3Scheduler", "SCMScheduler",
}  # fmt: skip
"""Schedulers whose step puts timesteps into its arithmetic, in which a number from the host may be
rounded otherwise than one on the device; the others of diffusers look something up."""

SHOWN = {
    "CMStochasticIterativeScheduler", "CogVideoXDDIMScheduler", "DDIMInverseScheduler",
    "DDIMParallelScheduler", "DDIMScheduler", "DDPMParallelScheduler", "DDPMScheduler",
    "DEISMultistepScheduler", "DPMSolverMultistepInverseScheduler", "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler", "EDMDPMSolverMultistepScheduler", "EDMEulerScheduler",
    "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler", "FlowMapEulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler",
    "HeunDiscreteScheduler", "IPNDMScheduler", "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler", "LCMScheduler", "LTXEulerAncestralRFScheduler", "MiniMaxH3Scheduler",
    "PNDMScheduler", "SASolverScheduler", "TCDScheduler", "UnCLIPScheduler",
    "UniPCMultistepScheduler",
}  # fmt: skip
"""Schedulers of diffusers for which `tests/shared/syncs` shows that the bits stay the same."""


def not_shown(scheduler: Any, pipe: Any) -> str:
    """Why this pipeline with this scheduler was not shown to draw the same, or an empty string."""
    kind, loop = type(scheduler), type(pipe).__call__
    if kind.__name__ not in SHOWN or not kind.__module__.startswith("diffusers."):
        return f"{kind.__name__} was not shown to give the same bits"
    if not loop.__module__.startswith(("diffusers.", "dit_graph.")):
        return f"the loop of {type(pipe).__name__} is not one of diffusers'"
    return ""


class DeviceTimesteps:
    """One scheduler's timesteps: on the device for the model, on the host for the scheduler.

    Args:
        scheduler: gets an instance slot over `step` and `scale_model_input`.
        switches: `"timesteps"` puts them on the device after `set_timesteps`; `"step"` hands the
            host's value to the scheduler's methods, which find `scheduler.timesteps` on the host
            too, so that looking up an index reads nothing from the device.
    """

    def __init__(self, scheduler: Any, switches: Set[Sync]) -> None:
        self._scheduler = scheduler
        self.switches = switches
        self._host: torch.Tensor | None = None  # (steps,)
        self._device: torch.Tensor | None = None  # the same values
        self._given: torch.Tensor | None = None  # what `set_timesteps` left
        self._version: int | None = None
        self.removed: Counter[str] = Counter()  # what was taken out → how often
        self._slots = []
        for name in _METHODS if "step" in switches else ():
            if callable(getattr(scheduler, name, None)):
                self._slots.append(_OnHost(scheduler, name, self))
        for slot in self._slots:
            slot.install()

    def place(self, on: torch.device, removed: Counter[str] | None = None) -> None:
        """After `set_timesteps`: have the timesteps on the device `on` and on the host.

        `removed` is where what is taken out of this picture is counted.

        Weights that are offloaded, on the CPU or nowhere, take no timesteps with them.
        """
        self.forget()
        self.removed = self.removed if removed is None else removed
        given = getattr(self._scheduler, "timesteps", None)
        if not isinstance(given, torch.Tensor) or given.dim() != 1 or not given.numel():
            return
        device = given
        elsewhere = given.device.type == "cpu" and on.type not in ("cpu", "meta")
        if "timesteps" in self.switches and elsewhere:
            device = given.to(on)
            self._count("timesteps uploaded once a picture")
        elif self._computes(given):
            self._count(f"not in {type(self._scheduler).__name__}, which computes with timesteps")
            return
        host = given.clone() if given.device.type == "cpu" else given.cpu()
        self._given, self._host, self._device = given, host, device
        if device.is_inference():
            with torch.inference_mode(False):  # so that writes into them are counted
                device = self._device = device.clone()
        self._version = device._version
        self._scheduler.timesteps = device

    def _computes(self, given: torch.Tensor) -> bool:
        """Whether a timestep from the host could give other bits than eager, whose is `given`'s."""
        cls = type(self._scheduler)
        unknown = not cls.__module__.startswith("diffusers.")
        return given.device.type != "cpu" and (unknown or cls.__name__ in _COMPUTES)

    def forget(self) -> None:
        """The timesteps of a picture that is not ours: nothing is handed on."""
        self._host = self._device = self._given = None

    def host_value(self, argument: Any) -> Any:
        """The host's view of a timestep that is a 0-dim view of ours; anything else as it is."""
        ours = self._device
        if not isinstance(argument, torch.Tensor) or argument.dim() or ours is None:
            return argument
        if argument.untyped_storage()._cdata != ours.untyped_storage()._cdata:
            return argument
        offset = argument.storage_offset() - ours.storage_offset()
        assert self._host is not None
        return self._host[offset // (ours.stride(0) or 1)]

    def call_on_host(self, slot: "_OnHost", args: Any, kwargs: Any) -> Any:
        """Call a method of the scheduler's with timesteps on the host."""
        on_device = self._device
        if on_device is None or self._scheduler.timesteps is not on_device:
            return slot.original(*args, **kwargs)
        if on_device._version != self._version:  # somebody wrote into them
            return slot.original(*args, **kwargs)
        given = [*args, *kwargs.values()]
        try:
            values = list(map(self.host_value, given))
        except Exception:  # a tensor of a kind of its own
            values = given
        if all(a is b for a, b in zip(given, values)):
            return slot.original(*args, **kwargs)
        args, kwargs = values[: len(args)], dict(zip(kwargs, values[len(args) :]))
        self._scheduler.timesteps = self._host
        try:
            out = slot.original(*args, **kwargs)
        finally:
            if self._scheduler.timesteps is self._host:  # else the method made others
                self._scheduler.timesteps = on_device
        self._count(f"{slot.name} given the host's timestep")
        return out

    def _count(self, what: str) -> None:
        self.removed[what] += 1

    def remove(self) -> None:
        """Give methods and timesteps back."""
        for slot in self._slots:
            slot.remove()
        if self._device is not None and self._scheduler.timesteps is self._device:
            self._scheduler.timesteps = self._given


class _OnHost(Slot):
    """A scheduler's method that gets its timestep on the host."""

    def __init__(self, scheduler: Any, name: str, timesteps: DeviceTimesteps) -> None:
        super().__init__(scheduler, name, self._on_host)
        self.name = name
        self._timesteps = timesteps

    def _on_host(self, *args: Any, **kwargs: Any) -> Any:
        return self._timesteps.call_on_host(self, args, kwargs)
