"""Complete text from the command line: `python -m dit_graph.prefill "The capital of France is"`.

Owns the order of things: check all that can be checked, load, answer, report.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import dit_graph
from dit_graph.cli import lm, tokens
from dit_graph.cli.errors import UsageError, exit_code, one_line, told
from dit_graph.cli.prefill import PrefillOptions, parse
from dit_graph.tally import totals


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Returns:
        0, 2 after an error that was told in one line, 130 when interrupted.
    """
    return exit_code("prefill", lambda: _run(parse(argv)))


def _run(options: PrefillOptions) -> None:
    most = lm.check(options)
    prompts = tokens.read(options, lm.tokenizer(options), most)
    model = lm.load(options)
    texts = []
    with _graphed(model, options) as handle:
        for number, text in enumerate(_answers(model, prompts, options), 1):
            texts.append(text)
            if options.report == "text":
                index = f"{number}: " if len(prompts.inputs) > 1 else ""
                print(index + _in_one_line(text), flush=True)
        if options.report == "json":
            stats = totals(()) if handle is None else handle.stats()
            print(json.dumps({"texts": texts, "stats": stats}))
        elif handle is not None:
            print(handle.report())


def _answers(model: Any, prompts: tokens.Prompts, options: PrefillOptions) -> Iterator[str]:
    """The text that follows each prompt, one call of the model's `generate` each."""
    for prompt, inputs in zip(options.prompts, prompts.inputs, strict=True):
        given = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        with told(f"completing {prompt!r}"):
            (row,) = model.generate(**given)
        yield prompts.text(row[inputs["input_ids"].shape[1] :])


def _in_one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


@contextmanager
def _graphed(model: Any, options: PrefillOptions) -> Iterator[dit_graph.Handle | None]:
    """The model's handle, or None under --no-graph; on `cpu` it is eager and says so."""
    if not options.graph:
        yield None
        return
    try:
        handle = dit_graph.enable(
            model,
            mode="prefill",
            device="recorder" if options.device == "recorder" else "auto",
            backend=options.backend,
            buckets=options.buckets,
            max_tokens=options.max_tokens,
        )
    except dit_graph.DitGraphError as error:
        raise UsageError(f"{one_line(error)}; --no-graph completes without graphs") from error
    with handle:
        yield handle


if __name__ == "__main__":
    sys.exit(main())
