"""Prefill on gpu."""

from tests.prefill import *  # noqa: F403
