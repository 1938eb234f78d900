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
from dit_graph.slot import Copying, Slot
from tests.families import FAMILIES
from tests.pair import Machine, Pair, same_tree
from tests.toys import Module, rows

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
    ours = (Slot, Copying)
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


def with_weights_of_its_own(module: Any) -> Any:
    """What has a copy of the module's `__dict__`, as `_replicate_for_data_parallel` gives one."""
    twin = module.__new__(type(module))
    twin.__dict__ = module.__dict__.copy()
    twin.__dict__["_modules"] = dict(module._modules)
    twin.linear = nn.Linear(8, 8, device=module.linear.weight.device).requires_grad_(False)
    return twin


@pytest.mark.parametrize("then", ["disabled", "enabled again", "enabled itself", "pickled"])
def test_a_copied_dict_that_nobody_has_called(machine: Machine, then: str) -> None:
    pair = machine.pair(Module(body_of_one_layer))
    x = rows(0).to(machine.on)
    for _ in range(3):
        pair(x)
    twin = with_weights_of_its_own(pair.graphed)
    handles = [pair.handle]
    if then == "pickled":
        with pytest.raises(pickle.PicklingError, match="which is pickled cannot be told"):
            pickle.dumps(twin)
        assert torch.equal(twin(x), twin.linear(x) + 1)
        assert same_tree(unpickled(twin).state_dict(), twin.state_dict())
        return
    if then == "enabled itself":
        handles.append(dit_graph.enable(twin, device=machine.device, gate="always"))
    else:
        pair.handle.disable()
    if then == "enabled again":
        handles.append(dit_graph.enable(pair.graphed, device=machine.device))
    for _ in range(4):
        assert torch.equal(twin(x), twin.linear(x) + 1)
        assert torch.equal(pair.graphed(x), pair.eager(x))
    for handle in handles:
        handle.disable()
    assert torch.equal(twin(x), twin.linear(x) + 1) and left(twin) == left(pair.graphed) == []


def body_of_one_layer(m: Any, x: Any) -> Any:
    return m.linear(x) + 1


class Reducing(Module):
    def __reduce__(self) -> Any:
        return type(self), (self.body,)


class Stating(Module):
    def __getstate__(self) -> Any:
        return {"inner": {**vars(self), "stated": True}}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state["inner"])


@pytest.mark.parametrize("kind", [Reducing, Stating])
@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, unpickled])
def test_a_class_that_says_itself_how_it_is_copied(machine: Machine, kind: Any, make: Any) -> None:
    module = kind(body_of_one_layer).to(machine.on)
    handle = dit_graph.enable(module, device=machine.device, gate="always", verify="off")
    x = rows(0).to(machine.on)
    for _ in range(2):
        mine = make(module).to(machine.on)
        assert left(mine) == [] and left(module) != []
        assert torch.equal(mine(x), mine.linear(x) + 1)
        assert vars(mine).get("stated") is (True if kind is Stating else None)
    for _ in range(3):
        assert torch.equal(module(x), module.linear(x) + 1)
    assert handle.stats()["replays"] == 1


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
