"""`remove_syncs` on pipelines: the same pictures without the loop's waits."""

from typing import Any

import diffusers
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DiTPipeline

import dit_graph
from dit_graph.modes.syncs import DeviceTimesteps
from tests.families import FAMILIES
from tests.pair import Machine
from tests.recorder.test_denoise import draw, flux_pipeline
from tests.shared.syncs.pictures import BOTH, STEPS, dit, dit_picture


class OwnScheduler(DDIMScheduler):
    """Nobody has shown that it gives the same bits."""


class OwnLoop(DiTPipeline):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def test_by_default_where_it_was_shown_and_off_by_name_elsewhere(machine: Machine) -> None:
    def drawn(pipe: Any, **options: Any) -> dict[str, int]:
        eager = dit_picture(pipe)
        with dit_graph.enable(pipe, device=machine.device, **options) as handle:
            assert torch.equal(dit_picture(pipe), eager)
            removed: dict[str, int] = handle.pictures.syncs_removed
            assert all(what in handle.report() for what in removed)
        return removed

    said = "step given the host's timestep"
    pipe = dit(machine)
    assert drawn(pipe)[said] == STEPS and drawn(pipe, remove_syncs=False) == {}
    pipe.scheduler = OwnScheduler()
    assert drawn(pipe) == {"off: OwnScheduler was not shown to give the same bits": 1}
    assert drawn(pipe, remove_syncs=True)[said] == STEPS
    own = OwnLoop(**dit(machine).components)
    own.set_progress_bar_config(disable=True)
    assert drawn(own) == {"off: the loop of OwnLoop is not one of diffusers'": 1}
    module = FAMILIES["dit"].build().to(machine.on)
    assert dit_graph.enable(module, device=machine.device).report()


@pytest.mark.parametrize("removed", [True, "auto", ("timesteps",), ("step",), False], ids=str)
def test_pictures_stay_the_same(machine: Machine, removed: Any) -> None:
    pipe, eager = dit(machine), dit(machine)
    handle = dit_graph.enable(pipe, device=machine.device, remove_syncs=removed)
    for seed in range(4):
        assert torch.equal(dit_picture(pipe, seed), dit_picture(eager, seed))
    handle.disable()
    assert {"step", "set_timesteps", "scale_model_input"} & pipe.scheduler.__dict__.keys() == set()
    assert pipe.scheduler.timesteps.device.type == "cpu"
    assert torch.equal(dit_picture(pipe, 9), dit_picture(eager, 9))


def test_the_report_and_the_map_say_what_was_removed(machine: Machine) -> None:
    pipe = dit(machine)
    with dit_graph.enable(pipe, device=machine.device, remove_syncs=True) as handle:
        assert "remove_syncs: nothing so far" in handle.report()
        dit_picture(pipe)
        removed = handle.explain().syncs_removed
        assert removed is not None and removed["step given the host's timestep"] == STEPS
        uploaded = "timesteps uploaded once a picture"
        assert removed.get(uploaded, 0) == (1 if machine.on != "cpu" else 0)
        said = "step given the host's timestep (6x)"
        assert said in handle.report() and said in str(handle.explain())
    other = dit(machine)
    with dit_graph.enable(other, device=machine.device) as handle:
        assert handle.explain().syncs_removed is None and "remove_syncs" not in handle.report()


def test_the_counts_outlive_a_warm_up_and_disable(machine: Machine) -> None:
    """A warm-up runs on another scheduler and then gives this one back."""
    pipe, said = flux_pipeline().to(machine.on), "step given the host's timestep"
    with dit_graph.enable(pipe, device=machine.device, remove_syncs=True) as handle:
        draw(pipe)
        before = handle.pictures.syncs_removed[said]
        embeds = machine.to(torch.randn(1, 6, 32))
        more = {"prompt_embeds": embeds, "pooled_prompt_embeds": embeds[:, 0]}
        handle.warmup(sizes=[(16, 16)], **more)
        assert handle.pictures.syncs_removed[said] == before
        draw(pipe)
        assert handle.pictures.syncs_removed[said] == 2 * before
        for wrong in ((16, 16), [(16,)]):
            with pytest.raises(dit_graph.ConfigError, match="pairs"):
                handle.warmup(sizes=wrong, **more)
        with pytest.raises(dit_graph.AlreadyEnabled, match="remove_syncs=True, not 'auto'"):
            dit_graph.enable(pipe, device=machine.device)
    assert handle.pictures.syncs_removed[said] == 2 * before


