"""The contract suite on the CPU recorder."""

from tests.contract import *  # noqa: F403
