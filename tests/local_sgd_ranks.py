"""What `gloo_checks.py` runs parameter averaging over, on real ranks."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from gossip_ranks import same_states, tree
from torch import Tensor

import ptcollect as pc

PIPELINES = {
    "local": pc.chain(pc.local_sgd(2), pc.bucketize(100), pc.ring_reduce()),
    "post-local": pc.chain(pc.post_local_sgd(2, every=3), pc.all_to_all_avg()),
    "diloco": pc.chain(pc.diloco(3), pc.error_feedback(), pc.bucketize(), pc.compress("int8"), pc.ring_reduce()),
    "streaming": pc.chain(pc.streaming_diloco(4, fragments=2, delay=1, alpha=0.5), pc.auto_reduce()),
    "low rank": pc.chain(pc.diloco(2, outer=pc.sgd()), pc.error_feedback(), pc.low_rank(2), pc.ring_reduce()),
    "gossip": pc.chain(pc.diloco(2), pc.gossip_avg("one_peer_exponential")),
}


def trained(params: dict[str, Tensor], rank: int, step: int) -> dict[str, Tensor]:
    """Ranks drift apart between syncs."""
    return {path: p + 0.1 * g for (path, p), g in zip(params.items(), tree(rank, seed=str(step)).values(), strict=True)}


def averaging_equals_the_simulator(rank: int, n: int) -> None:
    complaints: list[str] = []
    for name, pipeline in PIPELINES.items():
        state, states = pipeline.init(tree(0)), [pipeline.init(tree(0)) for _ in range(n)]
        mine, trees = tree(0), [tree(0) for _ in range(n)]
        for step in range(7):
            with pc.traffic() as traffic:
                mine, state = pipeline.update(trained(mine, rank, step), state)
            right = pc.simulate(pipeline, [trained(each, r, step) for r, each in enumerate(trees)], states)
            trees, states = right.trees, right.states
            sent = traffic.bytes, traffic.messages, traffic.rounds, traffic.agreement_bytes
            expected = (right.bytes, right.messages, right.rounds, right.agreement_bytes)
            for what, equal in (
                ("the tree", oracle.same_bits(mine, trees[rank])),
                ("the state", same_states([state], [states[rank]])),
                ("the traffic", sent == tuple(counts[rank] for counts in expected)),
                ("silence", not pipeline.quiet(step) or not any(sent)),
            ):
                complaints.extend([f"{name}, step {step}: {what} is another than in the simulator"] * (not equal))
    assert not complaints, complaints


def quiet_steps_wait_for_nobody_and_ranks_out_of_step_are_told(rank: int, n: int) -> None:
    pipeline = pc.chain(pc.diloco(3), pc.ring_reduce())
    model: Any = torch.nn.Linear(2, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    state = pc.sync_params(pipeline, model)
    if rank == 0:  # one step further than the others, which nobody hears of until something is sent
        state = pc.sync_params(pipeline, model, state)
    for _ in range(1 if rank == 0 else 2):
        failure = None
        try:
            state = pc.sync_params(pipeline, model, state)
        except pc.TreeMismatchError as error:
            failure = error
    # Rank 0 has come to step 2, the others to step 2 as well, one call later: they meet there and agree.
    assert failure is None, failure
    assert state["step"] == 3
    ahead = {**state, "step": 5 if rank == 0 else 8}  # both are steps at which something is sent
    with pytest.raises(pc.TreeMismatchError, match="ranks brought different steps"):
        pc.sync_params(pipeline, model, ahead)
