"""Enables what a command runs, for as long as it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dit_graph
from dit_graph.cli.errors import UsageError, one_line
from dit_graph.cli.options import Asked


@contextmanager
def graphed(
    target: Any, options: Asked, instead: str = "", **more: Any
) -> Iterator[dit_graph.Handle | None]:
    """Give the handle of a pipeline or model, or None under --no-graph.

    On `cpu` it runs without graphs; the report gives the reason.

    Args:
        instead: what the error says may be done instead.
        more: options of `dit_graph.enable` that are this command's own.

    Raises:
        UsageError: it cannot be enabled.
    """
    if not options.graph:
        yield None
        return
    try:
        handle = dit_graph.enable(target, backend=options.backend, **options.enable, **more)
    except dit_graph.DitGraphError as error:
        raise UsageError(one_line(error) + instead) from error
    with handle:
        yield handle
