"""The torch modes of whoever calls, under which a replay runs the breaks of a recording."""

import torch

from dit_graph.call.context import Context, context
from dit_graph.capture.frames import source_line
from dit_graph.errors import CaptureError


class CallersModes:
    """Remembers the modes that are on when it is made, our own watchers among them."""

    def __init__(self) -> None:
        self._context = context()
        self._function_modes = torch._C._len_torch_function_stack()
        self._dispatch_modes = torch._C._len_torch_dispatch_stack()

    def refuse_others(self, reason: str) -> None:
        """Raise CaptureError where the forward has set other modes around a break to be."""
        pairs = zip(Context._fields, context(), self._context)
        differ = [name for name, here, outside in pairs if here != outside]
        if not torch.is_grad_enabled():  # The caller may have gradients on; nothing here needs any.
            differ = [name for name in differ if name != "grad_mode"]
        what = [name.replace("_", " ") for name in differ]
        if torch._C._len_torch_function_stack() > self._function_modes:
            what.append("a torch function mode")
        if torch._C._len_torch_dispatch_stack() > self._dispatch_modes:
            what.append("a torch dispatch mode")
        if what:
            raise CaptureError(
                f"the forward sets {', '.join(what)} around {reason}, which a replay of this break"
                f" would not have, at {source_line()}"
            )
