"""Placement tracing: an engine's own loader, run on stand-ins without data, tells where each element lands.

`tracing.trace_load` gives a `table.PlacementTable`; `coverage`, `groups` and `read_back` draw from it what a
plan needs. Importing this package loads no torch.
"""
