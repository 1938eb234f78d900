"""The whole forward is one graph, or the call is eager and names what one graph cannot hold."""

from dit_graph.backends.breakable import Breakable


class Full(Breakable):
    name = "full"
    breakable = False
