"""What a model gains on this machine, what that costs, and from which picture on it pays.

`python -m dit_graph.bench`: shapes and tasks say what runs, variants how, `measure` takes times,
`table` and `chart` show them. `enable` imports nothing of this.
"""
