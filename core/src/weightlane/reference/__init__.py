"""The reference rollout engine: transformers, plainly, in a process of its own.

It exists to be right rather than fast: the demo and the tests compare other engines and every transport
with it.
"""
