"""Transports: how a trainer rank puts the plan's buckets where an engine worker reads them."""
