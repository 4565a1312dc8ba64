"""Gossip: a weighted mean with this step's neighbours in a topology, and nothing beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.errors import PipelineError
from ptcollect.reducers.reducer import reducer
from ptcollect.topologies import TopologyLike, read
from ptcollect.topologies.topology import IDLE, Part


def balanced(options: Mapping[str, Any], size: int | None) -> None:
    """The check of `gossip_avg`."""
    topology, step_size = options["topology"], options["step_size"]
    if size is not None:
        topology.check(size)
        return
    if topology.unbalanced:
        raise PipelineError(
            f"gossip_avg({topology.as_option()}): {topology.unbalanced}, so gossip would find a weighted mean; "
            f"columns must sum to 1 as rows do, or write push_sum({topology.as_option()}) for a directed graph"
        )
    if isinstance(step_size, bool) or not isinstance(step_size, (int, float)) or not 0 < step_size <= 1:
        raise ValueError(f"gossip_avg(step_size=...): expected a number above 0 and up to 1, got {step_size!r}")


@reducer(consensus=False, keeps_dropped=True, check=balanced, convert={"topology": read})
async def gossip_avg(
    x: Tensor, comm: Comm, topology: TopologyLike = "one_peer_exponential", *, step_size: float = 1.0
) -> Tensor:
    r"""One step of gossip: each rank's tensor moves towards those of its neighbours; ranks agree more step by step.

    .. math:: y_i = x_i + \gamma \sum_j W^{(t)}_{ij} \, \big( D(C(x_j)) - D(C(x_i)) \big)

    with the topology's mixing matrix W at step t, and the codec's encoding C and decoding D; without `compress`, and
    with step size 1, that is :math:`y_i = \sum_j W_{ij} x_j`. The mean over ranks stays what it was, whatever the codec
    drops, since that stays with the sender: the sum over ranks of results is the sum of inputs, to rounding.

    Each rank encodes once and sends in the topology's rounds, to one peer at most in each. It adds up its own tensor
    first and then what came, in the order of the rounds, in the accumulation dtype. Integers are mixed in float64 and
    rounded, halves to the even one, so only their mean over ranks may change.

    Args:
        topology: a name, a value from `ptcollect.topologies`, a mixing matrix, or a networkx graph; doubly stochastic.
            Where it changes from step to step, the pipeline keeps a step count, and so is called with `update`.
        step_size: gamma, above 0 and up to 1; below 1 for codecs that lose much, see `error_feedback`.
        axis: name of the mesh dim to gossip over; ``None`` where the group has one dimension.

    Returns:
        A Pipeline without consensus: ranks end with different trees, so hooks that replicas rely on refuse it.

    Raises:
        ValueError: an unknown topology, weights that are wrong, or a step size out of range.
        PipelineError: the topology is not doubly stochastic; use `push_sum`.

    Source: Boyd et al. 2006, Randomized gossip algorithms; Lian et al. 2017, Can decentralized algorithms outperform
    centralized algorithms?; the form that keeps the mean: Koloskova, Stich and Jaggi 2019, Decentralized stochastic
    optimization and gossip algorithms with compressed communication, section 3.2.

    >>> import torch, ptcollect as pc
    >>> run = pc.simulate(pc.gossip_avg("ring"), [torch.tensor([3.0 * rank]) for rank in range(4)])
    >>> run.trees, run.bytes, run.rounds
    ([tensor([4.]), tensor([3.]), tensor([6.]), tensor([5.])], [8, 8, 8, 8], [2, 2, 2, 2])
    """
    own, turns = topology.part(comm.size, comm.step, comm.rank)
    damped = tuple([turn._replace(weight=step_size * turn.weight) for turn in turns])
    return await mixed(x, comm, Part(1 - step_size * (1 - own), damped))


async def mixed(x: Tensor, comm: Comm, part: Part) -> Tensor:
    """This rank's share of a step: its own tensor times its own weight, plus its peers' in the order of the rounds.

    Of what it sends it keeps what encoding dropped: where columns sum to 1, the sum over ranks stays what it was.
    """
    turns = [turn for turn in part.turns if turn != IDLE]
    if not turns:
        return x
    packet = comm.encode(x)
    # What is sent must stay as it is until the last round is over.
    total = x if len(turns) == 1 and x.is_floating_point() else x.clone()
    if not x.is_floating_point():
        total = total.to(torch.float64)
    room = torch.empty_like(x) if comm.plain else x.numel()
    for i, turn in enumerate(turns):
        send = {} if turn.to is None else {turn.to: packet}
        received = await comm.exchange(send=send, recv={} if turn.source is None else {turn.source: room})
        if i == 0:
            if comm.plain:
                total.mul_(part.own)
            else:
                comm.accumulate(packet, total, alpha=part.own - 1)
        if turn.source is not None:
            comm.accumulate(received[turn.source], total, alpha=turn.weight)
    return total if x.is_floating_point() else x.copy_(total.round_())
