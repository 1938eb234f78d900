"""A Python module of the user's, which a forward reads."""

SCALE = 1.0
TABLE = {"scale": 1.0}
