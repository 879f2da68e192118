"""weightlane's rollout backend for SGLang: a server that is reached by its own HTTP requests alone."""
