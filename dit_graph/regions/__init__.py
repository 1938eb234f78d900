"""The blocks of a module, each recorded for itself where the whole forward cannot be."""
