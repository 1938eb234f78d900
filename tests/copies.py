"""Copies of what is enabled: each answers for itself, while it is enabled and after."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from torch import nn

import dit_graph
from dit_graph.slot import Slot, _Copying
from tests.families import FAMILIES
from tests.pair import Machine, Pair, same_tree

INPUTS = FAMILIES["flux"].inputs


def pruned(module: Any) -> Any:
    """A twin that shares weights and has fewer blocks, as for AutoGuidance."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin.transformer_blocks = nn.ModuleList()
    return twin


def replica(module: Any) -> Any:
    """What `nn.DataParallel` makes of it, with weights of its own."""
    twin = module._replicate_for_data_parallel()
    twin._parameters, twin._modules = dict(module._parameters), dict(module._modules)
    torch.manual_seed(5)
    twin.proj_out = nn.Linear(module.proj_out.in_features, module.proj_out.out_features)
    return twin.to(module.device).requires_grad_(False)


def unpickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


HOOKS: dict[str, Callable[[Any], Any]] = {
    "none": lambda module: None,
    "accelerate": lambda module: add_hook_to_module(module, ModelHook()),
    "diffusers": lambda module: HookRegistry.check_if_exists_or_initialize(module).register_hook(
        DiffusersHook(), "mine"
    ),
}
MAKES: dict[str, Callable[[Any], Any]] = {
    "copy": pruned, "replica": replica, "deepcopy": copy.deepcopy, "pickle": unpickled,
    "copy of a replica": lambda module: copy.copy(replica(module)),
}  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("make", MAKES)
def test_a_copy_answers_for_itself(machine: Machine, make: str, hook: str) -> None:
    if (make, hook) in {("pickle", "accelerate"), ("pickle", "diffusers")}:
        pytest.skip("their hooks are functions inside functions, which nobody pickles")
    pair = machine.pair(FAMILIES["flux"].build())
    for module in (pair.graphed, pair.eager):
        HOOKS[hook](module)
    for i in range(3):
        pair(**machine.to(INPUTS(i, 6)))
    mine, its = MAKES[make](pair.graphed), MAKES[make](pair.eager)
    answers_as(machine, mine, its)
    pair(**machine.to(INPUTS(4, 6)))
    assert pair.replays >= 2, "more where a hook on a copy calls the first one's forward"
    pair.handle.disable()
    answers_as(machine, mine, its)
    assert left(pair.graphed) == [] and (hook != "none" or left(mine) == [])


def answers_as(machine: Machine, mine: Any, its: Any) -> None:
    for seed in range(2):
        inputs = machine.to(INPUTS(seed, 6))
        assert same_tree(mine(**inputs), its(**inputs))
        assert same_tree(mine.forward(**inputs), its.forward(**inputs))


def left(owner: Any) -> list[str]:
    """The attributes that lead to us; a callable of another library's may go on around one."""
    ours = (Slot, _Copying)
    names = [name for name, value in vars(owner).items() if isinstance(value, ours)]
    return [name for name in names if name != "_old_forward"]


def test_a_copy_can_be_enabled_too(machine: Machine) -> None:
    pair = machine.pair(FAMILIES["flux"].build())
    twin = pruned(pair.graphed)
    other = Pair(twin, machine, {})
    for i in range(4):
        pair(**machine.to(INPUTS(i, 6)))
        other(**machine.to(INPUTS(i, 6)))
    assert pair.replays == 2 and other.replays == 2


class Pipe(DiffusionPipeline):
    def __init__(self, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)


def test_a_copied_scheduler_sets_its_own_timesteps(machine: Machine) -> None:
    transformer = FAMILIES["flux"].build().to(machine.on)
    pipe = Pipe(transformer, FlowMatchEulerDiscreteScheduler())
    handle = dit_graph.enable(pipe, device=machine.device, remove_syncs=True)
    own = pipe.scheduler
    own.set_timesteps(4)
    for made in (copy.copy(own), copy.deepcopy(own)):
        made.set_timesteps(7)
        assert len(own.timesteps) == 4 and len(made.timesteps) == 7
        sample = torch.zeros(1, 4)
        made.step(sample, made.timesteps[0], sample)
        assert made.step_index == 1 and own.step_index is None and left(made) == []
    handle.disable()
    made.set_timesteps(5)
    assert len(own.timesteps) == 4 and len(made.timesteps) == 5 and left(own) == []
