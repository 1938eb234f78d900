"""Has what command lines share of their words: the parser, common options, forms of values."""

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
"""It has `height` and `width` in pixels; one that is missing is left to the pipeline."""


class Parser(argparse.ArgumentParser):
    """Parse `python -m dit_graph.NAME`; raise UsageError where argparse would print and exit.

    Options are stored under the names of the fields of `Asked` that they become.
    """

    def __init__(self, name: str, description: str, examples: str) -> None:
        super().__init__(
            prog=f"python -m dit_graph.{name}",
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_prompts(group: argparse._ActionsContainer, what: str) -> None:
    """Take prompts as words of the command line and by option; `what` is the help of the words."""
    add = group.add_argument
    add("positional", nargs="*", metavar="PROMPT", help=what)
    add("--prompt", nargs="+", action="extend", default=[], metavar="PROMPT", help="likewise")
    add_prompt_file(group)


def add_prompt_file(group: argparse._ActionsContainer) -> None:
    group.add_argument("--prompt-file", type=Path, metavar="FILE", help="prompts, one a line")


def add_pipeline_kwargs(group: argparse._ActionsContainer) -> None:
    group.add_argument("--pipeline-kwargs", type=_json_object, default={}, metavar="JSON",
        help="an object with more arguments of the pipeline's call")  # fmt: skip


def add_where(group: argparse._ActionsContainer, otherwise: str) -> None:
    """Add `--dtype` and `--device`, which is `otherwise` where there is no CUDA device."""
    group.add_argument("--dtype", type=_dtype, metavar="TYPE",
        help=f"{', '.join(DTYPES)} (default bfloat16 on cuda, else float32)")  # fmt: skip
    group.add_argument("--device", choices=("cuda", "cpu", "recorder"),
        help="cuda; cpu, which is eager; or recorder, which records and replays on the CPU "
        f"(default cuda where there is one, else {otherwise})")  # fmt: skip


def add_backend(group: argparse._ActionsContainer, what: str) -> None:
    """Add `--backend`; `what` is recorded with it."""
    group.add_argument("--backend", choices=get_args(Backend), default="breakable",
        help=f"how the {what} is recorded (default breakable)")  # fmt: skip


def add_graph(group: argparse._ActionsContainer, what: str) -> None:
    """Add `--backend` and `--no-graph`, which exclude each other; `what` is recorded."""
    choice = group.add_mutually_exclusive_group()
    add_backend(choice, what)
    choice.add_argument("--no-graph", action="store_false", dest="graph",
        help="leave the model as it is")  # fmt: skip


def add_report(group: argparse._ActionsContainer, what: str) -> None:
    group.add_argument("--report", choices=("text", "json"), default="text",
        help=f"{what} (default text)")  # fmt: skip


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


def finite(text: str) -> float:
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


def _dtype(text: str) -> torch.dtype:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(DTYPES)}; got {text!r}")
    return DTYPES[text]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"is not JSON ({error}): {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'must be a JSON object, for example \'{{"style": "noto"}}\', got {text!r}'
        )
    return value
