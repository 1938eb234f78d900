"""Graph memory and its budget: who shares it, and who leaves when it is short."""
