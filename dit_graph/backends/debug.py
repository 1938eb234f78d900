"""The whole call is one break, with the same buffers and replay path, but no graph."""

from collections.abc import Callable
from typing import Any

from dit_graph.backends.base import Backend
from dit_graph.capture.capture import Capture
from dit_graph.tape.tape import WholeCall


class Debug(Backend):
    name = "debug"

    def record(self, capture: Capture, forward: Callable[[], Any]) -> Any:
        def run() -> Any:
            capture.effects.expect_writes()
            return forward()

        capture.tape.steps.append(WholeCall(run, capture.finish))
        return run()
