"""Measuring links, codecs and pipelines, one subject a file; for `python -m ptcollect bench` and `benchmarks/`."""
