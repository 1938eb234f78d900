"""Timesteps on the device for every scheduler of diffusers."""

import inspect
from typing import Any

import diffusers
import pytest
import torch
from diffusers import SchedulerMixin

from dit_graph.modes.syncs import SHOWN, DeviceTimesteps
from tests.pair import Machine
from tests.shared.syncs.pictures import BOTH, STEPS


def schedulers() -> list[str]:
    """All of diffusers' that a plain loop can run."""
    found = []
    for name in sorted(dir(diffusers)):
        made = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
        if isinstance(made, type) and issubclass(made, SchedulerMixin) and "Flax" not in name:
            try:
                steps(made(), "cpu", lambda scheduler: None)
                found.append(name)
            except Exception:  # it needs something of its own
                continue
    return found


def steps(
    scheduler: Any, on: str, after_set: Any, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A denoising loop without a model, as pipelines have it."""
    torch.manual_seed(0)
    takes = inspect.signature(scheduler.set_timesteps).parameters
    scheduler.set_timesteps(STEPS, **({"device": on} if "device" in takes else {}))
    after_set(scheduler)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 4, 8, 8, generator=generator).to(on, dtype)
    for t in scheduler.timesteps:
        given = sample
        if hasattr(scheduler, "scale_model_input"):
            given = scheduler.scale_model_input(sample, t)
        sample = scheduler.step(given.sin(), t, sample).prev_sample
    return sample


ALL = schedulers()


def test_most_schedulers_are_looked_at() -> None:
    assert set(ALL) >= SHOWN, "by default for these alone"


@pytest.mark.parametrize("name", ALL)
def test_every_scheduler_gives_the_same_bits(machine: Machine, name: str) -> None:
    made = getattr(diffusers, name)
    scheduler = made()
    timesteps = DeviceTimesteps(scheduler, set(BOTH))
    for dtype in (torch.float32, torch.bfloat16):
        after = lambda s: timesteps.place(torch.device(machine.on))
        out = steps(scheduler, machine.on, after, dtype)
        assert torch.equal(out, steps(made(), machine.on, lambda scheduler: None, dtype))
    timesteps.remove()
    assert torch.equal(
        steps(scheduler, machine.on, lambda s: None), steps(made(), machine.on, lambda s: None)
    )
