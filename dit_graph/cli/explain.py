"""Explain one pipeline from the command line: `python -m dit_graph.explain MODEL`.

It owns the options, and the order of things: check all that can be checked, load, record, explain.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

import dit_graph
from dit_graph.cli import files, model
from dit_graph.cli.errors import UsageError, exit_code, one_line, told, writing
from dit_graph.cli.graphed import graphed
from dit_graph.cli.options import Options, plain, settle
from dit_graph.cli.parser import (
    Parser,
    add_backend,
    add_pipeline_kwargs,
    add_report,
    add_where,
    size,
    whole,
)
from dit_graph.explain import Explanation, host_syncs

_STEPS = 4
_FEWEST = 3  # The first is cold, the second is recorded, the third is the first replay.
_EXAMPLES = "example:\n  python -m dit_graph.explain embedded --breaks '*.attn' --plot tape.png"


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(Options):
    """`parse` makes these. Nothing is drawn, so `--pipeline-kwargs` may set more than elsewhere."""

    spelling: ClassVar[Mapping[str, str]] = {
        "model": "MODEL",
        "prompt": "--prompt",
        "height": "--size",
        "width": "--size",
        "num_inference_steps": "--steps",
    }
    draws: ClassVar[bool] = False

    breaks: tuple[str, ...]
    plot: Path | None
    time: bool
    syncs: bool
    remove_syncs: bool
    device_given: bool


def parser() -> Parser:
    """Make the parser; what it refuses is a UsageError."""
    built = Parser(
        "explain",
        "Run a few denoising steps of a diffusers pipeline and say what was recorded: "
        "segments, breaks and their source lines, guards, what is read from outside.",
        _EXAMPLES,
    )
    add = built.add_argument
    add("model", metavar="MODEL",
        help="a diffusers pipeline's folder, its hub id OWNER/NAME, or `embedded`")  # fmt: skip
    add("--size", type=size, action="append", dest="sizes", metavar="WxH",
        help="pixels; may be repeated")  # fmt: skip
    add("--prompt", metavar="TEXT", help="what to draw (default a fox, where there is a prompt)")
    add("--steps", type=whole(_FEWEST), default=_STEPS, metavar="N",
        help=f"denoising steps, at least {_FEWEST} (default {_STEPS})")  # fmt: skip
    add_where(built, "recorder")
    add_backend(built, "transformer")
    add("--breaks", action="append", default=[], metavar="PATTERN",
        help="submodules or torch functions that stay eager; may be repeated")  # fmt: skip
    add_pipeline_kwargs(built)
    add_report(built, "text, or one JSON object on the last line of stdout")
    add("--plot", type=Path, metavar="FILE.png", help="a picture with one row a recording")
    add("--time", action="store_true", help="take the time of each step that can be run again")
    add("--syncs", action="store_true",
        help="draw once more and find the lines at which the host waits; needs cuda")  # fmt: skip
    add("--remove-syncs", action="store_true", help="with those removed that dit_graph can remove")
    return built


def parse(argv: Sequence[str] | None) -> ExplainOptions:
    """Read the options of a command line and check all that can be checked without the model.

    Raises:
        UsageError: an option has a value that cannot work, or two contradict each other.
    """
    given = parser().parse_args(argv)
    device_given = given.device is not None
    settle(given, "recorder")
    for option, asked in (("--plot", given.plot is not None), ("--time", given.time)):
        if asked and (given.device == "cpu" or given.backend == "eager"):
            nothing = "--device cpu" if given.device == "cpu" else "--backend eager"
            raise UsageError(f"{option} shows recordings, and {nothing} makes none; give one")
    if given.syncs and given.device != "cuda":
        raise UsageError(f"--syncs needs a CUDA device, and --device is {given.device}")
    if given.plot is not None:
        files.check_png("--plot", given.plot)
    options = ExplainOptions.of(
        given,
        prompts=() if given.prompt is None else (plain(given.prompt, "--prompt") or "",),
        sizes=tuple(given.sizes or [{}]),
        model=None if given.model == "embedded" else given.model,
        device_given=device_given,
    )
    model.check(options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Returns:
        0, 2 after an error that was told in one line, 130 when interrupted.
    """
    return exit_code("explain", lambda: _run(parse(argv)))


def _run(options: ExplainOptions) -> None:
    if options.device == "recorder" and not options.device_given:
        print("explain: torch sees no CUDA device, so --device recorder", file=sys.stderr)
    pipe = model.load(options)
    more: dict[str, Any] = {"breaks": options.breaks, "remove_syncs": options.remove_syncs}
    with graphed(pipe, options, **more) as handle:
        assert handle is not None
        for wanted in options.sizes:
            with told("running the pipeline"):
                pipe(**_call(type(pipe), options), **wanted)
        explanation = handle.explain(time=options.time)
        if options.syncs:
            with host_syncs() as found, told("running the pipeline"):
                pipe(**_call(type(pipe), options), **options.sizes[0])
            explanation = replace(explanation, syncs=tuple(found))
    _show(explanation, options)


def _call(cls: type, options: ExplainOptions) -> dict[str, Any]:
    """Make the arguments of a call beside its size; nothing is decoded, as nobody will see it."""
    more = {
        "output_type": "latent",
        "prompt": options.prompts[0] if options.prompts else "a fox",
        "generator": torch.Generator().manual_seed(options.seed),
    }
    taken = model.taken_by(cls)
    given = {name: value for name, value in more.items() if name in taken}
    return model.arguments(cls, options) | given


def _show(explanation: Explanation, options: ExplainOptions) -> None:
    """Print the text first, so that it is there whatever becomes of the picture."""
    in_json = options.report == "json"
    print(json.dumps(explanation.to_dict()) if in_json else explanation)
    if options.plot is None:
        return
    try:
        with writing(options.plot):
            explanation.plot(options.plot)
    except dit_graph.ConfigError as error:
        raise UsageError(f"--plot: {one_line(error)}") from error
    print(options.plot, file=sys.stderr if in_json else sys.stdout)
