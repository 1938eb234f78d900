"""The segment map of one pipeline from the command line: `python -m dit_graph.explain MODEL`.

Owns its options and the order of things: check all that can be checked, load, record, explain.
"""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch

import dit_graph
from dit_graph.cli import model
from dit_graph.cli.errors import UsageError, exit_code, one_line, told
from dit_graph.cli.options import Options, device_or, plain
from dit_graph.cli.parser import Parser, add_where, json_object, size, whole
from dit_graph.config import Backend
from dit_graph.explain import Explanation, host_syncs
from dit_graph.explain.plot import empty_figure

_STEPS = 4
_FEWEST = 3  # the first is cold, the second is recorded, the third is the first replay


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(Options):
    """What was asked for. Nothing is drawn, so an argument without an option is free."""

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Returns:
        0, 2 after an error that was told in one line, 130 when interrupted.
    """
    return exit_code("explain", lambda: _run(parse(argv)))


def parser() -> Parser:
    built = Parser(
        prog="python -m dit_graph.explain",
        description="Run a few denoising steps of a diffusers pipeline and say what was recorded: "
        "segments, breaks and their source lines, guards, what is read from outside.",
        epilog="example:\n  python -m dit_graph.explain embedded --breaks '*.attn' --plot tape.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = built.add_argument
    add("model", metavar="MODEL",
        help="a diffusers pipeline's folder, its hub id OWNER/NAME, or `embedded`")  # fmt: skip
    add("--size", type=size, action="append", metavar="WxH", help="pixels; may be repeated")
    add("--prompt", metavar="TEXT", help="what to draw (default a fox, where there is a prompt)")
    add("--steps", type=whole(_FEWEST), default=_STEPS, metavar="N",
        help=f"denoising steps, at least {_FEWEST} (default {_STEPS})")  # fmt: skip
    add_where(built, "recorder")
    add("--backend", choices=get_args(Backend), default="breakable",
        help="how the transformer is recorded (default breakable)")  # fmt: skip
    add("--breaks", action="append", default=[], metavar="PATTERN",
        help="submodules or torch functions that stay eager; may be repeated")  # fmt: skip
    add("--pipeline-kwargs", type=json_object, default={}, metavar="JSON",
        help="an object with more arguments of the pipeline's call")  # fmt: skip
    add("--report", choices=("text", "json"), default="text",
        help="text, or one JSON object on the last line of stdout (default text)")  # fmt: skip
    add("--plot", type=Path, metavar="FILE.png", help="a picture with one row a recording")
    add("--time", action="store_true", help="take the time of each step that can be run again")
    add("--syncs", action="store_true",
        help="draw once more and find the lines at which the host waits; needs cuda")  # fmt: skip
    add("--remove-syncs", action="store_true", help="with those removed that dit_graph can remove")
    return built


def parse(argv: Sequence[str] | None) -> ExplainOptions:
    """The options of a command line.

    Raises:
        UsageError: an option has a value that cannot work, or two contradict each other.
    """
    given = parser().parse_args(argv)
    device = device_or(given.device, "recorder")
    for option, asked in (("--plot", given.plot is not None), ("--time", given.time)):
        if asked and (device == "cpu" or given.backend == "eager"):
            nothing = "--device cpu" if device == "cpu" else "--backend eager"
            raise UsageError(f"{option} shows recordings, and {nothing} makes none; give one")
    if given.syncs and device != "cuda":
        raise UsageError(f"--syncs needs a CUDA device, and --device is {device}")
    if given.plot is not None:
        _check_plot(given.plot)
    return ExplainOptions(
        prompts=() if given.prompt is None else (plain(given.prompt, "--prompt") or "",),
        sizes=tuple(given.size or [{}]),
        steps=given.steps,
        model=None if given.model == "embedded" else given.model,
        dtype=given.dtype or (torch.bfloat16 if device == "cuda" else torch.float32),
        device=device,
        backend=given.backend,
        report=given.report,
        pipeline_kwargs=given.pipeline_kwargs,
        breaks=tuple(given.breaks),
        plot=given.plot,
        time=given.time,
        syncs=given.syncs,
        remove_syncs=given.remove_syncs,
        device_given=given.device is not None,
    )


def _check_plot(path: Path) -> None:
    """Whether a picture can be made at all, and go there."""
    if path.suffix.lower() != ".png" or path.is_dir():
        raise UsageError(f"--plot {path}: is no .png file; give a name that ends in .png")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--plot {path}: nothing can be written in {path.parent}")
    try:
        empty_figure()
    except dit_graph.ConfigError as error:
        raise UsageError(f"--plot: {one_line(error)}") from error


def _run(options: ExplainOptions) -> None:
    model.check(options)
    if options.device == "recorder" and not options.device_given:
        print("explain: torch sees no CUDA device, so --device recorder", file=sys.stderr)
    pipe = model.load(options)
    device: Any = "recorder" if options.device == "recorder" else "auto"
    try:
        handle = dit_graph.enable(
            pipe,
            device=device,
            backend=options.backend,
            breaks=options.breaks,
            remove_syncs=options.remove_syncs,
        )
    except dit_graph.DitGraphError as error:
        raise UsageError(one_line(error)) from error
    with handle:
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
    """The arguments of a call beside its size; nothing is decoded."""
    taken = inspect.signature(cls.__call__).parameters
    call = model.arguments(cls, options)
    if "output_type" in taken:
        call["output_type"] = "latent"
    if "prompt" in taken:
        call["prompt"] = options.prompts[0] if options.prompts else "a fox"
    if "generator" in taken:
        call["generator"] = torch.Generator().manual_seed(options.seed)
    return call


def _show(explanation: Explanation, options: ExplainOptions) -> None:
    """The report first, so that it is there whatever becomes of the picture."""
    in_json = options.report == "json"
    print(json.dumps(explanation.to_dict()) if in_json else explanation)
    if options.plot is None:
        return
    try:
        explanation.plot(options.plot)
    except dit_graph.ConfigError as error:
        raise UsageError(f"--plot: {one_line(error)}") from error
    except OSError as error:
        raise UsageError(f"cannot write {options.plot}: {error.strerror or error}") from error
    print(options.plot, file=sys.stderr if in_json else sys.stdout)
