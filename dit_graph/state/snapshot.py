"""What a module's containers held before a call, to put back what a forward has written."""

from dit_graph.state.places import read_container
from dit_graph.state.view import View
from dit_graph.tape.guards import DeviceNumber


class Snapshot:
    """What every container of a view holds now. The view must be up to date."""

    def __init__(self, view: View) -> None:
        self._places = [place.noted() for place in view.places()]
        self._classes = [(value, type(value)) for value in view.objects()]

    def restore(self) -> None:
        """Put every container back as it was."""
        for place in self._places:
            if not place.stayed():
                place.restore()
        for value, cls in self._classes:
            if type(value) is not cls:
                value.__class__ = cls

    def settle(self) -> None:
        """Make stand-ins that were left in the state the numbers that they stand for."""
        for container in (place.container for place in self._places):
            held = read_container(container)
            pairs = held.items() if hasattr(held, "items") else enumerate(held)
            for key, value in [pair for pair in pairs if type(pair[1]) is DeviceNumber]:
                container[key] = value.value
