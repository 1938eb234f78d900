"""Makes named models of the real size with random weights, on which their speed does not depend.

Configurations are those of the published checkpoints, as far as they decide shapes. Text encoders
are left out: prompts are random embeddings of a usual length. The pipelines are otherwise whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

Size = tuple[int, int]
"""It is (height, width) in pixels."""


@dataclass(frozen=True)
class Shape:
    """This is one named model.

    Args:
        pipeline: makes the pipeline for a size, on torch's default device and in its default dtype.
        call: its call's arguments for a batch, beside size, steps and generator.
        sizes: sides in pixels that are measured unless others are asked for.
        one_size: its transformer is built for one size, which is no argument of the call.
        pixels: the side in pixels of the square that one image token stands for.
        frames: latent frames, of a video model.
    """

    pipeline: Callable[[Size], Any]
    call: Callable[[int], dict[str, Any]]
    sizes: tuple[int, ...] = (512, 1024)
    one_size: bool = False
    pixels: int = 16
    frames: int = 1

    def tokens(self, size: Size) -> int:
        """Count the image tokens of one picture."""
        return (size[0] // self.pixels) * (size[1] // self.pixels) * self.frames


def _made(name: str, **config: Any) -> Any:
    """Make a module in the default dtype, but for what `from_pretrained` keeps in float32."""
    module: torch.nn.Module = getattr(diffusers, name)(**config)
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for path, parameter in module.named_parameters():
        wide = kept & set(path.split("."))
        parameter.data = parameter.data.to(torch.float32 if wide else torch.get_default_dtype())
    return module


def _vae(latent_channels: int) -> Any:
    down, up = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    return _made(
        "AutoencoderKL", down_block_types=down, up_block_types=up, layers_per_block=2,
        block_out_channels=(128, 256, 512, 512), latent_channels=latent_channels,
        shift_factor=0.0 if latent_channels > 4 else None,
    )  # fmt: skip


def _scheduler(name: str, **config: Any) -> Any:
    """Make it on the CPU, where it is made in life, whatever the default device is."""
    with torch.device("cpu"):
        return getattr(diffusers, name)(**config)


def _flow() -> Any:
    return _scheduler("FlowMatchEulerDiscreteScheduler")


def _dit(size: Size) -> Any:
    transformer = _made(
        "DiTTransformer2DModel", num_attention_heads=16, attention_head_dim=72, in_channels=4,
        out_channels=8, num_layers=28, sample_size=size[0] // 8, patch_size=2, attention_bias=True,
        activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )  # fmt: skip
    return diffusers.DiTPipeline(transformer, _vae(4), _scheduler("DDIMScheduler"))


def _pixart(size: Size) -> Any:
    transformer = _made(
        "PixArtTransformer2DModel", num_attention_heads=16, attention_head_dim=72, in_channels=4,
        out_channels=8, num_layers=28, cross_attention_dim=1152, sample_size=128, patch_size=2,
        caption_channels=4096, use_additional_conditions=False,
    )  # fmt: skip
    return diffusers.PixArtSigmaPipeline(
        None, None, _vae(4), transformer, _scheduler("DPMSolverMultistepScheduler")
    )


def _masked(width: int, length: int, batch: int) -> dict[str, Any]:
    """Make prompts and negative prompts that are padded to one length, with their masks."""
    mask = torch.ones(batch, length, dtype=torch.long)
    return {
        "prompt_embeds": torch.randn(batch, length, width), "prompt_attention_mask": mask,
        "negative_prompt_embeds": torch.randn(batch, length, width),
        "negative_prompt_attention_mask": mask, "negative_prompt": None,
        "use_resolution_binning": False,
    }  # fmt: skip


def _sana(size: Size) -> Any:
    blocks = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    vae = _made(
        "AutoencoderDC", encoder_block_types=blocks, decoder_block_types=blocks,
        upsample_block_type="interpolate", downsample_block_type="Conv", scaling_factor=0.41407,
    )  # fmt: skip
    scheduler = _scheduler(
        "DPMSolverMultistepScheduler", prediction_type="flow_prediction", use_flow_sigmas=True,
        flow_shift=3.0,
    )  # fmt: skip
    return diffusers.SanaPipeline(None, None, vae, _made("SanaTransformer2DModel"), scheduler)


def _sd3(size: Size) -> Any:
    transformer = _made(
        "SD3Transformer2DModel", sample_size=128, patch_size=2, in_channels=16, num_layers=24,
        attention_head_dim=64, num_attention_heads=24, joint_attention_dim=4096,
        caption_projection_dim=1536, pooled_projection_dim=2048, out_channels=16,
        pos_embed_max_size=384, dual_attention_layers=tuple(range(13)), qk_norm="rms_norm",
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        transformer, _flow(), _vae(16), *(None,) * 6, image_encoder=None, feature_extractor=None
    )


def _sd3_call(batch: int) -> dict[str, Any]:
    return {
        "prompt_embeds": torch.randn(batch, 333, 4096),
        "negative_prompt_embeds": torch.randn(batch, 333, 4096),
        "pooled_prompt_embeds": torch.randn(batch, 2048),
        "negative_pooled_prompt_embeds": torch.randn(batch, 2048),
    }  # fmt: skip


def _flux(size: Size) -> Any:
    transformer = _made("FluxTransformer2DModel", guidance_embeds=True)
    return diffusers.FluxPipeline(_flow(), _vae(16), None, None, None, None, transformer)


def _flux_call(batch: int) -> dict[str, Any]:
    return {"prompt_embeds": torch.randn(batch, 512, 4096),
            "pooled_prompt_embeds": torch.randn(batch, 768)}  # fmt: skip


def _z_image(size: Size) -> Any:
    return diffusers.ZImagePipeline(
        _flow(), _vae(16), None, None, _made("ZImageTransformer2DModel")
    )


def _z_image_call(batch: int) -> dict[str, Any]:
    """Make a call without guidance, as the Turbo weights are used."""
    prompts = [torch.randn(77, 2560) for _ in range(batch)]
    return {"prompt_embeds": prompts, "negative_prompt_embeds": [], "guidance_scale": 0.0}


def _qwen_image(size: Size) -> Any:
    transformer = _made("QwenImageTransformer2DModel", num_layers=60)
    vae = _made("AutoencoderKLQwenImage")
    return diffusers.QwenImagePipeline(_flow(), vae, None, None, transformer)


def _qwen_image_call(batch: int) -> dict[str, Any]:
    mask = torch.ones(batch, 64, dtype=torch.long)
    return {
        "prompt_embeds": torch.randn(batch, 64, 3584), "prompt_embeds_mask": mask,
        "negative_prompt_embeds": torch.randn(batch, 64, 3584), "negative_prompt_embeds_mask": mask,
        "true_cfg_scale": 4.0,
    }  # fmt: skip


def _wan(size: Size) -> Any:
    transformer = _made(
        "WanTransformer3DModel", patch_size=(1, 2, 2), num_attention_heads=12, num_layers=30,
        attention_head_dim=128, in_channels=16, out_channels=16, text_dim=4096, freq_dim=256,
        ffn_dim=8960,
    )  # fmt: skip
    scheduler = _scheduler(
        "UniPCMultistepScheduler", prediction_type="flow_prediction", use_flow_sigmas=True,
        flow_shift=3.0,
    )  # fmt: skip
    return diffusers.WanPipeline(None, None, _made("AutoencoderKLWan"), scheduler, transformer)


def _wan_call(batch: int) -> dict[str, Any]:
    return {"prompt_embeds": torch.randn(batch, 512, 4096), "num_frames": 17,
            "negative_prompt_embeds": torch.randn(batch, 512, 4096)}  # fmt: skip


SHAPES: dict[str, Shape] = {
    "dit-xl-2": Shape(
        _dit, lambda batch: {"class_labels": list(range(batch))}, (256, 512), one_size=True
    ),
    "pixart-sigma": Shape(_pixart, lambda batch: _masked(4096, 300, batch)),
    "sana-1.6b": Shape(_sana, lambda batch: _masked(2304, 300, batch), pixels=32),
    "sd3.5-medium": Shape(_sd3, _sd3_call),
    "flux-dev": Shape(_flux, _flux_call),
    "z-image": Shape(_z_image, _z_image_call),
    "qwen-image": Shape(_qwen_image, _qwen_image_call),
    "wan-1.3b": Shape(_wan, _wan_call, (256, 480), frames=5),
}

LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3-4b": {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072},
}  # fmt: skip


def language_model(name: str) -> Any:
    """Make a named causal LM on torch's default device and in its default dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**LANGUAGE_MODELS[name])
    return AutoModelForCausalLM.from_config(config).to(torch.get_default_dtype())
