"""Reducers: pipelines that combine the ranks' trees, one algorithm a file."""
