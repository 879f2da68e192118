"""A weightlane plugin for the made-up engine acme."""
