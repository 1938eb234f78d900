"""Real diffusers transformers at tiny sizes, with inputs of the form that their pipelines pass.

`FAMILIES[name]` has `build()` and `inputs(seed, caption)`: keyword arguments with new values for
each seed; `caption` is the number of text tokens (or picks other lengths where there are several).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

Inputs = Callable[[int, int], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    build: Callable[[], torch.nn.Module]
    inputs: Inputs


def seeded(cls: str, **config: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        module = getattr(diffusers, cls)(**config).eval()
        for p in module.parameters():  # zero-initialised gates would hide everything behind them
            p.requires_grad_(False)
            if not p.any():
                p.normal_(std=0.02)
        return module

    return build


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def timestep(seed: int, batch: int, scale: float = 1.0) -> torch.Tensor:
    return torch.full((batch,), (1 + seed % 97) / 100 * scale)


def lengths_mask(lengths: list[int], total: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(total)[None] < torch.tensor(lengths)[:, None]).to(dtype)


def flux(seed: int, caption: int) -> dict[str, Any]:
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    return {
        "hidden_states": normal(seed, 1, 16, 4),
        "encoder_hidden_states": normal(seed + 1, 1, caption, 32),
        "pooled_projections": normal(seed + 2, 1, 32),
        "timestep": timestep(seed, 1),
        "img_ids": ids,
        "txt_ids": torch.zeros(caption, 3),
        "guidance": torch.full((1,), 3.5),
        "return_dict": False,
    }


def chroma(seed: int, caption: int) -> dict[str, Any]:
    call = flux(seed, caption)
    del call["guidance"], call["pooled_projections"]
    call["attention_mask"] = torch.ones(1, 16 + caption, dtype=torch.bool)
    call["attention_mask"][:, caption // 2 : caption] = False
    return call


def qwen(seed: int, caption: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 2, 8, 16),
        "encoder_hidden_states": normal(seed + 1, 2, 9, 16),
        "encoder_hidden_states_mask": lengths_mask([caption, 9], 9, torch.bool),
        "timestep": timestep(seed, 2),
        "img_shapes": [[(1, 4, 2)]] * 2,
        "return_dict": False,
    }


def lumina2(seed: int, caption: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 2, 4, 8, 8),
        "timestep": timestep(seed, 2),
        "encoder_hidden_states": normal(seed + 1, 2, 9, 16),
        "encoder_attention_mask": lengths_mask([caption, 9], 9, torch.bool),
        "return_dict": False,
    }


def zimage(seed: int, caption: int) -> dict[str, Any]:
    return {
        "x": [normal(seed, 16, 1, 8, 8), normal(seed + 1, 16, 1, 8, 8)],
        "t": timestep(seed, 2),
        "cap_feats": [normal(seed + 2, caption, 16), normal(seed + 3, 7, 16)],
        "return_dict": False,
    }


def cogview4(seed: int, caption: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 2, 4, 8, 8),
        "encoder_hidden_states": normal(seed + 1, 2, caption, 8),
        "timestep": timestep(seed, 2, 1000),
        "original_size": torch.tensor([[64.0, 64.0]] * 2),
        "target_size": torch.tensor([[64.0, 64.0]] * 2),
        "crop_coords": torch.tensor([[0.0, 0.0]] * 2),
        "return_dict": False,
    }


def mochi(seed: int, caption: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 2, 4, 2, 8, 8),
        "encoder_hidden_states": normal(seed + 1, 2, 9, 16),
        "timestep": timestep(seed, 2, 1000),
        "encoder_attention_mask": lengths_mask([caption, 9], 9, torch.bool),
        "return_dict": False,
    }


def sd3(seed: int, caption: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 2, 4, 8, 8),
        "encoder_hidden_states": normal(seed + 1, 2, caption, 32),
        "pooled_projections": normal(seed + 2, 2, 64),
        "timestep": timestep(seed, 2, 1000),
        "return_dict": False,
    }


def wan(seed: int, caption: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 1, 4, 2, 8, 8),
        "timestep": timestep(seed, 1, 1000),
        "encoder_hidden_states": normal(seed + 1, 1, caption, 16),
        "return_dict": False,
    }


def ltx(seed: int, caption: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 2, 32, 4),
        "encoder_hidden_states": normal(seed + 1, 2, 9, 16),
        "timestep": timestep(seed, 2, 1000),
        "encoder_attention_mask": lengths_mask([caption, 9], 9, torch.bool),
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "return_dict": False,
    }


def sana(seed: int, caption: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 2, 4, 8, 8),
        "encoder_hidden_states": normal(seed + 1, 2, 9, 8),
        "encoder_attention_mask": lengths_mask([caption, 9], 9, torch.int64),
        "timestep": timestep(seed, 2, 1000),
        "return_dict": False,
    }


def pixart(seed: int, caption: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 2, 4, 8, 8),
        "encoder_hidden_states": normal(seed + 1, 2, 9, 16),
        "encoder_attention_mask": lengths_mask([caption, 9], 9, torch.int64),
        "timestep": timestep(seed, 2, 1000),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }


def dit(seed: int, caption: int) -> dict[str, Any]:
    return {
        "hidden_states": normal(seed, 2, 4, 8, 8),
        "timestep": torch.full((2,), seed % 997),
        "class_labels": torch.tensor([seed % 10, caption % 10]),
        "return_dict": False,
    }


def unet(seed: int, caption: int) -> dict[str, Any]:
    return {
        "sample": normal(seed, 2, 4, 16, 16),
        "timestep": torch.tensor(float(seed % 997)),
        "encoder_hidden_states": normal(seed + 1, 2, caption, 8),
        "return_dict": False,
    }


HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}

FAMILIES = {
    "qwen": Family(
        seeded("QwenImageTransformer2DModel", patch_size=2, in_channels=16, out_channels=4,
               num_layers=2, attention_head_dim=16, num_attention_heads=3, joint_attention_dim=16,
               axes_dims_rope=(8, 4, 4)), qwen),
    "lumina2": Family(
        seeded("Lumina2Transformer2DModel", sample_size=16, patch_size=2, in_channels=4,
               hidden_size=24, num_layers=2, num_refiner_layers=1, num_attention_heads=3,
               num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(64, 64, 64),
               cap_feat_dim=16), lumina2),
    "zimage": Family(
        seeded("ZImageTransformer2DModel", dim=32, n_layers=2, n_refiner_layers=1, n_heads=2,
               n_kv_heads=2, cap_feat_dim=16, axes_dims=[8, 4, 4], axes_lens=[256, 32, 32]), zimage),
    "cogview4": Family(
        seeded("CogView4Transformer2DModel", patch_size=2, in_channels=4, out_channels=4,
               num_layers=2, attention_head_dim=4, num_attention_heads=4, text_embed_dim=8,
               time_embed_dim=8, condition_dim=4, rope_axes_dim=(8, 8)), cogview4),
    "mochi": Family(
        seeded("MochiTransformer3DModel", patch_size=2, num_attention_heads=2, attention_head_dim=8,
               num_layers=2, pooled_projection_dim=16, in_channels=4, text_embed_dim=16,
               time_embed_dim=4, max_sequence_length=16), mochi),
    "chroma": Family(
        seeded("ChromaTransformer2DModel", in_channels=4, num_layers=1, num_single_layers=1,
               attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
               axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=16,
               approximator_layers=1), chroma),
    "flux": Family(
        seeded("FluxTransformer2DModel", in_channels=4, num_layers=1, num_single_layers=1,
               attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
               pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 4, 8)), flux),
    "sd3": Family(
        seeded("SD3Transformer2DModel", sample_size=16, patch_size=2, in_channels=4, num_layers=2,
               attention_head_dim=8, num_attention_heads=4, joint_attention_dim=32,
               caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
               pos_embed_max_size=16, qk_norm="rms_norm", dual_attention_layers=(0,)), sd3),
    "wan": Family(
        seeded("WanTransformer3DModel", num_attention_heads=2, attention_head_dim=12, in_channels=4,
               out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2,
               rope_max_seq_len=32), wan),
    "ltx": Family(
        seeded("LTXVideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=2,
               attention_head_dim=8, cross_attention_dim=16, num_layers=2, caption_channels=16),
        ltx),
    "sana": Family(
        seeded("SanaTransformer2DModel", in_channels=4, out_channels=4, num_layers=2,
               num_attention_heads=2, attention_head_dim=4, num_cross_attention_heads=2,
               cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8,
               sample_size=8), sana),
    "pixart": Family(
        seeded("PixArtTransformer2DModel", num_attention_heads=2, attention_head_dim=8,
               in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=16, sample_size=8,
               patch_size=2, caption_channels=16, use_additional_conditions=False), pixart),
    "dit": Family(
        seeded("DiTTransformer2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4,
               out_channels=8, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10),
        dit),
    "unet": Family(
        seeded("UNet2DConditionModel", sample_size=16, in_channels=4, out_channels=4,
               block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
               cross_attention_dim=8, attention_head_dim=4,
               down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
               up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")), unet),
}  # fmt: skip


def moved(value: Any, device: str) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), value)
