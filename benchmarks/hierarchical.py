"""Hierarchical sync against a flat ring, on 2 nodes of 2 ranks that share one slow uplink each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ranks import BF16, Contender, Measured, Tree, compare, gradients, leaves, rebuild, transformer
from sync import Settings
from torch.distributed.device_mesh import init_device_mesh

import ptcollect as pc

NODES, LOCAL = 2, 2
UPLINK = "100mbit"

FLAT = pc.chain(pc.bucketize(), pc.ring_reduce())
DENSE = pc.chain(pc.bucketize(), pc.shard("local"), pc.ring_reduce(axis="node"))
INT8 = pc.chain(pc.bucketize(), pc.shard("local"), pc.compress("int8"), pc.ring_reduce(axis="node"))


def hierarchical(settings: Settings) -> list[Measured]:
    """The dense tree; `sent_bytes` is what leaves a node, which says what the time over that of the ring should be."""
    mesh = init_device_mesh("cpu", (NODES, LOCAL), mesh_dim_names=("node", "local"))
    on_mesh: Callable[[pc.Pipeline], Any] = lambda pipeline: partial(pipeline, group=mesh)  # noqa: E731
    contenders = [
        Contender("flat", repr(FLAT), FLAT),
        Contender("dense", repr(DENSE), on_mesh(DENSE)),
        Contender("int8", repr(INT8), on_mesh(INT8), tolerance=BF16),
    ]
    rows = compare(contenders, gradients(transformer(blocks=6)), seconds=settings.seconds)
    shapes = transformer(blocks=6)
    tree = rebuild(shapes, map(torch.zeros, leaves(shapes)))
    sent = [flat_uplink_bytes(tree), sharded_uplink_bytes(DENSE, tree), sharded_uplink_bytes(INT8, tree)]
    out = [
        Measured(row.key, row.title, row.samples, "flat", uplink, row.size)
        for row, uplink in zip(rows, sent, strict=True)
    ]
    # What `dense` would take if only the bytes that leave a node counted.
    samples = [seconds * sent[1] / sent[0] for seconds in rows[0].samples]
    return [
        *out,
        Measured("predicted", "dense, as its bytes over the uplink predict", samples, "flat", size=out[0].size),
    ]


def flat_uplink_bytes(tree: Tree) -> int:
    """What the flat ring sends out of a node: ranks send to the right only, so all that a node's last rank sends."""
    sent = pc.simulate(FLAT, [tree] * (NODES * LOCAL)).bytes
    return max(sent[node * LOCAL + LOCAL - 1] for node in range(NODES))


def sharded_uplink_bytes(pipeline: pc.Pipeline, tree: Tree) -> int:
    """What it sends out of a node: all that the node's ranks send, less what they would send if it were alone."""
    whole = pc.simulate(pipeline, [tree] * (NODES * LOCAL), axes={"node": NODES, "local": LOCAL}).bytes
    alone = sum(pc.simulate(pipeline, [tree] * LOCAL, axes={"node": 1, "local": LOCAL}).bytes)
    return max(sum(whole[node * LOCAL : (node + 1) * LOCAL]) - alone for node in range(NODES))
