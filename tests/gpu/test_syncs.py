"""`remove_syncs` on CUDA: no waiting in the loop."""

from typing import Any

import pytest
from diffusers import DDIMScheduler

import dit_graph
from dit_graph.explain import host_syncs
from tests.pair import Machine
from tests.shared.syncs.pictures import STEPS, dit, dit_picture


def in_the_loop(pipe: Any) -> int:
    with host_syncs() as found:
        dit_picture(pipe)
    return sum(sync.count for sync in found if sync.count >= STEPS)


@pytest.mark.parametrize("removed", [False, ("step",)], ids=str)
def test_a_timestep_on_the_host_is_uploaded_in_every_step(
    machine: Machine,
    removed: Any,
) -> None:
    pipe = dit(machine)
    with dit_graph.enable(pipe, remove_syncs=removed):
        dit_picture(pipe)
        assert in_the_loop(pipe) == STEPS


def test_without_uploads_the_scheduler_reads_its_timestep_back(
    machine: Machine,
) -> None:
    """The one switch without the other moves the wait from the pipeline to the scheduler."""
    pipe = dit(machine)
    with dit_graph.enable(pipe, remove_syncs=("timesteps",)):
        dit_picture(pipe)
        assert in_the_loop(pipe) >= STEPS


def test_no_step_waits_with_both(machine: Machine) -> None:
    pipe = dit(machine)
    assert type(pipe.scheduler) is DDIMScheduler
    with dit_graph.enable(pipe, remove_syncs=True) as handle:
        dit_picture(pipe)
        assert in_the_loop(pipe) == 0
        assert handle.stats()["eager"] == {} or handle.stats()["replays"]
    assert in_the_loop(pipe) == STEPS
