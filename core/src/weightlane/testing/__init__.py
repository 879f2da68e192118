"""Tools with which backends, ours and third parties', are shown to work."""
