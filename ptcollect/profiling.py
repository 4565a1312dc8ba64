"""Names for `torch.profiler`: what a pipeline does shows up as ``ptcollect: ...``.

Spans cover what runs without a pause, and each wait for the network: coroutines take turns, and spans must nest.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_nothing = nullcontext()


def span(what: str) -> AbstractContextManager[object]:
    """Name the block `what` in a profile, if one is being taken on this thread."""
    if not torch._C._autograd._profiler_enabled():
        return _nothing
    return torch.profiler.record_function(f"ptcollect: {what}")
