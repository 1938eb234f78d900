"""A model that is changed at random, between pictures and within them, next to an eager twin."""

import random
from collections import Counter
from typing import Any

import pytest

import dit_graph
from dit_graph.state.watcher import StateWatcher
from tests.families import FAMILIES
from tests.pair import PLAIN, Machine, same_tree
from tests.shared.state.mutations import (
    MUTATIONS,
    NEVER_BACK,
    SAYS_NOTHING,
    World,
    block_hook,
    reset,
)

CALLS, STEPS = 300, 10


class Fuzz:
    """The same mutations and calls on an enabled model and on a twin that stays eager."""

    def __init__(self, machine: Machine, seed: int) -> None:
        reset()
        self.random = random.Random(seed)
        self.machine = machine
        self.worlds = World(), World()
        for world in self.worlds:
            world.model.to(machine.on)
        self.handle = dit_graph.enable(self.worlds[0].model, device=machine.device, **PLAIN)
        self.state: dict[str, Any] = {}
        self.came: Counter[Any] = Counter()
        self.eligible = self.replayed = self.wrong = 0

    def mutate(self) -> None:
        name = self.random.choice([*MUTATIONS])
        choices, change = MUTATIONS[name]
        choice = self.random.choice(choices)
        if self.state.get("a hook on a block"):  # under which nothing is recorded: it goes again
            name, change, choice = "a hook on a block", block_hook, False
        for world in self.worlds:
            change(world, choice)
        if name in NEVER_BACK:
            self.state[name] = self.random.random()
        elif name not in SAYS_NOTHING:
            self.state[name] = choice

    def call(self, i: int) -> None:
        inputs = FAMILIES["flux"].inputs(i, 6)
        before = self.handle.stats()["replays"]
        got, expected = (w.model(**self.machine.to(dict(inputs))) for w in self.worlds)
        self.wrong += not same_tree(got, expected)
        state = tuple(sorted(self.state.items(), key=str))
        if self.came[state] >= 2 and not self.state.get("a hook on a block"):
            self.eligible += 1
            self.replayed += self.handle.stats()["replays"] - before
        self.came[state] += 1

    def run(self) -> None:
        for i in range(CALLS):
            if i % STEPS == 0 or self.random.random() < 0.08:
                self.mutate()
            self.call(i)
        self.handle.disable()
        reset()


@pytest.mark.parametrize("seed", range(20))
def test_a_model_changed_at_random_is_always_eagers(machine: Machine, seed: int) -> None:
    fuzz = Fuzz(machine, seed)
    fuzz.run()
    assert fuzz.wrong == 0
    assert fuzz.eligible > 60 and fuzz.replayed >= 0.6 * fuzz.eligible, fuzz.handle.report()


def test_it_fails_when_the_comparison_is_taken_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StateWatcher.compare
    monkeypatch.setattr(StateWatcher, "compare", lambda self: "" if self.states else real(self))
    fuzz = Fuzz(machine, 0)
    try:
        fuzz.run()
    except Exception:
        fuzz.wrong += 1
    finally:
        fuzz.handle.disable()
        reset()
    assert fuzz.wrong
