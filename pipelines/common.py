"""What the recipes share: their command line, drawing with and without graphs, tiny models."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DiffusionPipeline

import dit_graph

SMALL = {"height": 32, "width": 32, "num_inference_steps": 4}


def arguments(
    about: str | None, model: str, prompt: str, argv: Sequence[str] | None
) -> argparse.Namespace:
    """The command line of a recipe whose defaults are `model` and `prompt`."""
    parser = argparse.ArgumentParser(description=about)
    add = parser.add_argument
    add("prompt", nargs="?", default=prompt, help="what to draw (default %(default)s)")
    add("--model", default=model, help="folder or hub id (default %(default)s)")
    add("--tiny", action="store_true", help="random weights, no download; PROMPT is not read")
    add("--device", choices=("cuda", "cpu", "recorder"),
        help="cuda; recorder, which records on the CPU; or cpu, which records nothing (default "
        "cuda where there is one, else recorder with --tiny and cpu without)")  # fmt: skip
    add("--backend", choices=("breakable", "full", "debug", "eager"), default="breakable")
    add("--remove-syncs", action="store_true", help="take host syncs out of the loop as well")
    add("--pictures", type=int, default=3, help="a seed each (default %(default)s)")
    add("--seed", type=int, default=0, help="of the first picture (default %(default)s)")
    add("--output", type=Path, default=Path("out"), help="folder (default %(default)s)")
    args = parser.parse_args(argv)
    if args.pictures < 1:
        parser.error(f"--pictures {args.pictures}: draws nothing; give 1 or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use cpu or recorder")
    if args.device is None:
        elsewhere = "recorder" if args.tiny else "cpu"
        args.device = "cuda" if torch.cuda.is_available() else elsewhere
    return args


def from_pretrained(model: str) -> Any:
    """The pipeline in the half precision that it is made for.

    Raises:
        SystemExit: it cannot be loaded.
    """
    try:
        return DiffusionPipeline.from_pretrained(model, dtype=torch.bfloat16)
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise SystemExit(
            f"cannot load {model}: {why}\nGive --model FOLDER, or --tiny to try the recipe."
        ) from error


def run(
    about: str | None,
    model: str,
    options: dict[str, Any],
    tiny: Callable[[], tuple[Any, dict[str, Any]]],
    argv: Sequence[str] | None,
    *,
    prompt: str = "a fox",
    load: Callable[[str], Any] = from_pretrained,
    ask: Callable[[Any, str], dict[str, Any]] = lambda pipe, prompt: {"prompt": prompt},
) -> int:
    """A recipe's whole run: load `model` (or build `tiny`), draw with graphs, report, draw without.

    Args:
        options: of every call of the real model; `ask(pipe, prompt)` gives the others.

    Raises:
        SystemExit: a picture has other pixels without graphs.
    """
    args = arguments(about, model, prompt, argv)
    if args.tiny:
        pipe, call = tiny()
    else:
        pipe = load(args.model)
        call = {**options, **ask(pipe, args.prompt)}
    where = "cuda" if args.device == "cuda" else "cpu"
    pipe, call = pipe.to(where), moved(call, where)
    with dit_graph.enable(
        pipe,
        backend=args.backend,
        device="recorder" if args.device == "recorder" else "auto",
        remove_syncs=args.remove_syncs,
    ) as handle:
        graphed, seconds = draw(pipe, call, args)
        for path, frames in graphed.items():
            save(frames, path)
        print(handle.report())
        replays = handle.stats()["replays"]
    if not replays:
        why = "--device cpu records nothing" if args.device == "cpu" else "the report says why"
        print(f"nothing was replayed, so there is nothing to compare: {why}")
        print(f"{told(seconds)} a picture")
        return 0
    plain, plain_seconds = draw(pipe, call, args)
    compare(graphed, plain)
    print(f"same pixels with and without graphs ({len(plain)} drawn)")
    print(f"{told(seconds)} a picture with graphs, {told(plain_seconds)} without")
    if args.device == "recorder":
        print("the recorder's time says nothing about a GPU")
    return 0


def draw(
    pipe: Any, call: dict[str, Any], args: argparse.Namespace
) -> tuple[dict[Path, list[Any]], list[float]]:
    """A call for each seed: each file's frames, and the seconds that each took."""
    name = f"{Path(args.model).name}{'-tiny' if args.tiny else ''}"
    drawn, seconds = {}, []
    for seed in range(args.seed, args.seed + args.pictures):
        begin = clock(args.device)
        output = pipe(generator=torch.Generator().manual_seed(seed), **call)
        seconds.append(clock(args.device) - begin)
        drawn[args.output / f"{name}-seed{seed}.png"] = pictures(output)
    return drawn, seconds


def clock(device: str) -> float:
    """Seconds, once the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def told(seconds: list[float]) -> str:
    """The median, without the first: that one warms up and records."""
    return f"{median(seconds[1:]):.3f} s" if seconds[1:] else "(not timed: --pictures 1)"


def compare(graphed: dict[Path, list[Any]], plain: dict[Path, list[Any]]) -> None:
    """Raise SystemExit with the pictures that differ, and save what they should have been."""
    wrong = []
    for path, frames in plain.items():
        if not np.array_equal(np.stack(frames), np.stack(graphed[path])):
            save(frames, path.with_stem(f"{path.stem}-without-graphs"))
            wrong.append(str(path))
    if wrong:
        raise SystemExit(f"other pixels with graphs than without: {', '.join(wrong)}")


def pictures(output: Any) -> list[Any]:
    """The one picture of a call, or the frames of its one video."""
    return [output.images[0]] if hasattr(output, "images") else list(output.frames[0])


def save(frames: list[Any], path: Path) -> None:
    """A PNG; several frames make an animated one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(path, save_all=len(frames) > 1, append_images=frames[1:], duration=62)
    print(path)


def moved(value: Any, device: str) -> Any:
    """The tensors of a call on `device`; its other values as they are."""
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, list):
        return [moved(each, device) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


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


def tiny_video_vae(cls: type[Any], dim_mult: list[int], halved_in_time: list[bool]) -> Any:
    """Of Wan's kind, four channels a latent."""
    return random(
        cls,
        base_dim=8,
        z_dim=4,
        dim_mult=dim_mult,
        num_res_blocks=1,
        temperal_downsample=halved_in_time,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )


def masked_prompts() -> dict[str, Any]:
    """Encoded prompts of six tokens, padded: four are real, of the negative one the first."""
    return {
        "negative_prompt": None,
        "prompt_embeds": normal(1, 1, 6, 16),
        "prompt_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "negative_prompt_embeds": normal(2, 1, 6, 16),
        "negative_prompt_attention_mask": torch.tensor([[1, 0, 0, 0, 0, 0]]),
        "use_resolution_binning": False,
        **SMALL,
    }
