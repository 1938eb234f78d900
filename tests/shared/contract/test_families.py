"""Real transformers of every family, with nothing annotated."""

import pytest
import torch

from tests.families import FAMILIES
from tests.pair import Machine


@pytest.mark.parametrize("name", FAMILIES)
def test_family_replays_with_new_inputs_and_caption_lengths(machine: Machine, name: str) -> None:
    family = FAMILIES[name]
    pair = machine.pair(family.build())
    captions = [5, 5, 5, 5, 8, 8, 8, 5, 8, 6, 6, 6, 5]
    for i, caption in enumerate(captions):
        pair(**machine.to(family.inputs(10 * i, caption)))
    stats = pair.stats
    assert stats["eager"] == {}
    assert stats["replays"] >= 7, pair.handle.report()


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_family_with_marked_attention(machine: Machine, name: str) -> None:
    family = FAMILIES[name]
    pair = machine.pair(family.build(), breaks=("*.attn",))
    for i in range(5):
        pair(**machine.to(family.inputs(10 * i, 5)))
    assert pair.replays == 3
    assert ".attn ('*.attn')" in pair.handle.report()


@pytest.mark.parametrize("name", ["zimage", "lumina2", "mochi"])  # mochi turns autocast off inside
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "autocast"])
def test_family_in_every_mode(machine: Machine, mode: str, name: str) -> None:
    contexts = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(torch.device(machine.on).type, torch.bfloat16),
    }
    family = FAMILIES[name]
    pair = machine.pair(family.build())
    with contexts[mode]():
        for i in range(5):
            pair(**machine.to(family.inputs(10 * i, 5)))
    assert pair.replays == 3, pair.handle.report()


def test_the_attention_backend_is_in_the_key(machine: Machine) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    family = FAMILIES["flux"]
    pair = machine.pair(family.build())
    for _ in range(3):
        pair(**machine.to(family.inputs(0, 5)))
    with attention_backend("_native_math"):
        for _ in range(3):
            pair(**machine.to(family.inputs(0, 5)))
    assert pair.stats["captures"] == 2
