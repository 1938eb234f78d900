"""What the recipes share: their command line, drawing, saving, and random weights to try with."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DiffusionPipeline

import dit_graph


def arguments(about: str | None, model: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line of a recipe whose default model is `model`."""
    parser = argparse.ArgumentParser(description=about)
    add = parser.add_argument
    add("prompt", nargs="?", default="a fox")
    add("--model", default=model, help="folder or hub id (default %(default)s)")
    add("--tiny", action="store_true", help="random weights on the CPU, no download")
    add("--backend", choices=("breakable", "full", "debug", "eager"), default="breakable")
    add("--pictures", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("out"), help="folder (default out)")
    return parser.parse_args(argv)


def run(
    about: str | None,
    model: str,
    options: dict[str, Any],
    tiny: Callable[[], tuple[Any, dict[str, Any]]],
    argv: Sequence[str] | None,
) -> int:
    """A recipe's whole run: load `model` (or build `tiny`), enable, draw, report."""
    args = arguments(about, model, argv)
    pipe, call = (
        tiny() if args.tiny else (from_pretrained(args), {"prompt": args.prompt, **options})
    )
    with dit_graph.enable(pipe, **graphs(args)) as handle:
        draw(pipe, call, args)
        print(handle.report())
    return 0


def graphs(args: argparse.Namespace) -> dict[str, str]:
    """The options of `enable`: a tiny pipeline is recorded and replayed on the CPU."""
    return {"backend": args.backend, "device": "recorder" if args.tiny else "auto"}


def from_pretrained(args: argparse.Namespace) -> Any:
    """The pipeline, on the GPU if there is one, in the half precision that it is made for."""
    pipe = DiffusionPipeline.from_pretrained(args.model, dtype=torch.bfloat16)
    return pipe.to("cuda" if torch.cuda.is_available() else "cpu")


def draw(pipe: Any, call: dict[str, Any], args: argparse.Namespace) -> None:
    """Draw and save, a call for each seed: what the first one recorded the others replay."""
    for seed in range(args.seed, args.seed + args.pictures):
        output = pipe(generator=torch.Generator().manual_seed(seed), **call)
        save(pictures(output), args.output / f"{Path(args.model).name}-seed{seed}.png")


def pictures(output: Any) -> list[Any]:
    """The one picture of a call, or the frames of its one video."""
    return [output.images[0]] if hasattr(output, "images") else list(output.frames[0])


def save(frames: list[Any], path: Path) -> None:
    """A PNG; several frames make an animated one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(path, save_all=len(frames) > 1, append_images=frames[1:], duration=62)
    print(path)


def random(cls: type[Any], *args: Any, **config: Any) -> Any:
    """A model with random weights, none of them zero: a zero gate would hide what is behind it."""
    torch.manual_seed(0)
    model = cls(*args, **config).eval().requires_grad_(False)
    for p in model.parameters():
        if not p.any():
            p.normal_(std=0.02)
    return model


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Stands for encoded text: a tiny pipeline has no text encoder."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiny_vae(channels: int) -> AutoencoderKL:
    """Two pixels a latent and side."""
    return random(
        AutoencoderKL,
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=4,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
