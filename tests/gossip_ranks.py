"""What `test_gossip.py` and, on real ranks, `gloo_checks.py` run gossip and push-sum over."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import optree
import oracle
import torch
from torch import Tensor

import ptcollect as pc

C = pc.codecs
NAMES = (
    "complete",
    "ring",
    "torus",
    "hypercube",
    "exponential",
    "one_peer_exponential",
    "base_k",
    "random_matching",
    "bipartite",
)
"""Every topology that has a name."""


def tree(rank: int, *, dtype: torch.dtype = torch.float32, seed: str = "") -> dict[str, Any]:
    """One rank's, in several shapes; other ranks get other numbers."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{rank}".encode()))

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {"w": new(7, 5), "b": new(6), "scalar": new(), "t": new(3, 4).T}


def mixed_tree(rank: int) -> dict[str, Any]:
    numbers = tree(rank)
    more = {
        "half": numbers["b"].bfloat16(),
        "double": numbers["w"].double(),
        "complex": torch.complex(*numbers["w"][:2]),
    }
    return {**numbers, **more, "count": torch.tensor([3 * rank, rank]), "none": None, "empty": torch.zeros(0, 4)}


def same_states(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(oracle.same_bits(_tensors(a), _tensors(b)) for a, b in zip(one, other, strict=True))


def _tensors(state: Any) -> Any:
    return optree.tree_map(torch.as_tensor, state)


def pipelines(n: int) -> dict[str, pc.Pipeline]:
    """Every topology that `n` ranks can have, and the stages around."""
    even = torch.full((n, n), 0.5 / (n - 1)).fill_diagonal_(0.5)
    around = [(rank, (rank + 1) % n) for rank in range(n)]
    found = {name: pc.chain(pc.bucketize(100), pc.gossip_avg(name)) for name in NAMES}
    found |= {
        "base_k(3)": pc.gossip_avg(pc.topologies.base_k(3)),
        "matrix": pc.gossip_avg(even),
        "graph": pc.gossip_avg(pc.topologies.graph([(0, rank) for rank in range(1, n)])),
        "push along a circle and across": pc.push_sum(pc.topologies.digraph([*around, (0, n - 1)])),
        "push": pc.chain(pc.bucketize(100), pc.compress("int8"), pc.push_sum()),
        "int8": pc.chain(pc.bucketize(), pc.compress("int8"), pc.gossip_avg("torus")),
        "random": pc.chain(pc.compress(C.randk(0.3)), pc.gossip_avg("random_matching")),
        "choco": pc.chain(
            pc.error_feedback(), pc.bucketize(), pc.compress(C.topk(0.3)), pc.gossip_avg("ring", step_size=0.4)
        ),
    }
    return found


def every_topology_equals_the_simulator(rank: int, n: int) -> None:
    complaints: list[str] = []  # a rank that stops leaves the others waiting
    for name, pipeline in pipelines(n).items():
        trees = [{path: mixed_tree(each)[path] for path in ("w", "half", "count")} for each in range(n)]
        mine, state, states = trees[rank], pipeline.init(trees[rank]), None
        for step in range(3):
            with pc.traffic() as traffic:
                mine, state = pipeline.update(mine, state)
            right = pc.simulate(pipeline, trees, states, check="off")
            trees, states = right.trees, right.states
            sent = traffic.bytes, traffic.messages, traffic.rounds
            for what, equal in (
                ("the tree", oracle.same_bits(mine, trees[rank])),
                ("the state", same_states([state], [states[rank]])),
                ("the traffic", sent == (right.bytes[rank], right.messages[rank], right.rounds[rank])),
            ):
                complaints.extend([f"{name}, step {step}: {what} is another than in the simulator"] * (not equal))
    assert not complaints, complaints


def parameters_are_gossiped_in_place(rank: int, n: int) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    state = None
    for _ in range(3):
        state = pc.sync_params(pc.gossip_avg("base_k"), model, state)
    assert state == {"step": 3}
    torch.testing.assert_close(model.weight, torch.ones(1, 2), rtol=0, atol=1e-6)