def test_each_method_gets_the_hosts_timestep(machine: Machine) -> None:
    """And the model the device's; what is no view of the timesteps stays as it is."""
    pipe = dit(machine)
    seen: dict[str, list[Any]] = {"step": [], "model": []}
    real = DDIMScheduler.step

    def step(output: Any, timestep: Any, sample: Any, **more: Any) -> Any:
        seen["step"].append((timestep, pipe.scheduler.timesteps))
        return real(pipe.scheduler, output, timestep, sample, **more)

    pipe.scheduler.step = step
    handle = dit_graph.enable(pipe, device=machine.device, remove_syncs=True)
    pipe.transformer.register_forward_pre_hook(
        lambda m, args, kwargs: seen["model"].append(kwargs["timestep"]), with_kwargs=True
    )
    dit_picture(pipe)
    assert [int(t) for t, _ in seen["step"]] == [int(t[0]) for t in seen["model"]]
    assert all(t.device.type == all_.device.type == "cpu" for t, all_ in seen["step"])
    assert all(t.device.type == torch.device(machine.on).type for t in seen["model"])
    handle.disable()
    assert pipe.scheduler.step is step, "what was there before is back"


def placed(scheduler: Any, machine: Machine) -> DeviceTimesteps:
    """Under both switches, after `set_timesteps`."""
    timesteps = DeviceTimesteps(scheduler, set(BOTH))
    timesteps.place(torch.device(machine.on))
    return timesteps


def test_a_picture_asks_no_more_modules_for_their_device_than_eager(machine: Machine) -> None:
    """`_execution_device` looks at every module of the pipeline, while the device waits."""

    class Counted(DiTPipeline):  # type: ignore[misc]
        asked = 0

        @property
        def _execution_device(self) -> Any:
            type(self).asked += 1
            return super()._execution_device

    plain = dit(machine)
    pipe = Counted(plain.transformer, plain.vae, plain.scheduler)
    pipe.set_progress_bar_config(disable=True)
    dit_picture(pipe)
    eager = Counted.asked
    with dit_graph.enable(pipe, device=machine.device, remove_syncs=True):
        dit_picture(pipe)
    assert Counted.asked == 2 * eager > 0


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_offloaded_weights_take_no_timesteps_with_them(machine: Machine, on: str) -> None:
    scheduler = DDPMScheduler()
    scheduler.set_timesteps(4, device=machine.on)
    before = scheduler.timesteps
    timesteps = DeviceTimesteps(scheduler, set(BOTH))
    timesteps.place(torch.device(on))
    assert scheduler.timesteps is before
    timesteps.remove()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("device", ["cpu", "machine"])
def test_timesteps_that_somebody_writes_into_are_left_alone(
    machine: Machine, mode: Any, device: str
) -> None:
    scheduler, other = DDIMScheduler(), DDIMScheduler()
    with mode():
        for made in (scheduler, other):
            made.set_timesteps(4, device=machine.on if device == "machine" else device)
        timesteps = placed(scheduler, machine)
        for made in (scheduler, other):
            made.timesteps[1:].sub_(1)
        x = torch.randn(1, 4, 8, 8).to(machine.on)
        for t, same in zip(scheduler.timesteps, other.timesteps):
            out, expected = scheduler.step(x, t, x), other.step(x, same, x)
            assert torch.equal(out.prev_sample, expected.prev_sample)
    assert not any("given the host's" in what for what in timesteps.removed)
    timesteps.remove()


def test_a_timestep_of_the_callers_own_finds_what_it_would(machine: Machine) -> None:
    """No view of ours: `scheduler.timesteps` stays where it is too."""
    scheduler = DDPMScheduler()
    scheduler.set_timesteps(4)
    seen, real = [], scheduler.step
    scheduler.step = lambda *a, **k: (seen.append(scheduler.timesteps), real(*a, **k))[1]
    timesteps = placed(scheduler, machine)
    x = torch.randn(1, 4, 8, 8).to(machine.on)
    on_device = scheduler.timesteps
    scheduler.step(x, scheduler.timesteps[1].clone(), x)
    scheduler.step(x, scheduler.timesteps[1], x)
    assert seen[0] is on_device and seen[1] is not on_device
    assert timesteps.removed["step given the host's timestep"] == 1


