"""The embedded trainer backend: a plain torch module, or named tensors, on any number of ranks."""
