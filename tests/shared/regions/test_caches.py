"""Blocks replay while a step cache decides between them, and pictures are the cache's own."""

import copy
from typing import Any

import pytest

import dit_graph
from dit_graph.slot import Slot
from tests.pair import PLAIN, Machine, same_tree
from tests.shared.regions.caches import CACHES, STEPS, Cached, steps_of


class Twins:
    """The same model with the same cache, plain and enabled."""

    def __init__(self, cached: Cached, machine: Machine, after: bool, **options: Any) -> None:
        self.cached, self.machine = cached, machine
        self.plain = cached.build().to(machine.on)
        self.ours = cached.build().to(machine.on)
        cached.put_on(self.plain, 0)
        if not after:
            cached.put_on(self.ours, 0)
        self.handle = dit_graph.enable(self.ours, device=machine.device, **PLAIN | options)
        if after:
            cached.put_on(self.ours, 0)

    def picture(self, number: int, steps: int = STEPS) -> dict[str, Any]:
        """Draw one, call by call equal to the plain one's; returns what its calls counted."""
        before = self.handle.stats()
        for module in (self.plain, self.ours):
            module._reset_stateful_cache()
        for given, around in steps_of(self.cached, number, steps):
            given = self.machine.to(given)
            with around(self.plain):
                expected = self.plain(**copy.copy(given))
            with around(self.ours):
                result = self.ours(**copy.copy(given))
            assert same_tree(result, expected)
        return counted(before, self.handle.stats())

    @property
    def facts(self) -> Any:
        return self.handle.explain().modules[0]


def counted(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    found = {k: after[k] - before.get(k, 0) for k in ("calls", "cold", "captures", "replays")}
    eager = {k: n - before["eager"].get(k, 0) for k, n in after["eager"].items()}
    found["eager"] = {k: n for k, n in eager.items() if n}
    if "regions" in after:
        zero = {"calls": 0, "cold": 0, "captures": 0, "replays": 0, "eager": {}}
        found["regions"] = counted(before.get("regions", zero), after["regions"])
    return found


def answered(counts: dict[str, Any]) -> float:
    """The share of calls that ran regions and had all of them replayed."""
    empty = sum(n for reason, n in counts["eager"].items() if reason.startswith("no region ran"))
    return counts["replays"] / (counts["calls"] - empty)


@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("name", CACHES)
def test_pictures_under_a_cache_are_its_own(name: str, after: bool, machine: Machine) -> None:
    twins = Twins(CACHES[name], machine, after, strict=True)
    twins.picture(0)
    for number in (1, 2):
        counts = twins.picture(number)
        assert answered(counts) >= 0.8, counts
        regions = counts["regions"]
        assert regions["replays"] >= 0.95 * regions["calls"], regions
        if not twins.cached.empty:
            assert counts["replays"] >= 0.8 * counts["calls"]
    for signature in twins.facts.signatures:
        assert signature.state.startswith("in regions: ")
        if not twins.cached.inside:
            assert signature.share is not None and signature.share >= 0.9, signature.share


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_changes_and_goes(name: str, machine: Machine) -> None:
    twins = Twins(CACHES[name], machine, after=True)
    twins.picture(0)
    twins.picture(1, 6)  # other step counts
    twins.picture(2, 14)
    for module in (twins.plain, twins.ours):
        twins.cached.take_off(module)
        twins.cached.put_on(module, 1)  # another threshold
    twins.picture(3)
    assert answered(twins.picture(4)) >= 0.8
    for module in (twins.plain, twins.ours):
        twins.cached.take_off(module)
    counts = twins.picture(5)
    assert counts["captures"] == 1 and counts["replays"] >= 0.8 * counts["calls"]
    assert not counts["regions"]["calls"]  # one recording again
    twins.handle.disable()
    there = [vars(child).get("forward") for child in twins.ours.modules()]
    assert not any(isinstance(one, Slot) for one in there)


def test_without_regions_it_is_eager_and_said(machine: Machine) -> None:
    twins = Twins(CACHES["first-block flux"], machine, after=True, regions="off")
    twins.picture(0)
    counts = twins.picture(1)
    assert not counts["replays"] and "regions" not in counts
    assert all("Python state" in reason for reason in counts["eager"])


@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
def test_a_cache_of_another_library(after: bool, machine: Machine) -> None:
    """cache-dit puts blocks of its own into the model while its forward runs."""
    cache_dit = pytest.importorskip("cache_dit", exc_type=ImportError)

    def put_on(module: Any, setting: int) -> None:
        pattern = cache_dit.ForwardPattern.Pattern_1
        adapter = cache_dit.BlockAdapter(
            transformer=module,
            blocks=[module.transformer_blocks, module.single_transformer_blocks],
            forward_pattern=[pattern, pattern],
            check_forward_pattern=False,
        )
        cache_dit.enable_cache(
            adapter,
            cache_config=cache_dit.DBCacheConfig(
                Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=2,
                residual_diff_threshold=(0.3, 0.05)[setting], num_inference_steps=2 * STEPS,
            ),
        )  # fmt: skip

    flux = CACHES["first-block flux"]
    twins = Twins(Cached(flux.build, flux.inputs, put_on, cache_dit.disable_cache), machine, after)

    def picture(number: int) -> dict[str, Any]:
        for module in (twins.plain, twins.ours):
            cache_dit.refresh_context(module, num_inference_steps=2 * STEPS)
        return twins.picture(number)

    picture(0)
    for number in (1, 2):
        counts = picture(number)
        assert counts["replays"] >= 0.8 * counts["calls"]
        assert not counts["eager"] and counts["regions"]["replays"]
    (signature,) = twins.facts.signatures
    assert signature.share is not None and signature.share >= 0.9, signature.share
    if not after:
        return  # cache-dit gives back the forward from before, without the slot in it
    for module in (twins.plain, twins.ours):
        cache_dit.disable_cache(module)
    counts = twins.picture(5)
    assert counts["captures"] == 1 and not counts["regions"]["calls"]
