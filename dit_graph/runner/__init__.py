"""Decides what happens to a call, and does it."""
