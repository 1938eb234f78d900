"""Runs the steps of a recording one by one and takes their times, where that changes nothing."""

import time
from statistics import median

import torch

from dit_graph.devices.base import Timer
from dit_graph.errors import BreakResultChanged, GuardMismatch
from dit_graph.memory.pool import Pool
from dit_graph.tape.tape import Break, Tape, WholeCall

_ROUNDS = 3


def time_steps(tape: Tape, pool: Pool) -> tuple[list[float], str]:
    """Take the milliseconds of each step, or none and say why.

    They are medians of some rounds, after one that warms up. The staged arguments keep the last
    call's values and `tape.guards` are not checked, so what is computed is of no use and goes
    nowhere.
    """
    if why := "a call is running" if pool.busy else effect_of(tape):
        return [], why
    rounds = [[pool.device.timer() for _ in tape.steps] for _ in range(_ROUNDS)]
    generators = pool.device.generators()
    put_back = torch.random.fork_rng([g.device for g in generators if g.device.type != "cpu"])
    # Inference mode may write into memory that was made in it, and into any other.
    with pool.using(), torch.inference_mode(), put_back:
        states = [generator.get_state() for generator in generators]
        try:
            for step in tape.steps:
                step()
            # An operation that may draw, such as attention with its dropout, need not do so.
            if any(not torch.equal(g.get_state(), s) for g, s in zip(generators, states)):
                return [], "it draws random numbers"
            for timers in rounds:
                for step, timer in zip(tape.steps, timers):
                    timer.start()
                    step()
                    timer.stop()
        except (GuardMismatch, BreakResultChanged) as error:
            return [], f"recorded for other values than the last call's: {error.place}"
        except Exception as error:  # It may need the autocast of its calls, for example.
            return [], f"a step fails outside of a call: {error!r}"
    return [median(_waited_for(timer) for timer in of_step) for of_step in zip(*rounds)], ""


def _waited_for(timer: Timer) -> float:
    while (ms := timer.ms()) is None:
        time.sleep(0.0005)
    return ms


def effect_of(tape: Tape) -> str:
    """Say what a run of these steps outside of any call would change for good; empty if nothing."""
    if any(isinstance(step, WholeCall) for step in tape.steps):
        return "the whole forward is Python code, which may have side effects"
    if tape.written_inputs:
        return "it writes into its arguments"
    if tape.written_outside:
        return "it writes tensors from outside the call"
    for step in tape.breaks():
        if step.marked:
            return f"a marked break may have side effects: {step.reason}"
        if _in_place(step):
            return f"an eager function writes in place: {step.reason}"
    return ""


def _in_place(step: Break) -> bool:
    """Go by the name of a torch function that a pattern keeps eager: it has no schema to ask."""
    return not hasattr(step.fn, "_schema") and getattr(step.fn, "__name__", "").endswith("_")
