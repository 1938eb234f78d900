"""The command line as one frozen `Options`; what is wrong on its face is a `UsageError`.

Reads the prompt file; it loads nothing and knows no model.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from dit_graph.cli.errors import UsageError
from dit_graph.cli.parser import Size, parser
from dit_graph.config import Backend


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for, checked as far as that goes without a model.

    `None` is "not given" throughout: the pipeline's own default holds. `spelling` has the option
    of each argument of a pipeline's call that has one, and `model`'s.
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
    draws: ClassVar[bool] = True  # pictures, one frame each

    prompts: tuple[str, ...]
    model: str | None
    dtype: torch.dtype
    device: str
    pipeline_kwargs: dict[str, Any]
    sizes: tuple[Size, ...]
    steps: int | None
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    seed: int = 0
    count: int = 1
    loras: tuple[str, ...] = ()
    backend: Backend = "breakable"
    graph: bool = True
    warmup_sizes: tuple[Size, ...] = ()
    output: Path = Path()
    report: str = "text"

    @property
    def total(self) -> int:
        """How many pictures this draws."""
        return len(self.prompts) * len(self.sizes) * self.count

    @property
    def single_file(self) -> bool:
        """Whether `output` names the picture itself and not a folder."""
        return self.output.suffix.lower() == ".png" and not self.output.is_dir()


def parse(argv: Sequence[str] | None) -> Options:
    """The options of a command line.

    Raises:
        UsageError: an option has a value that cannot work, or two contradict each other.
    """
    given = parser().parse_intermixed_args(argv)
    if given.no_graph and given.warmup_sizes:
        raise UsageError("--warmup-sizes records graphs, which --no-graph forbids; give one")
    device = device_or(given.device, "cpu")
    dtype = given.dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    return Options(
        prompts=prompts(given, "say what to draw", "generate fox"),
        negative_prompt=plain(given.negative_prompt, "--negative-prompt"),
        sizes=_chosen_sizes(given),
        steps=given.steps,
        guidance_scale=given.guidance_scale,
        seed=given.seed,
        count=given.num_images_per_prompt,
        model=given.model,
        dtype=dtype,
        loras=tuple(given.lora),
        device=device,
        backend=given.backend,
        graph=not given.no_graph,
        warmup_sizes=given.warmup_sizes,
        output=given.output.expanduser(),
        report=given.report,
        pipeline_kwargs=given.pipeline_kwargs,
    )


def device_or(name: str | None, otherwise: str) -> str:
    """The device that was asked for; else cuda where there is one, and `otherwise` elsewhere."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device; use --device cpu or recorder")
    return name or ("cuda" if torch.cuda.is_available() else otherwise)


def prompts(given: argparse.Namespace, wanted: str, example: str) -> tuple[str, ...]:
    """The prompts of all options; errors ask for what is `wanted` and give an `example`."""
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
    """The prompts of a file, one a line."""
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
    """`text`, which must be Unicode: bytes that are none arrive as surrogates."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name}: is not UTF-8 text: {text!r}") from error
    return text


def _chosen_sizes(given: argparse.Namespace) -> tuple[Size, ...]:
    sides = {name: getattr(given, name) for name in ("height", "width")}
    sides = {name: value for name, value in sides.items() if value is not None}
    if sides and given.size:
        raise UsageError(f"--size and --{next(iter(sides))} contradict each other; give one")
    return tuple(given.size or [sides])
