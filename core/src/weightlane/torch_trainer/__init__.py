"""The embedded trainer backend: a plain torch module, or a mapping of named tensors, on any number of ranks."""