def test_schedulers_that_compute_with_timesteps_keep_the_devices(machine: Machine) -> None:
    for name in ("LCMScheduler", "SCMScheduler"):
        scheduler = getattr(diffusers, name)()
        scheduler.set_timesteps(2, device=machine.on)
        if machine.on == "cpu":  # what eager would have is what they get
            assert placed(scheduler, machine)._host is not None
        else:
            said = f"not in {name}, which computes with timesteps"
            assert placed(scheduler, machine).removed == {said: 1}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_inference_mode(machine: Machine, mode: Any) -> None:
    pipe, eager = dit(machine), dit(machine)
    with mode(), dit_graph.enable(pipe, device=machine.device, remove_syncs=True):
        for seed in range(3):
            assert torch.equal(dit_picture(pipe, seed), dit_picture(eager, seed))


def test_a_pipeline_that_did_not_ask_is_left_alone(machine: Machine) -> None:
    first = flux_pipeline().to(machine.on)
    second = diffusers.FluxPipeline.from_pipe(first)
    second.set_progress_bar_config(disable=True)
    handle = dit_graph.enable(first, device=machine.device, remove_syncs=True)
    draw(first)
    counted = dict(handle.explain().syncs_removed or {})
    assert torch.equal(draw(second, 1), draw(flux_pipeline().to(machine.on), 1))
    assert handle.explain().syncs_removed == counted
    draw(first)
    assert handle.explain().syncs_removed != counted
    handle.disable()


def test_one_of_two_that_share_a_scheduler_did_not_ask(machine: Machine) -> None:
    first, second = flux_pipeline().to(machine.on), flux_pipeline().to(machine.on)
    second.scheduler = first.scheduler
    a = dit_graph.enable(first, device=machine.device, remove_syncs=True)
    b = dit_graph.enable(second, device=machine.device, remove_syncs=False)
    draw(first)
    counted = a.pictures.syncs_removed
    eager = flux_pipeline().to(machine.on)
    assert torch.equal(draw(second, 1), draw(eager, 1))
    assert a.pictures.syncs_removed == counted and counted and b.pictures.syncs_removed == {}
    a.disable()
    b.disable()


def test_pipelines_that_share_a_scheduler(machine: Machine) -> None:
    """The last one that asked for it takes it away."""
    first = flux_pipeline().to(machine.on)
    second = diffusers.FluxPipeline.from_pipe(first)
    second.set_progress_bar_config(disable=True)
    eager = flux_pipeline().to(machine.on)
    a = dit_graph.enable(first, device=machine.device, remove_syncs=True)
    b = dit_graph.enable(second, device=machine.device, remove_syncs=True)
    for seed, pipe in enumerate([first, second, first]):
        assert torch.equal(draw(pipe, seed), draw(eager, seed))
    a.disable()
    assert "step" in first.scheduler.__dict__ and torch.equal(draw(second, 5), draw(eager, 5))
    b.disable()
    assert "step" not in first.scheduler.__dict__


def test_a_scheduler_that_is_replaced(machine: Machine) -> None:
    pipe, eager = flux_pipeline().to(machine.on), flux_pipeline().to(machine.on)
    handle = dit_graph.enable(pipe, device=machine.device, remove_syncs=True)
    draw(pipe)
    old = pipe.scheduler
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0)
    eager.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0)
    for seed in range(3):
        assert torch.equal(draw(pipe, seed), draw(eager, seed))
    assert "step" not in old.__dict__ and "step" in pipe.scheduler.__dict__
    handle.disable()
    assert "step" not in pipe.scheduler.__dict__


@pytest.mark.parametrize("given", ["step", ("begin",), 1, None, ("timesteps", 3)], ids=str)
def test_wrong_names_are_an_error(machine: Machine, given: Any) -> None:
    with pytest.raises(dit_graph.ConfigError, match="remove_syncs must be True, False or of"):
        dit_graph.enable(dit(machine), device=machine.device, remove_syncs=given)


def test_a_module_has_no_loop(machine: Machine) -> None:
    module = FAMILIES["dit"].build().to(machine.on)
    with pytest.raises(dit_graph.ConfigError, match="needs a pipeline with a scheduler"):
        dit_graph.enable(module, device=machine.device, remove_syncs=True)
