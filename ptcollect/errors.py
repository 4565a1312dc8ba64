"""The errors that ptcollect raises, under one root."""

from __future__ import annotations


class PtcollectError(Exception):
    """Root of every error that ptcollect raises by name."""


class PipelineError(PtcollectError):
    """A pipeline that cannot work as composed, or a stage that broke the rules of its extension point."""


class TreeMismatchError(PtcollectError):
    """The ranks brought different trees, pipelines, steps or options to one call; nothing was delivered."""


class PeerLostError(PtcollectError):
    """A peer died, raised, or stayed silent past the timeout, so this call cannot finish on any rank."""


class NonFiniteError(PtcollectError):
    """A value that must be finite is not."""
