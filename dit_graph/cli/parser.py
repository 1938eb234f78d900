"""The words of the command line and the form of each one's value."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, get_args

import torch

from dit_graph.cli.errors import UsageError
from dit_graph.config import Backend

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

Size = dict[str, int]
"""`height` and `width` in pixels; one that is missing is left to the pipeline."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def whole(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value < 2**63:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {low} and below 2**63, got {text!r}"
            )
        return value

    return parse


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value


def size(text: str) -> Size:
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(
            f"must be WIDTHxHEIGHT in pixels, for example 64x96, got {text!r}"
        )
    return {"height": int(height), "width": int(width)}


def _sizes(text: str) -> tuple[Size, ...]:
    return tuple(size(part.strip()) for part in text.split(","))


def dtype(text: str) -> torch.dtype:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(DTYPES)}; got {text!r}")
    return DTYPES[text]


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"is not JSON ({error}): {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'must be a JSON object, for example \'{{"style": "noto"}}\', got {text!r}'
        )
    return value


_EXAMPLES = """\
examples:
  python -m dit_graph.generate fox
  python -m dit_graph.generate fox "birthday cake" --size 64x64 --size 96x64 --seed 7
  python -m dit_graph.generate --model OWNER/NAME --prompt "a fox in the snow" --steps 28 \\
      --size 1024x1024 --warmup-sizes 1024x1024 --output fox.png
"""


def parser() -> argparse.ArgumentParser:
    """The parser; what it refuses is a UsageError."""
    built = Parser(
        prog="python -m dit_graph.generate",
        description="Draw pictures with a diffusers pipeline whose transformer is replayed from "
        "CUDA graphs. Without --model the small embedded model draws; it needs no download.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_what(built.add_argument_group("what to draw"))
    _add_how(built.add_argument_group("with what"))
    _add_graphs(built.add_argument_group("graphs"))
    _add_results(built.add_argument_group("results"))
    return built


def _add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("positional", nargs="*", metavar="PROMPT", help="what to draw, one picture each")
    add("--prompt", nargs="+", action="extend", default=[], metavar="PROMPT", help="likewise")
    add("--prompt-file", type=Path, metavar="FILE", help="prompts, one a line")
    add("--negative-prompt", metavar="TEXT", help="what to steer away from")
    add("--size", type=size, action="append", metavar="WxH", help="pixels; may be repeated")
    add("--height", type=whole(1), metavar="H", help="pixels, instead of --size")
    add("--width", type=whole(1), metavar="W", help="pixels, instead of --size")
    add("--steps", "--num-inference-steps", type=whole(1), metavar="N", help="denoising steps")
    add("--guidance-scale", type=_finite, metavar="X", help="above 1 usually with guidance")
    add("--seed", type=whole(0), default=0, metavar="N",
        help="of the first picture; every following one has the next (default 0)")  # fmt: skip
    add("--num-images-per-prompt", type=whole(1), default=1, metavar="N",
        help="pictures of each prompt and size, drawn together (default 1)")  # fmt: skip
    add("--pipeline-kwargs", type=json_object, default={}, metavar="JSON",
        help="an object with more arguments of the pipeline's call")  # fmt: skip


def _add_how(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", metavar="PATH_OR_ID", help="a diffusers pipeline's folder or hub id OWNER/NAME")
    add("--lora", action="append", default=[], metavar="PATH", help="LoRA; may be repeated")
    add_where(group, "cpu")


def add_where(group: argparse._ActionsContainer, otherwise: str) -> None:
    """`--dtype` and `--device`, which is `otherwise` where there is no CUDA device."""
    group.add_argument("--dtype", type=dtype, metavar="TYPE",
        help=f"{', '.join(DTYPES)} (default bfloat16 on cuda, else float32)")  # fmt: skip
    group.add_argument("--device", choices=("cuda", "cpu", "recorder"),
        help="cuda; cpu, which is eager; or recorder, which records and replays on the CPU "
        f"(default cuda where there is one, else {otherwise})")  # fmt: skip


def add_backend(group: argparse._ActionsContainer, what: str) -> None:
    """`--backend` or `--no-graph`, for `what` is recorded."""
    choice = group.add_mutually_exclusive_group()
    choice.add_argument("--backend", choices=get_args(Backend), default="breakable",
        help=f"how the {what} is recorded (default breakable)")  # fmt: skip
    choice.add_argument("--no-graph", action="store_true", help="leave the model as it is")


def _add_graphs(group: argparse._ArgumentGroup) -> None:
    add_backend(group, "transformer")
    group.add_argument("--warmup-sizes", type=_sizes, default=(), metavar="WxH[,WxH]",
        help="record these sizes before drawing")  # fmt: skip


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output", type=Path, default=Path("out"), metavar="PATH",
        help="a folder, or a .png file for one picture (default out)")  # fmt: skip
    group.add_argument("--report", choices=("text", "json"), default="text",
        help="what was recorded, as text or as one JSON line on stdout (default text)")  # fmt: skip
