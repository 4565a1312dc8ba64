"""The errors that ptcollect raises, under one root."""

from __future__ import annotations


class PtcollectError(Exception):
    """Root of every error that ptcollect raises by name.

    >>> import ptcollect as pc
    >>> try:
    ...     pc.chain(pc.bucketize(), pc.scale(2.0))
    ... except pc.PtcollectError as error:
    ...     print(type(error).__name__)
    PipelineError
    """


class PipelineError(PtcollectError):
    """A pipeline that cannot work as composed, or a stage that broke the rules of its extension point.

    >>> import ptcollect as pc
    >>> pc.compress("bf16")(pc.scale(2.0))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ptcollect.errors.PipelineError: compress("bf16") has no reducer to wrap...
    """


class TreeMismatchError(PtcollectError):
    """The ranks brought different trees, pipelines, steps or options to one call; nothing was delivered.

    >>> import torch, ptcollect as pc
    >>> pc.simulate(pc.ring_reduce(), [{"w": torch.zeros(5)}, {"w": torch.zeros(3)}])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ptcollect.errors.TreeMismatchError: leaf 'w': rank 0 has (5,) float32, rank 1 has (3,) float32...
    """


class PeerLostError(PtcollectError):
    """A peer died, raised, or stayed silent past the timeout, so this call cannot finish on any rank.

    >>> import ptcollect as pc
    >>> issubclass(pc.PeerLostError, pc.PtcollectError)
    True
    """

    gone = False
    """Whether the peer left no word of a failure: no later call with it can be expected to work."""


class NonFiniteError(PtcollectError):
    """A value that must be finite is not.

    >>> import ptcollect as pc
    >>> issubclass(pc.NonFiniteError, pc.PtcollectError)
    True
    """
