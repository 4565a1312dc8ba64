"""Adapters: pipelines in the training loops that people have, one a file."""
