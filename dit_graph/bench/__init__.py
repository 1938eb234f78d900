"""Measures what a model gains on this machine, what that costs, and from which picture on it pays.

`shapes` and `tasks` say what runs, `contenders` how, `measure` and `set_up` take times, `rows` and
`record` keep them, `table` and `chart` show them. `enable` imports nothing of this.
"""
