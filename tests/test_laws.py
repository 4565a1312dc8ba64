"""The laws of docs/design.md, section 5, each over the whole table of pipelines x trees x world sizes, in the simulator.

Every combination runs once; what a law needs to know of a run is kept in a `Run`. `test_gloo.py` compares real processes
with the same table.
"""

from __future__ import annotations

import functools
import random
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
import ptcollect as pc
from oracle import leaves
from tables import PIPELINES, TREES, WORLD_SIZES, Row, make

every_pipeline = pytest.mark.parametrize("row", PIPELINES, ids=lambda row: row.id)


@dataclass(frozen=True)
class Run:
    """One run of a pipeline on one tree."""

    tree: str
    n: int
    inputs: list[Any]
    result: pc.Simulation
    side_effects: list[str]

    def __str__(self) -> str:
        return f"tree {self.tree!r} on {self.n} ranks"


@functools.cache
def run(row: Row, tree: str, n: int) -> Run:
    inputs = [make(tree, rank) for rank in range(n)]
    before, globals_before = [storages(each) for each in inputs], process_state()
    result = pc.simulate(row.pipeline, inputs)
    side_effects = [f"{what} changed" for what, value in process_state().items() if value != globals_before[what]]
    for rank, each in enumerate(inputs):
        if storages(each) != before[rank]:
            side_effects.append(f"the input of rank {rank} changed")
    owners = {leaf.untyped_storage().data_ptr() for each in inputs for leaf in leaves(each) if leaf is not None}
    for rank, each in enumerate(result.trees):
        side_effects.extend(
            f"leaf {i} of rank {rank}'s result shares storage with an input"
            for i, leaf in enumerate(leaves(each))
            if leaf is not None and leaf.numel() and leaf.untyped_storage().data_ptr() in owners
        )
    return Run(tree, n, inputs, result, side_effects)


def runs(row: Row) -> Iterator[Run]:
    for n in WORLD_SIZES:
        if n >= row.ranks:
            for tree in TREES:
                yield run(row, tree, n)


def storages(tree: Any) -> list[bytes]:
    """All memory behind the leaves, gaps between strided elements included."""
    found = (leaf.untyped_storage() for leaf in leaves(tree) if leaf is not None)
    return [torch.tensor([], dtype=torch.uint8).set_(storage).numpy().tobytes() for storage in found]


def process_state() -> dict[str, Any]:
    """What a library may not touch."""
    return {
        "torch's RNG": torch.get_rng_state().numpy().tobytes(),
        "numpy's RNG": np.random.get_state()[1].tobytes(),  # noqa: NPY002  (the global one is the point)
        "Python's RNG": random.getstate(),
        "the default dtype": torch.get_default_dtype(),
        "the thread count": torch.get_num_threads(),
        "the grad mode": torch.is_grad_enabled(),
        "the inference mode": torch.is_inference_mode_enabled(),
    }


def pairs(one: Run) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Each leaf of every rank before and after."""
    for rank in range(one.n):
        for i, (old, new) in enumerate(zip(leaves(one.inputs[rank]), leaves(one.result.trees[rank]), strict=True)):
            yield f"{one}: leaf {i} of rank {rank}", old, new


def none_of(complaints: list[str]) -> None:
    assert not complaints, f"{len(complaints)} complaints, the first ones:\n" + "\n".join(complaints[:5])


# The table is complete ----------------------------------------------------------------------------------------------


def stages(module: types.ModuleType, kinds: tuple[type, ...]) -> list[str]:
    """Public names of `module` that make one of `kinds` (or are one)."""
    found = []
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, type):
            made: tuple[Any, ...] = (value,) if value not in kinds else ()
        elif isinstance(value, type(pc.ring_reduce)):
            made = (pc.Pipeline,)
        elif callable(value):
            hint = typing.get_type_hints(value).get("return")
            made = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        else:
            continue
        if any(isinstance(kind, type) and issubclass(kind, kinds) for kind in made):
            found.append(name)
    return found


def test_every_public_stage_is_in_the_table():
    table = "\n".join(row.id for row in PIPELINES)
    names = stages(pc, (pc.Pipeline, pc.Transform))
    assert {"ring_reduce", "broadcast", "bucketize", "compress", "chain", "stateless", "scale"} <= set(names)
    missing = [name for name in names if not re.search(rf"\b{name}\(", table)]
    assert not missing, f"add rows with {missing} to tables.PIPELINES"


def test_every_public_codec_is_in_the_table():
    table = "\n".join(row.id for row in PIPELINES)
    names = [name for name in stages(pc.codecs, (pc.Codec,)) if name not in ("by_name", "Cast")]
    assert {"bf16", "fp16"} <= set(names)
    missing = [name for name in names if not re.search(rf'\b{name}\(|"{name}"', table)]
    assert not missing, f"add rows with {missing} to tables.PIPELINES"


# 1. Pure ------------------------------------------------------------------------------------------------------------


@every_pipeline
def test_law_1_pure(row: Row):
    none_of([f"{one}: {effect}" for one in runs(row) for effect in one.side_effects])


# 2. Same shape ------------------------------------------------------------------------------------------------------


@every_pipeline
def test_law_2_structure_shape_dtype_device_strides(row: Row):
    complaints = []
    for one in runs(row):
        for rank in range(one.n):
            if oracle.structure(one.result.trees[rank]) != oracle.structure(one.inputs[rank]):
                complaints.append(f"{one}: another structure on rank {rank}")
            if type(one.result.trees[rank]) is not type(one.inputs[rank]) and not isinstance(one.inputs[rank], Tensor):
                complaints.append(f"{one}: a {type(one.result.trees[rank]).__name__} on rank {rank}")
        complaints.extend(f"{where}: {odd}" for where, old, new in pairs(one) if (odd := difference(old, new)))
    none_of(complaints)


def difference(old: Tensor | None, new: Tensor | None) -> str | None:
    if old is None or new is None:
        return None if old is new else f"was {old}, is {new}"
    for what, a, b in (
        ("shape", old.shape, new.shape),
        ("dtype", old.dtype, new.dtype),
        ("device", old.device, new.device),
        ("strides", old.stride(), new.stride()),
    ):
        if a != b:
            return f"{what} {a} became {b}"
    return None


# 3. Agreement -------------------------------------------------------------------------------------------------------


def test_the_table_knows_who_agrees():
    agree = {row.id: row.pipeline.consensus for row in PIPELINES}
    assert agree["ring_reduce()"]
    assert agree["chain(gather_avg(), broadcast())"]
    assert not agree["gather_avg()"]
    assert not agree["scale(2.0)"]


@pytest.mark.parametrize("row", [row for row in PIPELINES if row.pipeline.consensus], ids=lambda row: row.id)
def test_law_3_bit_identical_on_every_rank(row: Row):
    none_of(
        [
            f"{one}: rank {rank} differs from rank 0"
            for one in runs(row)
            for rank in range(1, one.n)
            if not oracle.same_bits(one.result.trees[0], one.result.trees[rank])
        ]
    )


# 4. Exact -----------------------------------------------------------------------------------------------------------


@every_pipeline
def test_law_4_within_the_bound_of_the_oracle(row: Row):
    complaints = []
    for one in runs(row):
        right = oracle.expected(row.steps, one.inputs)
        for rank in range(one.n):
            for i, (got, leaf) in enumerate(zip(leaves(one.result.trees[rank]), right[rank], strict=True)):
                if leaf is not None and got is not None and (wrong := oracle.complaint(got, leaf)):
                    complaints.append(f"{one}: leaf {i} of rank {rank}: {wrong}")
    none_of(complaints)
