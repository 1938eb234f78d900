"""`verify`: the same call in eager, and what becomes of a recording whose bits differ."""

from typing import Any, Literal

from dit_graph.devices.base import is_out_of_memory
from dit_graph.runner.entry import Entry
from dit_graph.runner.fallback import Fallback
from dit_graph.runner.proof import difference
from dit_graph.runner.tally import listening
from dit_graph.runner.target import Target
from dit_graph.tape.tape import Tape


def compared(
    target: Target,
    fallback: Fallback,
    what: Literal["recording", "replay"],
    entry: Entry,
    tape: Tape,
    result: Any,
    seeds: Any,
    call: tuple[Any, Any],
) -> Any:
    """Answer with eager's result, and keep the recording only if `result` has the same bits.

    Args:
        seeds: where the generators stood before the call, if it draws.
        call: the caller's `(args, kwargs)`.
    """
    args, kwargs = call
    if listening.to is not None:
        listening.to.compared += 1
    after = target.seeds() if tape.draws else []
    target.reseed(seeds if tape.draws else [])
    try:
        expected = target.original(*args, **kwargs)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # eager's memory and the recording's do not fit together
        entry.proof.left_out = "not compared: out of memory"
        target.reseed(after)
        return result
    try:
        differs = difference(result, expected)
    except Exception as error:
        differs = fallback.own_error(error)
    if differs:
        reason = f"verify: the {what} differs from eager: {differs}"
        entry.block(reason)
        if what == "replay":
            entry.counts.note("replays", -1)
        else:
            entry.counts.note("captures", -1)
        target.pool.sweep()
        fallback.say(entry.counts.eager, reason)
    else:
        entry.proof.compared += 1
        entry.proof.has_run_eagerly()
    return expected
