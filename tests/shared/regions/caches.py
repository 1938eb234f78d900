"""Step caches over tiny transformers that are deep enough to be worth one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

from tests.families import FAMILIES, Inputs, seeded

FLUX = dict(FAMILIES["flux"].build().config)
STEPS = 8


def deep_flux() -> torch.nn.Module:
    config = {k: v for k, v in FLUX.items() if not k.startswith("_")}
    return seeded("FluxTransformer2DModel", **config | {"num_layers": 6, "num_single_layers": 6})()


def deep_wan() -> torch.nn.Module:
    config = dict(FAMILIES["wan"].build().config)
    config = {k: v for k, v in config.items() if not k.startswith("_")}
    return seeded("WanTransformer3DModel", **config | {"num_layers": 12})()


def nucleus() -> torch.nn.Module:
    return seeded(
        "NucleusMoEImageTransformer2DModel", patch_size=2, in_channels=16, out_channels=4,
        num_layers=8, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4), moe_enabled=False, capacity_factors=[8.0] * 8,
    )()  # fmt: skip


TEXT = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(5))  # one memory a prompt


def nucleus_inputs(seed: int, caption: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, 16, 16, generator=g),
        "encoder_hidden_states": TEXT,
        "timestep": torch.rand(1, generator=g),
        "img_shapes": (1, 4, 4),
        "return_dict": False,
    }


@dataclass(frozen=True)
class Cached:
    """A step cache over a model.

    Args:
        put_on, take_off: the cache; a changed setting is given by its number.
        skips: whether some calls run fewer blocks than others.
        inside: its hooks sit inside of blocks.
        empty: in some calls no block runs at all.
    """

    build: Callable[[], torch.nn.Module]
    inputs: Inputs
    put_on: Callable[[Any, int], None]
    take_off: Callable[[Any], None] = lambda module: module.disable_cache()
    skips: bool = True
    inside: bool = False
    empty: bool = False
    batch: int = 1


def by_config(make: Callable[[int], Any]) -> Callable[[Any, int], None]:
    return lambda module, setting: module.enable_cache(make(setting))


def first(setting: int) -> Any:
    return diffusers.FirstBlockCacheConfig(threshold=(0.02, 0.4)[setting % 2])


def mag(setting: int) -> Any:
    return diffusers.MagCacheConfig(
        threshold=0.06, max_skip_steps=1, retention_ratio=(0.6, 0.4)[setting % 2],
        num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS,
    )  # fmt: skip


def sea(setting: int) -> Any:
    return diffusers.SeaCacheConfig(threshold=(0.2, 0.4)[setting % 2], max_consecutive_cached=1)


def taylor(setting: int) -> Any:
    return diffusers.TaylorSeerCacheConfig(
        cache_interval=3 + setting % 2, disable_cache_before_step=3, max_order=1,
        taylor_factors_dtype=torch.float32,
    )  # fmt: skip


def pyramid(setting: int) -> Any:
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2 + setting % 2,
        cross_attention_block_skip_range=3,
        spatial_attention_timestep_skip_range=(-1, 2000),
        cross_attention_timestep_skip_range=(-1, 2000),
        current_timestep_callback=lambda: 500,
    )


def faster(setting: int) -> Any:
    return diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2 + setting % 2,
        spatial_attention_timestep_skip_range=(-1, 2000),
        unconditional_batch_skip_range=3,
        unconditional_batch_timestep_skip_range=(-1, 2000),
        current_timestep_callback=lambda: 500,
        attention_weight_callback=lambda _: 0.3,
        tensor_format="BCFHW",
    )


def twice(inputs: Inputs) -> Inputs:
    """Guidance in one batch, which is what FasterCache takes apart."""

    def both(seed: int, caption: int) -> dict[str, Any]:
        found = inputs(seed, caption)
        return {k: torch.cat([v, v]) if torch.is_tensor(v) else v for k, v in found.items()}

    return both


FLUX_INPUTS, WAN_INPUTS = FAMILIES["flux"].inputs, FAMILIES["wan"].inputs
CACHES = {
    "first-block flux": Cached(deep_flux, FLUX_INPUTS, by_config(first)),
    "first-block wan": Cached(deep_wan, WAN_INPUTS, by_config(first)),
    "mag": Cached(deep_flux, FLUX_INPUTS, by_config(mag), empty=True),
    "sea": Cached(deep_wan, WAN_INPUTS, by_config(sea), empty=True),
    "text-kv": Cached(
        nucleus, nucleus_inputs, by_config(lambda _: diffusers.TextKVCacheConfig()), skips=False
    ),
    "taylor-seer": Cached(deep_flux, FLUX_INPUTS, by_config(taylor), inside=True),
    "pyramid": Cached(deep_wan, WAN_INPUTS, by_config(pyramid), inside=True),
    "faster": Cached(deep_wan, twice(WAN_INPUTS), by_config(faster), inside=True),
}


def steps_of(cached: Cached, picture: int, steps: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """The calls of a picture, which come closer to each other, as they do in a real one."""
    for step in range(steps):
        for name in ("cond", "uncond"):
            given = cached.inputs(picture, 8)
            h = given["hidden_states"]
            given["hidden_states"] = h * (1 + 0.3 / (1 + step)) + 0.01 * (name == "cond")
            yield given, context(name, step, steps)


def context(name: str, step: int, steps: int) -> Callable[[Any], AbstractContextManager[Any]]:
    def around(module: Any) -> AbstractContextManager[Any]:
        if not hasattr(module, "cache_context"):
            return nullcontext()
        sigma = 1.0 - step / steps
        return module.cache_context(name, step_index=step, sigma=sigma, num_inference_steps=steps)

    return around
