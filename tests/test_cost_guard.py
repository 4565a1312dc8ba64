"""What a call costs, counted and never timed: rounds, messages, bytes, requests, allocations, copies, function calls.

Expected numbers are closed formulas of the tree and the number of ranks, written down here; none comes from the code.
Upper bounds of memory are sums of what must be allocated, with the reason beside each term.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from costs import Memory, Posted, calls, echo_group, memory
from torch import Tensor

import ptcollect as pc
from ptcollect.transforms import bucketize as bucketize_module

N = 4
ROWS, COLUMNS = 512, 512
NUMBERS = ROWS * COLUMNS
BYTES = 4 * NUMBERS
SMALL = 16 * 1024
"""Bytes for what does not grow with the tree: records, scalars, one number per block."""


def tree(leaves: int) -> dict[str, Tensor]:
    """1 MiB of float32 in so many matrices of 512 columns, in which no two numbers are equal."""
    numbers = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0)).view(leaves, -1, COLUMNS)
    return {f"layer{i}": numbers[i].clone() for i in range(leaves)}


# Traffic ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one call."""

    rounds: int
    messages: int
    bytes: int
    collectives: int = 0
    """Of the messages and bytes, all are inside so many native collectives."""


def ring(n: int, wire: Callable[[int], int], buckets: int = 1) -> Traffic:
    """2(n-1) rounds of one message, each a packet of one of n chunks."""
    rounds = 2 * (n - 1) * buckets
    return Traffic(rounds, rounds, rounds * wire(NUMBERS // buckets // n))


def direct(n: int, wire: Callable[[int], int], buckets: int = 1) -> Traffic:
    """Two rounds of a message to each other rank, each a packet of one of n chunks."""
    messages = 2 * (n - 1) * buckets
    return Traffic(2 * buckets, messages, messages * wire(NUMBERS // buckets // n))


def gather(n: int, wire: Callable[[int], int], buckets: int = 1) -> Traffic:
    """One round of a message to each other rank, each a packet of all."""
    return Traffic(buckets, (n - 1) * buckets, (n - 1) * buckets * wire(NUMBERS // buckets))


def native(n: int, buckets: int = 1) -> Traffic:
    """Counted as a ring in one round."""
    whole = ring(n, float32, buckets)
    return Traffic(buckets, whole.messages, whole.bytes, collectives=buckets)


def powers(n: int, rank: int, leaves: int) -> Traffic:
    """Two rings in one bucket each: of P, rows x rank, and of Q, columns x rank for each leaf."""
    p, q = ROWS * rank // n, leaves * COLUMNS * rank // n
    return Traffic(4 * (n - 1), 4 * (n - 1), 2 * (n - 1) * 4 * (p + q))


def float32(numel: int) -> int:
    return 4 * numel


def bf16(numel: int) -> int:
    return 2 * numel


def int8(numel: int) -> int:
    """A code each, and a float32 scale for 256."""
    return numel + 4 * math.ceil(numel / 256)


def sign(numel: int) -> int:
    """A bit each, and a float32 scale for 65536."""
    return math.ceil(numel / 8) + 4 * math.ceil(numel / 2**16)


def one_percent(numel: int) -> int:
    """A float32 value and an index of 4 bytes for 1 % of the numbers (2 bytes, up to 65536 of them)."""
    return round(0.01 * numel) * (4 + (4 if numel > 2**16 else 2))


QUARTER = BYTES // 4
FEEDBACK = pc.error_feedback()
TRAFFIC = {
    "ring": (pc.ring_reduce(), 1, lambda n: ring(n, float32)),
    "ring per leaf": (pc.ring_reduce(), 4, lambda n: ring(n, float32, 4)),
    "direct": (pc.all_to_all_avg(), 1, lambda n: direct(n, float32)),
    "gather": (pc.all_gather_avg(), 1, lambda n: gather(n, float32)),
    "native": (pc.all_reduce(), 1, native),
    "ring in one bucket": (pc.chain(pc.bucketize(), pc.ring_reduce()), 16, lambda n: ring(n, float32)),
    "ring in four buckets": (pc.chain(pc.bucketize(QUARTER), pc.ring_reduce()), 16, lambda n: ring(n, float32, 4)),
    "direct in buckets": (pc.chain(pc.bucketize(QUARTER), pc.all_to_all_avg()), 16, lambda n: direct(n, float32, 4)),
    "native in buckets": (pc.chain(pc.bucketize(QUARTER), pc.all_reduce()), 16, lambda n: native(n, 4)),
    "bf16": (pc.chain(pc.compress("bf16"), pc.ring_reduce()), 1, lambda n: ring(n, bf16)),
    "int8": (pc.chain(FEEDBACK, pc.bucketize(), pc.compress("int8"), pc.ring_reduce()), 4, lambda n: ring(n, int8)),
    "sign": (pc.chain(FEEDBACK, pc.compress("sign"), pc.all_to_all_avg()), 1, lambda n: direct(n, sign)),
    "topk": (pc.chain(FEEDBACK, pc.compress("topk"), pc.all_gather_avg()), 1, lambda n: gather(n, one_percent)),
    "low rank": (
        pc.chain(FEEDBACK, pc.low_rank(4), pc.bucketize(), pc.ring_reduce()),
        4,
        lambda n: powers(n, 4, 4),
    ),
}


def records(n: int) -> int:
    """Agreement: a record of 64 bytes in each of ceil(log2 n) rounds."""
    return math.ceil(math.log2(n))


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("name", TRAFFIC)
def test_a_call_sends_what_the_formula_says(name: str, n: int):
    pipeline, leaves, formula = TRAFFIC[name]
    expected = formula(n)
    run = pc.simulate(pipeline, [tree(leaves) for _ in range(n)])
    got = list(zip(run.rounds, run.messages, run.bytes, run.agreement_bytes, strict=True))
    assert got == [(expected.rounds, expected.messages, expected.bytes, 64 * records(n))] * n


@pytest.mark.parametrize("name", TRAFFIC)
def test_the_engine_posts_no_more_requests_than_that(name: str):
    pipeline, leaves, formula = TRAFFIC[name]
    expected = formula(N)
    posted = costs(pipeline, leaves).posted
    own = 0 if expected.collectives else expected.messages
    assert len(posted.sends) == own + records(N)
    assert len(posted.receives) == own + records(N)
    assert len(posted.collectives) == expected.collectives
    assert sum(posted.sends) == (0 if expected.collectives else expected.bytes) + 64 * records(N)


@pytest.mark.parametrize(("check", "steps"), [("every_step", 3), ("first", 1), ("off", 0)])
def test_ranks_agree_as_often_as_asked_for(check: str, steps: int):
    with echo_group(N) as posted:
        for _ in range(3):
            pc.ring_reduce()(tree(1), check=check)
    assert posted.sends.count(64) == steps * records(N)


# Memory -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Of the third call of a pipeline."""

    memory: Memory
    posted: Posted


def costs(pipeline: pc.Pipeline, leaves: int, **options: bool) -> Costs:
    """Count one call when plans are made and groups are there."""
    with echo_group(N) as posted:
        state = pipeline.init(tree(leaves))
        for _ in range(2):
            _, state = pipeline.update(tree(leaves), state)
        inputs = tree(leaves)
        for each in (posted.sends, posted.receives, posted.collectives):
            each.clear()
        with memory() as seen:
            pipeline.update(inputs, state, **options)
    return Costs(seen, posted)


P = 1 / N
BUCKETS = pc.chain(pc.bucketize(), pc.ring_reduce())
DIRECT_BUCKETS = pc.chain(pc.bucketize(), pc.all_to_all_avg())
PACKETS_8 = (1 / 4 + 1 / 256) * (1 + 2 * (N - 1) / N)  # n encoded chunks, 2(n-1) received, of 1/n each
MEMORY = {
    # name: pipeline, leaves, donate, trees allocated, trees copied
    # A copy of the input, which becomes the result; room for one received chunk.
    "ring": (pc.ring_reduce(), 1, False, 1 + P, 1),
    "ring per leaf": (pc.ring_reduce(), 4, False, 1 + P, 1),
    "ring, donated": (pc.ring_reduce(), 1, True, P, 0),
    # Packed into a bucket, of which the results are views; donated leaves are written over.
    "ring in a bucket": (BUCKETS, 16, False, 1 + P, 1),
    "ring in a bucket, donated": (BUCKETS, 16, True, 1 + P, 2),
    "ring in a bucket of its own": (BUCKETS, 1, False, 1 + P, 1),
    "ring in a bucket of its own, donated": (BUCKETS, 1, True, P, 0),
    # Besides the copy n-1 chunks received and the sum of one, which starts as a copy and is copied to its place.
    "direct": (pc.all_to_all_avg(), 1, False, 1 + (N - 1) * P + P, 1 + 2 * P),
    "direct, donated": (pc.all_to_all_avg(), 1, True, (N - 1) * P + P, 2 * P),
    "direct in a bucket": (DIRECT_BUCKETS, 16, False, 1 + (N - 1) * P + P, 1 + 2 * P),
    # n-1 whole trees received, and the sum, which starts as a copy.
    "gather": (pc.all_gather_avg(), 1, False, 1 + (N - 1) + 1, 2),
    "native": (pc.all_reduce(), 1, False, 1, 1),
    "native, donated": (pc.all_reduce(), 1, True, 0, 0),
    # Half a chunk for each of n encodings and 2(n-1) receptions; n-1 chunks decoded, block by block, to be added.
    # Copied: the input, what is encoded, what is decoded to be added, and each chunk of the result as it is decoded.
    "bf16": (
        pc.chain(pc.compress("bf16"), pc.ring_reduce()),
        1,
        False,
        1 + 0.5 + (N - 1) * P + (N - 1) * P,
        1 + 0.5 + (N - 1) * P + 1,
    ),
    # Corrected input, bucket, books, residuals; for n encodings a copy to see what is lost, scratch, and what is
    # decoded for that, like at n-1 hops; packets. Copied: bucket, residuals, losses, what is decoded, codes, results.
    "int8": (
        pc.chain(FEEDBACK, pc.bucketize(), pc.compress("int8"), pc.ring_reduce()),
        4,
        False,
        1.1 * (4 + 3 + (N - 1) * P + PACKETS_8),
        1.1 * (2 + 1 + 1 + (N - 1) * P + 0.25 + 1 + 1),
    ),
    # Corrected input, magnitudes, marks of a byte, books, a copy for the loss, the sum; the rest is sparse.
    "topk": (
        pc.chain(FEEDBACK, pc.compress("topk"), pc.all_gather_avg()),
        1,
        False,
        1.1 * (1 + 1.25 + 0.25 + 1 + 1 + 1 + 1 + 0.35),
        1.1 * (1 + 1 + 1 + 0.6),
    ),
    # Corrected input, its magnitudes for P and for Q, the result and the residual; P, Q and what they need are thin.
    "low rank": (
        pc.chain(FEEDBACK, pc.low_rank(4), pc.bucketize(), pc.ring_reduce()),
        1,
        False,
        5 + 0.25,
        0.25,
    ),
}


@pytest.mark.parametrize("name", MEMORY)
def test_a_call_allocates_and_copies_no_more_than_it_must(name: str):
    pipeline, leaves, donate, allocated, copied = MEMORY[name]
    seen = costs(pipeline, leaves, donate=donate).memory
    most = seen.by_operation.most_common(8)
    assert seen.allocated <= allocated * BYTES + SMALL, f"{seen.allocated / BYTES:.3f} trees allocated: {most}"
    assert seen.copied <= copied * BYTES + SMALL, f"{seen.copied / BYTES:.3f} trees copied"


# Python -------------------------------------------------------------------------------------------------------------


def counted(pipeline: pc.Pipeline, leaves: int, numel: int) -> int:
    """Function calls of the third call on rank 0 of 4."""
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    inputs = {f"layer{i}": numbers.clone() for i in range(leaves)}
    with echo_group(N):
        state = pipeline.init(inputs)
        for _ in range(2):
            _, state = pipeline.update(inputs, state)
        return calls(lambda: pipeline.update(inputs, state))


PYTHON = {
    # name: pipeline, function calls per leaf (of one bucket), function calls of the whole call with one leaf
    "ring": (BUCKETS, 12, 2000),
    "direct": (DIRECT_BUCKETS, 12, 1800),
    "int8": (TRAFFIC["int8"][0], 40, 4500),
    "topk": (pc.chain(FEEDBACK, pc.bucketize(), pc.compress("topk"), pc.all_gather_avg()), 40, 2500),
}


@pytest.mark.parametrize("name", PYTHON)
def test_python_works_per_leaf_and_never_per_element(name: str):
    pipeline, per_leaf, whole = PYTHON[name]
    one, few, many = (counted(pipeline, leaves, 64) for leaves in (1, 50, 150))
    assert one <= whole
    assert (many - few) / 100 <= per_leaf
    # 16 times the numbers, all within one block of what stays in cache: not a call more, but for how ties are searched.
    assert counted(pipeline, 50, 1024) <= 1.02 * few + 20


def test_buckets_are_planned_once():
    def fresh(leaves: int) -> dict[str, Tensor]:  # paths that no other test has had planned
        return {f"planned{leaves}.{path}": leaf for path, leaf in tree(leaves).items()}

    pipeline = pc.chain(pc.bucketize(QUARTER), pc.ring_reduce())
    with echo_group(N), mock.patch.object(bucketize_module, "_bucket", wraps=bucketize_module._bucket) as made:
        for _ in range(3):
            pipeline(fresh(16))
        assert made.call_count == 4  # in the first step
        pipeline(fresh(8))
        assert made.call_count == 4 + 4  # another structure
