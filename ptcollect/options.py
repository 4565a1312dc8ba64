"""The options of a call, the same wherever a pipeline runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypedDict


class RunOptions(TypedDict, total=False):
    """Options of ``pipeline(tree, **options)``, `update`, `start` and adapters; the same on all ranks but `weight`.

    >>> import torch, ptcollect as pc
    >>> pc.scale(2.0)(torch.ones(1), donate=True)
    tensor([2.])
    """

    group: dist.ProcessGroup | DeviceMesh | None
    """Whom to synchronise with: a process group, a DeviceMesh (reducers choose its dim by ``axis=``); None: all."""
    weight: float | None
    """This rank's tree is a mean over that many samples; the result is the mean over all. None: equal weights."""
    missing: Literal["error", "zeros"]
    """A ``None`` leaf where other ranks have a tensor: an error (default), or zeros. None on all ranks stays None."""
    check: Literal["every_step", "first", "off"]
    """When ranks compare trees, pipelines, steps and options before traffic: at every call (default), at a pipeline's
    first call on the group, or never. Without it a mismatch can abort the process."""
    donate: bool
    """The tree may be overwritten and returned, which saves memory and a copy. Default False: it is left unchanged."""


@dataclass(frozen=True)
class Options:
    """Checked options."""

    group: dist.ProcessGroup | DeviceMesh | None = None
    weight: float | None = None
    missing: str = "error"
    check: str = "every_step"
    donate: bool = False

    @staticmethod
    def read(options: Mapping[str, Any]) -> Options:
        """`options` with the defaults filled in.

        Raises:
            TypeError: an option does not exist or has the wrong type.
            ValueError: an option has a value that it cannot have.
        """
        known = Options.__dataclass_fields__
        for name in options:
            if name not in known:
                raise TypeError(f"unknown option {name!r}; a call takes {', '.join(known)}")
        read = Options(**options)
        if read.missing not in ("error", "zeros"):
            raise ValueError(f'missing: expected "error" or "zeros", got {read.missing!r}')
        if read.check not in ("every_step", "first", "off"):
            raise ValueError(f'check: expected "every_step", "first" or "off", got {read.check!r}')
        if not isinstance(read.donate, bool):
            raise TypeError(f"donate: expected True or False, got {read.donate!r}")
        _check_group(read.group)
        return read


def _check_group(group: Any) -> None:
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to ranks outside
        raise ValueError("group: this rank is not in the group it was given; call the pipeline on the members only")
    if group is not None and not isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")


def check_weight(weight: Any) -> None:
    """Raise for a weight that is no number of samples; within the call, since it may be so on one rank only.

    Raises:
        ValueError: `weight` is negative, not finite or no number.
    """
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if weight is not None and not (number and math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight: expected a number of samples, finite and not negative, got {weight!r}")
