"""The suite on copies of what is enabled, on the CPU recorder."""

from tests.copies import *  # noqa: F403
