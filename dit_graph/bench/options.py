"""Measure from the command line: `python -m dit_graph.bench`.

It owns the options; what is measured and how is in the files beside it.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dit_graph.bench.contenders import CONTENDERS
from dit_graph.bench.run import run
from dit_graph.bench.shapes import LANGUAGE_MODELS, SHAPES
from dit_graph.cli import files, model, ranks
from dit_graph.cli.errors import UsageError, one_line
from dit_graph.cli.options import Options, lines_of, settle
from dit_graph.cli.parser import (
    Parser,
    Size,
    add_pipeline_kwargs,
    add_prompt_file,
    add_where,
    size,
    whole,
)
from dit_graph.errors import ConfigError
from dit_graph.explain.plot import empty_figure

WHATS = ("picture", "step", "prefill")
_STEPS = 20
_IMAGES, _FEW = 8, 4
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_COMPARE = ("eager", "full", "breakable")
_EXAMPLES = """\
examples:
  python -m dit_graph.bench
  python -m dit_graph.bench --model flux-dev --sizes 512,1024 --compare eager,breakable
  python -m dit_graph.bench --compare breakable,breakable+remove-syncs
  python -m dit_graph.bench --model OWNER/NAME --prompt-file prompts.txt --batch 1,4 --output run
  python -m dit_graph.bench --what prefill --model qwen3-0.6b --tokens 16,128,1024
