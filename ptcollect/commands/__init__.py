"""What `python -m ptcollect` offers, one file a command."""
