"""Draw pictures from the command line: `python -m dit_graph.generate fox`.

It owns the options, and the order of things: check all that can be checked, load, record, draw,
report. Under a launcher each process draws a part, and the main one reports for all.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dit_graph.cli import files, model, ranks
from dit_graph.cli.errors import UsageError
from dit_graph.cli.graphed import graphed
from dit_graph.cli.options import Options, plain, prompts, settle
from dit_graph.cli.parser import (
    Parser,
    Size,
    add_graph,
    add_pipeline_kwargs,
    add_prompts,
    add_report,
    add_where,
    finite,
    size,
    whole,
)
from dit_graph.cli.pictures import Call, Run, Share, say
from dit_graph.cli.ranks import Processes
from dit_graph.explain.report import summed

_EXAMPLES = """\
examples:
  python -m dit_graph.generate fox
  python -m dit_graph.generate fox "birthday cake" --size 64x64 --size 96x64 --seed 7
  python -m dit_graph.generate --model OWNER/NAME --prompt "a fox in the snow" --steps 28 \\
      --size 1024x1024 --warmup-sizes 1024x1024 --output fox.png
"""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
    """`parse` makes these of a command line; what is wrong with one is known by then."""

    output: Path

    @property
    def total(self) -> int:
        """Count the pictures that this draws."""
        return len(self.prompts) * len(self.sizes) * self.count

    @property
    def single_file(self) -> bool:
        """Say whether `output` names the picture itself and not a folder."""
        return self.output.suffix.lower() == ".png" and not self.output.is_dir()


def parser() -> Parser:
    """Make the parser; what it refuses is a UsageError."""
    built = Parser(
        "generate",
        "Draw pictures with a diffusers pipeline whose transformer is replayed from "
        "CUDA graphs. Without --model the small embedded model draws; it needs no download.",
        _EXAMPLES,
    )
    _add_what(built.add_argument_group("what to draw"))
    how = built.add_argument_group("with what")
    how.add_argument("--model", metavar="PATH_OR_ID",
        help="a diffusers pipeline's folder or hub id OWNER/NAME")  # fmt: skip
    how.add_argument("--lora", action="append", default=[], dest="loras", metavar="PATH",
        help="LoRA; may be repeated")  # fmt: skip
    how.add_argument("--cache", type=model.step_cache, metavar="first-block[:THRESHOLD]",
        help="diffusers' step cache: skip blocks where the first changes little "
        "(default threshold 0.05)")  # fmt: skip
    add_where(how, "cpu")
    graphs = built.add_argument_group("graphs")
    add_graph(graphs, "transformer")
    graphs.add_argument("--warmup-sizes", type=_sizes, default=(), metavar="WxH[,WxH]",
        help="record these sizes before drawing")  # fmt: skip
    results = built.add_argument_group("results")
    results.add_argument("--output", type=Path, default=Path("out"), metavar="PATH",
        help="a folder, or a .png file for one picture (default out)")  # fmt: skip
    add_report(results, "what was recorded, as text or as one JSON line on stdout")
    return built


def _add_what(group: argparse._ArgumentGroup) -> None:
    add_prompts(group, "what to draw, one picture each")
    add = group.add_argument
    add("--negative-prompt", metavar="TEXT", help="what to steer away from")
    add("--size", type=size, action="append", metavar="WxH", help="pixels; may be repeated")
    add("--height", type=whole(1), metavar="H", help="pixels, instead of --size")
    add("--width", type=whole(1), metavar="W", help="pixels, instead of --size")
    add("--steps", "--num-inference-steps", type=whole(1), metavar="N", help="denoising steps")
    add("--guidance-scale", type=finite, metavar="X", help="above 1 usually with guidance")
    add("--seed", type=whole(0), default=0, metavar="N",
        help="of the first picture; every following one has the next (default 0)")  # fmt: skip
    add("--num-images-per-prompt", type=whole(1), default=1, dest="count", metavar="N",
        help="pictures of each prompt and size, drawn together (default 1)")  # fmt: skip
    add_pipeline_kwargs(group)


def _sizes(text: str) -> tuple[Size, ...]:
    return tuple(size(part.strip()) for part in text.split(","))


def parse(argv: Sequence[str] | None) -> GenerateOptions:
    """Read the options of a command line and check all that can be checked without the model.

    Raises:
        UsageError: an option has a value that cannot work, or two contradict each other.
    """
    given = parser().parse_intermixed_args(argv)
    if given.warmup_sizes and not given.graph:
        raise UsageError("--warmup-sizes records graphs, which --no-graph forbids; give one")
    settle(given, "cpu")
    options = GenerateOptions.of(
        given,
        prompts=prompts(given, "say what to draw", "generate fox"),
        negative_prompt=plain(given.negative_prompt, "--negative-prompt"),
        sizes=_chosen_sizes(given),
        output=given.output.expanduser(),
    )
    files.check(options)
    model.check(options)
    return options


def _chosen_sizes(given: argparse.Namespace) -> tuple[Size, ...]:
    sides = {"height": given.height, "width": given.width}
    sides = {name: value for name, value in sides.items() if value is not None}
    if sides and given.size:
        raise UsageError(f"--size and --{next(iter(sides))} contradict each other; give one")
    return tuple(given.size or [sides])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Returns:
        0, 2 after an error that was told in one line, 130 when interrupted.
    """
    return ranks.exit_code("generate", lambda processes: _run(argv, processes))


