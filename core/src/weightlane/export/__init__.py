"""What a torch trainer exports: each checkpoint tensor as a pure function of tensors that it holds."""
