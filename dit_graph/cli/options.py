"""Keeps what the commands were asked; what is wrong on its face is a `UsageError`.

It reads the prompt file, but it loads nothing and knows no model.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from dit_graph.cli.errors import UsageError
from dit_graph.cli.parser import Size
from dit_graph.config import Backend


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Every command is asked these.

    `None` is "not given" throughout: the default of the pipeline or model itself holds.
    """

    prompts: tuple[str, ...]
    model: str | None
    dtype: torch.dtype
    device: str
    backend: Backend = "breakable"
    graph: bool = True
    report: str = "text"

    @classmethod
    def of(cls, given: argparse.Namespace, **settled: Any) -> Self:
        """Take each field as it is `settled`, or else as it was parsed under its own name."""
        names = {field.name for field in fields(cls)}
        parsed = {name: value for name, value in vars(given).items() if name in names}
        frozen = {n: tuple(v) if isinstance(v, list) else v for n, v in parsed.items()}
        return cls(**{**frozen, **settled})

    @property
    def enable(self) -> dict[str, Any]:
        """Tell `dit_graph.enable` of the recorder; any other device it sees by the model."""
        return {"device": "recorder" if self.device == "recorder" else "auto"}


@dataclass(frozen=True, kw_only=True)
class Options(Asked):
    """A command on a pipeline is asked these too; checks go as far as they go without it.

    `spelling` has the option of each argument of a pipeline's call that has one, and `model`'s.
    """

    spelling: ClassVar[Mapping[str, str]] = {
        "model": "--model",
        "prompt": "PROMPT",
        "negative_prompt": "--negative-prompt",
        "height": "--size",
        "width": "--size",
        "num_inference_steps": "--steps",
        "guidance_scale": "--guidance-scale",
        "num_images_per_prompt": "--num-images-per-prompt",
        "generator": "--seed",
    }
    draws: ClassVar[bool] = True  # These are pictures of one frame each.

    pipeline_kwargs: dict[str, Any]
    sizes: tuple[Size, ...]
    steps: int | None
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    seed: int = 0
    count: int = 1
    loras: tuple[str, ...] = ()
    cache: Any = None  # diffusers' config of a step cache
    warmup_sizes: tuple[Size, ...] = ()


def settle(given: argparse.Namespace, otherwise: str) -> None:
    """Fill in a device and a dtype that were left open; without CUDA the device is `otherwise`."""
    there = torch.cuda.is_available()
    if given.device == "cuda" and not there:
        raise UsageError("--device cuda: torch sees no CUDA device; use --device cpu or recorder")
    given.device = given.device or ("cuda" if there else otherwise)
    given.dtype = given.dtype or (torch.bfloat16 if given.device == "cuda" else torch.float32)


def prompts(given: argparse.Namespace, wanted: str, example: str) -> tuple[str, ...]:
    """Collect the prompts of all options; errors ask for what is `wanted` and give an `example`."""
    found = [*given.positional, *given.prompt]
    if given.prompt_file is not None:
        found += lines_of(given.prompt_file.expanduser())
    if not found:
        raise UsageError(f"no prompt; {wanted}, for example: {example}")
    for number, prompt in enumerate(found, 1):
        if not prompt.strip():
            raise UsageError(f"prompt {number} is empty ({prompt!r}); {wanted}")
        plain(prompt, f"prompt {number}")
    return tuple(found)


def lines_of(path: Path) -> list[str]:
    """Read the prompts of a file, which has one a line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"--prompt-file {path}: cannot be read ({reason})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {path}: is not UTF-8 text; save it as UTF-8") from error
    lines = [line.strip() for line in text.splitlines()]
    if not any(lines):
        raise UsageError(f"--prompt-file {path}: has no prompt; write one a line")
    return [line for line in lines if line]


def plain(text: str | None, name: str) -> str | None:
    """Refuse a `text` that is no Unicode, such as bytes, which arrive as surrogates."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name}: is not UTF-8 text: {text!r}") from error
    return text