def _run(argv: Sequence[str] | None, processes: Processes) -> None:
    options = processes.together(lambda: parse(argv))
    pairs = itertools.product(options.prompts, options.sizes)
    calls = [Call(*pair, number * options.count) for number, pair in enumerate(pairs)]
    numbers = None
    if processes.count > 1:  # Two processes would find the same ones free.
        numbers = processes.gather(files.free_numbers(options.output, options.total))[0]
    share = Share()
    mine = processes.mine(calls)
    share.failed = processes.failure(lambda: _draw(mine, share, numbers, options, processes))
    shares = processes.gather(share)
    failed = processes.summary([share.failed for share in shares])
    if processes.is_main:
        if not failed:
            _save_sheet(shares, options)
        _report(shares, calls, options, processes)
    if failed:
        raise UsageError(failed)


def _draw(
    calls: Sequence[Call], share: Share, numbers: Sequence[int] | None, options: GenerateOptions,
    processes: Processes,
) -> None:  # fmt: skip
    """Draw all pictures of `calls`; each is in `share` as soon as it is saved."""
    if not calls:  # There are more processes than calls.
        return
    pipe = model.load(options, processes.device)
    with graphed(pipe, options, "; --no-graph draws without graphs") as handle:
        run = Run(pipe, options, share, numbers)
        try:
            if handle is not None and options.warmup_sizes:
                run.warm_up(handle)
            run.draw(calls, processes.is_main)
        finally:
            if handle is not None:
                share.stats, share.report = handle.stats(), handle.report()


def _save_sheet(shares: Sequence[Share], options: GenerateOptions) -> None:
    """Show all processes' pictures on one sheet, in the order in which one would draw them."""
    saved = {number: path for share in shares for number, path in share.saved.items()}
    here = [saved[number] for number in sorted(saved) if saved[number].exists()]
    if len(here) < len(saved):
        say(f"{len(saved) - len(here)} pictures are on other machines", options)
    if len(here) > 1:
        say(str(files.save_sheet(here, options.output)), options)


def _report(
    shares: Sequence[Share], calls: Sequence[Call], options: GenerateOptions, processes: Processes
) -> None:
    """Tell what was recorded, of one process as its handle says it, of several with the sums."""
    stats = summed(share.stats for share in shares)
    lost = _not_drawn(shares, calls, options)
    if options.report == "json":
        print(json.dumps(stats | ({"not_drawn": lost} if lost else {})))
        return
    if processes.count == 1:
        print(shares[0].report, end="\n" if shares[0].report else "")
        return
    for name, share in zip(processes.names, shares):
        lines = share.report.splitlines() + [f"failed: {share.failed}"] * bool(share.failed)
        print("\n  ".join([f"{name}: {len(share.saved)} pictures", *lines]))
    eager = stats.pop("eager")
    stats.pop("regions", None)
    print("all processes:", ", ".join(f"{name} {count}" for name, count in stats.items()))
    for reason, count in eager.items():
        print(f"  eager {count}: {reason}")
    for call in lost:
        print(f"  not drawn: {call}")


def _not_drawn(
    shares: Sequence[Share], calls: Sequence[Call], options: GenerateOptions
) -> list[str]:
    saved = {number for share in shares for number in share.saved}
    return [
        f"{call.prompt!r} {model.spelt(call.size) + ' ' if call.size else ''}"
        f"seed {options.seed + number}"
        for call in calls
        for number in range(call.first, call.first + options.count)
        if number not in saved
    ]
