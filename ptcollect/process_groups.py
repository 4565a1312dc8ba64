"""The user's groups, and the private ones beside them; everything that touches less public names of torch is here.

The engine talks over a group of its own, made by the members of the user's group when it is first needed. It can be
dropped when something fails: the peers' transfers then fail at once instead of waiting for a timeout, the user's own
group stays whole, and the next call makes another. A gloo group is built directly on the store, because
`dist.new_group` wants all ranks of the world to come, or all members to have made the same groups before.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from ptcollect.errors import PeerLostError, PipelineError

_UNUSED_TAG = 2**31 - 1


@dataclass(frozen=True)
class Members:
    """One dimension of the user's group, from this rank's point of view."""

    axis: str | None
    group: dist.ProcessGroup
    rank: int
    global_ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.global_ranks)

    @property
    def timeout(self) -> timedelta:
        """The group's own timeout."""
        backend: Any = self.group._get_backend(
            torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        )
        timeout: timedelta = backend.options._timeout
        return timeout

    def named(self, rank: int) -> str:
        """Group rank `rank` as messages call it."""
        other = self.global_ranks[rank]
        return f"rank {rank}" if other == rank else f"rank {rank} (global rank {other})"


def members_of(group: dist.ProcessGroup | DeviceMesh | None) -> list[Members]:
    """The dimensions of `group`.

    Raises:
        PipelineError: torch.distributed is not initialised, or mesh dims have no names.
        ValueError: this rank is not in the mesh.
    """
    if isinstance(group, DeviceMesh):
        return _dims(group)
    if not dist.is_initialized():
        raise PipelineError(
            "no process group: torch.distributed is not initialised, so there is nobody to synchronise with; call "
            "torch.distributed.init_process_group(...) first (under torchrun: with no arguments), or run n ranks in "
            "this process with ptcollect.simulate(pipeline, trees)"
        )
    return [_members(None, group or dist.distributed_c10d._get_default_group())]


def _dims(mesh: DeviceMesh) -> list[Members]:
    if mesh.get_coordinate() is None:
        raise ValueError(f"group: this rank is not in {mesh}; call the pipeline on the members only")
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return [_members(names[0] if names else None, mesh.get_group())]
    if not names:
        raise PipelineError(
            f"group: {mesh} has {mesh.ndim} dims without names; give them mesh_dim_names, or pass a 1-D mesh"
        )
    return [_members(name, mesh.get_group(name)) for name in names]


def _members(axis: str | None, group: dist.ProcessGroup) -> Members:
    ranks = tuple(dist.get_process_group_ranks(group))
    return Members(axis, group, dist.get_group_rank(group, dist.get_rank()), ranks)


def exists(group: dist.ProcessGroup) -> bool:
    """Whether `group` has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


class PrivateGroup:
    """A group of the engine's own among the members of one dimension of the user's group."""

    def __init__(self, members: Members, owner: str, generation: int) -> None:
        self.members = members
        self.owner = owner
        self.store = self._store(generation)
        self.timeout = members.timeout
        while self.read_note() is not None:  # members gave that one up, perhaps before this rank ever tried it
            generation += 1
            self.store = self._store(generation)
        self.generation = generation
        try:
            self.gloo: Any = dist.ProcessGroupGloo(self.store, members.rank, members.size, self.timeout)
        except RuntimeError as error:
            self.write_note(0, members.named(members.rank), "found no connection")
            lost = PeerLostError(
                f"{members.named(members.rank)} found no connection to all {members.size} ranks of the group within "
                f"{self.timeout.total_seconds():g} s: {str(error).splitlines()[0]}; did every rank make this call?"
            )
            lost.gone = True
            raise lost from None
        # Anything but gloo also gets a group of its own for tensors on its devices; gloo carries the agreement.
        native = dist.get_backend(members.group) != "gloo"
        self.device_group = (
            dist.new_group(list(members.global_ranks), use_local_synchronization=True) if native else None
        )

    def _store(self, generation: int) -> PrefixStore:
        name = f"ptcollect/{self.owner}/{self.members.axis or ''}/{generation}"
        return PrefixStore(name, self.members.group.get_group_store())

    def write_note(self, call: int, who: str, why: str) -> None:
        """Leave word of a failure for the peers, before they see the connection close; the first note stays."""
        note = json.dumps({"call": call, "who": who, "why": why})
        _ask(lambda: self.store.compare_set("failure", "", note))

    def read_note(self) -> Note | None:
        """The note that a peer left, if one did."""
        text = _ask(lambda: self.store.get("failure") if self.store.check(["failure"]) else None)
        return None if text is None else Note(**json.loads(text))

    def drop(self) -> None:
        """Close every connection, so that peers fail at once, and let go."""
        gloo, self.gloo = self.gloo, None
        # A wait that times out closes all pairs. Letting go alone does not while anything holds the group, a traceback,
        # say,
        # and with a collective under way blocks until its timeout. On a pair that is closed there is no wait: try them
        # all.
        for other in range(self.members.size):
            if gloo is not None and other != self.members.rank:
                with suppress(RuntimeError):
                    gloo.recv([torch.empty(1, dtype=torch.uint8)], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        if self.device_group is not None:
            self.device_group.abort()
            self.device_group = None


def _ask(question: Callable[[], Any]) -> Any:
    """The answer of a store, or None if it cannot answer now.

    Its host may be what failed; and while another thread waits for a key, the store is busy for as long as that.
    """
    answer: list[Any] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answer.append(question())

    thread = threading.Thread(target=ask, name="ptcollect store", daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS)
    return answer[0] if answer else None


_STORE_SECONDS = 1.0


@dataclass(frozen=True)
class Note:
    """What a failing rank tells its peers."""

    call: int
    who: str
    why: str
