"""Checks of a launch before training, one subject a file; `python -m ptcollect doctor` runs them."""
