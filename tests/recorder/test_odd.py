"""Odd objects, on the CPU recorder."""

from tests.odd import *  # noqa: F403
