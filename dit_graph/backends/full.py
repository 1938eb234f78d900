"""The whole forward as one graph; what one graph cannot hold makes the call eager, by name."""

from dit_graph.backends.breakable import Breakable


class Full(Breakable):
    name = "full"
