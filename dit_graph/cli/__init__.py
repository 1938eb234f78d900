"""The parts of `python -m dit_graph.generate`: its options, its model, its files."""
