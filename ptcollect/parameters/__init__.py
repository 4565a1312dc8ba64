"""Averaging of parameters instead of gradients, now and then instead of at every step; one file each."""
