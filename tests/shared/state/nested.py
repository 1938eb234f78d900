"""A Python module that holds another one, as packages hold theirs."""

from tests.shared.state import settings

deeper = settings