"""


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Options):
    """`parse` makes these. Each contender draws `images` pictures once it is warm."""

    spelling: ClassVar[Mapping[str, str]] = {
        **Options.spelling, "height": "--sizes", "width": "--sizes", "prompt": "--prompt",
    }  # fmt: skip
    draws: ClassVar[bool] = False

    what: str
    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    compare: tuple[str, ...]
    images: int
    latent: bool
    set_up: str
    output: Path
    chart: Path | None
    alone: str | None
    scenario: str | None


def parser() -> Parser:
    """Make the parser; what it refuses is a UsageError."""
    built = Parser(
        "bench",
        "Time a model with and without graphs, in turns and in one process, compare "
        "the bits, and say from which picture on it pays. Without --model the embedded one draws. "
        "Milliseconds a step are a picture's time over its steps. "
        "The last line of stdout is the record as one JSON object.",
        _EXAMPLES,
    )
    _add_what(built.add_argument_group("what to time"))
    _add_how(built.add_argument_group("how"))
    _add_results(built.add_argument_group("results"))
    return built


def _add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    names = ", ".join([*SHAPES, *LANGUAGE_MODELS])
    add("--model", metavar="MODEL",
        help=f"a folder, a hub id, or random weights of a real size: {names}")  # fmt: skip
    add("--what", choices=WHATS, default="picture",
        help="a picture, one denoising step, or an LLM's prefill (default picture)")  # fmt: skip
    add("--sizes", type=_sizes, default=(), metavar="N|WxH[,..]",
        help="pixels (default two of a named shape's, 64 of the embedded model's, else its own)"
    )  # fmt: skip
    add("--tokens", type=_wholes, metavar="N[,N]",
        help="prompt lengths of prefill (default 16 to 2048)")  # fmt: skip
    add("--batch", type=_wholes, default=(1,), dest="batches", metavar="N[,N]",
        help="pictures a call (default 1)")  # fmt: skip
    add("--steps", type=whole(1), default=_STEPS, metavar="N", help=f"(default {_STEPS})")
    add("--prompt", nargs="+", action="extend", default=[], metavar="PROMPT", help="what to draw")
    add_prompt_file(group)
    add_pipeline_kwargs(group)
    add("--latent", action="store_true", help="leave the VAE out: output_type=latent")


def _add_how(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--compare", type=_contenders, default=_COMPARE, metavar="NAME[,NAME]",
        help=f"of {', '.join(CONTENDERS)}; +remove-syncs is enable(remove_syncs=True), the others"
        f" remove none (default {','.join(_COMPARE)})")  # fmt: skip
    add("--images", type=whole(1), metavar="N",
        help="pictures (calls for a step or a prefill) that each contender is timed on, of all "
        f"processes together (default {_IMAGES}, without a GPU {_FEW})")  # fmt: skip
    add("--set-up", choices=("fresh", "here"), default="fresh",
        help="take the set-up time in a fresh process a contender, or in this one, where kernels "
        "are warm already (default fresh)")  # fmt: skip
    add_where(group, "recorder")
    add("--set-up-of", choices=CONTENDERS, dest="alone", help=argparse.SUPPRESS)
    add("--set-up-scenario", dest="scenario", help=argparse.SUPPRESS)


def _add_results(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--output", type=Path, metavar="NAME", help="also write NAME.md, NAME.json and NAME.png")
    add("--chart", type=Path, metavar="FILE.png", help="also draw a chart")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _sizes(text: str) -> tuple[Size, ...]:
    return tuple(size(f"{part}x{part}" if part.isdecimal() else part) for part in _listed(text))


def _wholes(text: str) -> tuple[int, ...]:
    return tuple(whole(1)(part) for part in _listed(text))


def _contenders(text: str) -> tuple[str, ...]:
    names = tuple(_listed(text))
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown or not names:
        what = f"knows no {unknown[0]!r}" if unknown else "names nothing to measure"
        raise argparse.ArgumentTypeError(f"{what}; known: {', '.join(CONTENDERS)}")
    return names


def parse(argv: Sequence[str] | None) -> BenchOptions:
    """Read the options of a command line and check all that can be checked without the model.

    Raises:
        UsageError: an option has a value that cannot work, or two contradict each other.
    """
    given = parser().parse_args(argv)
    settle(given, "recorder")
    prompts = [*given.prompt, *(lines_of(given.prompt_file) if given.prompt_file else [])]
    named = given.model in SHAPES or given.model in LANGUAGE_MODELS
    if prompts and (named or given.what == "prefill"):
        raise UsageError("random weights and prefill take no prompt; leave --prompt out")
    _check_model(given.model, given.what)
    if given.tokens and given.what != "prefill":
        raise UsageError("--tokens is about prefill; add --what prefill or leave it out")
    of_pictures = (given.sizes, given.latent, given.pipeline_kwargs)
    if given.what == "prefill" and any(of_pictures):
        raise UsageError("--sizes, --latent, --pipeline-kwargs are about pictures, not prefill")
    if given.chart is not None:
        files.check_png("--chart", given.chart)
    if given.output is not None:
        _check_output(given.output)
    options = BenchOptions.of(
        given,
        prompts=tuple(prompts),
        tokens=given.tokens or _TOKENS,
        images=given.images or (_IMAGES if given.device == "cuda" else _FEW),
        output=given.output or Path(),
    )
    if given.what != "prefill" and not named:
        model.check(options)
    return options


def _check_model(name: str | None, what: str) -> None:
    """Check that a name can be meant, and is for what is to be timed."""
    if name in SHAPES and what == "prefill":
        raise UsageError(f"--model {name}: draws pictures; leave --what prefill out")
    if name in LANGUAGE_MODELS and what != "prefill":
        raise UsageError(f"--model {name}: is an LLM; add --what prefill")
    known = LANGUAGE_MODELS if what == "prefill" else SHAPES
    if name is not None and "/" not in name and name not in known and not Path(name).exists():
        raise UsageError(
            f"--model {name}: no such folder; give one, a hub id OWNER/NAME, or one of "
            f"{', '.join(known)}"
        )


def _check_output(path: Path) -> None:
    """Check that results can go there, and say so where a chart cannot be drawn."""
    files.check_writable("--output", path, path.parent)
    try:
        empty_figure()
    except ConfigError as error:
        print(f"bench: {path}.png will not be drawn: {one_line(error)}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Returns:
        0, 2 after an error that was told in one line, 130 when interrupted.
    """
    return ranks.exit_code("bench", lambda processes: _run(argv, processes))


def _run(argv: Sequence[str] | None, processes: ranks.Processes) -> None:
    run(processes.together(lambda: parse(argv)), argv, processes)
