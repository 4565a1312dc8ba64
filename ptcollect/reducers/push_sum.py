"""Push-sum: the mean over a directed graph, as the ratio of two sums that travel alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptcollect.codecs.cast import Cast
from ptcollect.comm import Comm
from ptcollect.dtypes import accumulation_dtype, fresh_copy, restrided, wide_dtype
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline
from ptcollect.reducers.gossip import mixed
from ptcollect.reducers.reducer import reducer
from ptcollect.state import State
from ptcollect.topologies import TopologyLike, read
from ptcollect.topologies.topology import Topology
from ptcollect.tree import Leaves


def push_sum(topology: TopologyLike = "one_peer_exponential", *, axis: str | None = None) -> Pipeline:
    r"""One step of push-sum: each rank splits what it has among those it sends to, and knows how much that was.

    .. math:: x_i \leftarrow \sum_j P_{ij} \, x_j, \qquad w_i \leftarrow \sum_j P_{ij} \, w_j, \qquad z_i = x_i / w_i

    with shares P whose columns sum to 1: what a rank splits is neither more nor less than it has. The tree returned is
    the ratio z, which comes to the mean on every rank, although a directed graph gives some ranks more than others. The
    numerator x and the weight w are kept in the state, beginning with x = 0 and w = 1. The tree given is the last ratio
    with whatever was added to it since, such as a step of SGD, and that is added to x as it is:

    .. math:: x_i \leftarrow x_i + (\text{tree}_i - z_i)

    So the sum of numerators grows by what all ranks added, each counted once, and the sum of weights is n for ever.
    With `compress`, what encoding drops stays with the sender, and both sums still hold. The weight is never
    compressed: 8 bytes a message, once a call, or once for each bucket. Integer leaves stay as they are.

    Args:
        topology: a name, a value from `ptcollect.topologies`, ``{sender: receivers}`` or a directed networkx graph (of
            which each rank splits equally between itself and its receivers), or a matrix whose columns sum to 1.
        axis: name of the mesh dim to work over; ``None`` where the group has one dimension.

    Returns:
        A stateful Pipeline without consensus, with state ``{"numerator": {path: tensor}, "weight": tensor}``:
        numerators in float32 at least, the weight one float64. They differ between ranks.

    Raises:
        ValueError: an unknown topology, or weights that are wrong.
        PipelineError: a matrix whose columns do not sum to 1.

    Source: Kempe, Dobra and Gehrke 2003, Gossip-based computation of aggregate information, section 2; on parameters
    Assran et al. 2019, Stochastic gradient push for distributed deep learning, algorithm 1.

    >>> import torch, ptcollect as pc
    >>> sync = pc.push_sum({0: [1, 2], 1: [2], 2: [0]})
    >>> run = pc.simulate(sync, [torch.tensor([0.0]), torch.tensor([3.0]), torch.tensor([6.0])])
    >>> run.trees, run.states[1]["push_sum"]["weight"]
    ([tensor([3.6000]), tensor([1.8000]), tensor([3.3750])], tensor(0.8333, dtype=torch.float64))
    """
    return PushSum(read(topology), axis)


@dataclass(frozen=True, repr=False)
class PushSum(Pipeline):
    """See `push_sum`."""

    name = "push_sum"

    topology: Topology
    axis: str | None = None

    def __post_init__(self) -> None:
        _ = self.push

    def _show(self, field: str, value: Any) -> str:
        return f'"{value}"' if isinstance(value, str) else super()._show(field, value)

    @property
    def push(self) -> Pipeline:
        """What travels, on numerators."""
        return push(self.topology, axis=self.axis)

    def children(self) -> tuple[Pipeline, ...]:
        return (self.push,)

    @property
    def fresh(self) -> bool:
        return True

    @property
    def works_in_buckets(self) -> bool:
        return True

    @property
    def state_names(self) -> tuple[str, ...]:
        return (self.name,)

    def begin(self, params: Leaves) -> State:
        numerator = {
            path: torch.zeros(leaf.shape, dtype=wide_dtype(leaf.dtype), device=leaf.device)
            for path, leaf in params.items()
            if _floating(path, leaf)
        }
        return {self.name: {"numerator": numerator, "weight": torch.ones((), dtype=torch.float64)}}

    async def apply(self, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        kept: Leaves = state[self.name]["numerator"]
        weight: Tensor = state[self.name]["weight"]
        given: Leaves = {}
        for path, leaf in tree.items():
            if _floating(path, leaf):
                self._check(path, leaf, kept)
                given[path] = kept[path] + (leaf.to(kept[path].dtype) - ratio(kept[path], weight, leaf))
        wires = {path: comm.wire_dtype(path, tree[path]) for path in given}
        travelling = comm.replace(owned=True, wire_dtypes={**comm.wire_dtypes, **wires})
        numerator, weight = await comm.fork([self._numerators(given, travelling), self._weight(weight, comm)])
        out = {
            path: restrided(ratio(numerator[path], weight, leaf), leaf) if path in numerator else fresh_copy(leaf)
            for path, leaf in tree.items()
        }
        return out, {self.name: {"numerator": {**kept, **numerator}, "weight": weight}}

    async def _numerators(self, given: Leaves, comm: Comm) -> Any:
        return (await self.push.apply(given, {}, comm))[0]

    async def _weight(self, weight: Tensor, comm: Comm) -> Any:
        """The weight after this step, by the same rounds as the numerators and never compressed."""
        comm = comm.on_axis(self.axis, self.name).replace(codec=Cast(torch.float64), residuals=None)
        if comm.size == 1:
            return weight
        comm = comm.replace(leaf="weight", dtype=torch.float64, device=weight.device)
        row = await mixed(weight.reshape(1).clone(), comm, self.topology.part(comm.size, comm.step, comm.rank))
        return row.reshape(())

    def _check(self, path: str, leaf: Tensor, kept: Leaves) -> None:
        if path not in kept or kept[path].shape != leaf.shape:
            has = f"one of shape {tuple(kept[path].shape)}" if path in kept else "none"
            raise PipelineError(
                f"{self!r}: leaf {path!r} of shape {tuple(leaf.shape)} needs a numerator like it, the state has {has}; "
                "make the state with init(params) for these parameters"
            )


def ratio(numerator: Tensor, weight: Tensor, like: Tensor) -> Tensor:
    """What `push_sum` returns, in the dtype of the leaf, and so what the next tree is compared with."""
    # Complex numbers as pairs, in buckets and out of them.
    real = torch.view_as_real(numerator) if numerator.is_complex() else numerator
    divided = real / weight.to(numerator.device)
    return (torch.view_as_complex(divided) if numerator.is_complex() else divided).to(like.dtype)


def _floating(path: str, leaf: Tensor) -> bool:
    return accumulation_dtype(leaf.dtype, path).is_floating_point


def shares_all(options: Mapping[str, Any], size: int | None) -> None:
    """The check of `push`: columns sum to 1."""
    topology: Topology = options["topology"]
    if size is not None:
        topology.check(size)
    elif topology.unbalanced and topology.name != "digraph":
        raise PipelineError(
            f"push_sum: {topology.unbalanced}, so it would split more or less than it has; columns must sum to 1, or "
            "give the edges: push_sum({sender: receivers})"
        )


@reducer(consensus=False, averages=False, check=shares_all, convert={"topology": read})
async def push(x: Tensor, comm: Comm, topology: TopologyLike = "one_peer_exponential") -> Tensor:
    """The numerators' half of `push_sum`."""
    return await mixed(x, comm, topology.part(comm.size, comm.step, comm.rank))
