"""What a packet is: its size, what it decodes to, which errors it makes, and where its randomness comes from."""

from __future__ import annotations

import copy
import math
import pickle
import re
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from codec_table import CODECS, KEY, one_thread, round_trip  # noqa: F401  (one_thread is a fixture)
from torch import Tensor

import ptcollect as pc

C = pc.codecs
F32 = torch.finfo(torch.float32)
SUB = 2.0**-149  # the smallest positive float32

every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)


def real(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loss(codec: pc.Codec, x: Tensor, key: C.Key = KEY) -> Tensor:
    return round_trip(codec, x, key).double() - x.double()


def blocks_of(x: Tensor, block: int) -> list[Tensor]:
    return list(torch.split(x, block))


def rows(x: Tensor, block: int) -> Tensor:
    """One block a row, the last filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)


def is_random(codec: pc.Codec) -> bool:
    return "stochastic=True" in repr(codec) or "randk" in repr(codec)


# Every codec --------------------------------------------------------------------------------------------------------


def test_every_codec_is_in_the_table():
    factories = set(C.__all__) - {"Codec", "Key", "by_name"}
    assert {repr(codec).split("(")[0] for codec in CODECS} == factories


# What is promised per element, counted by hand: values, positions, a float32 scale per block, 8 bytes of seed.
SIZES: dict[pc.Codec, tuple[int, int, int, int]] = {  # for 1, 9, 1000 and 65537 elements
    C.bf16(): (2, 18, 2000, 131074),
    C.fp16(): (2, 18, 2000, 131074),
    C.fp8(): (5, 13, 1016, 65537 + 4 * 257),
    C.int8(): (5, 13, 1016, 65537 + 4 * 257),
    C.int8(stochastic=True): (5, 13, 1016, 65537 + 4 * 257),
    C.int4(): (5, 9, 500 + 4 * 16, 32769 + 4 * 1025),
    C.int4(stochastic=True): (5, 9, 500 + 4 * 16, 32769 + 4 * 1025),
    C.sign(): (5, 6, 129, 8193 + 8),
    C.ternary(): (5, 7, 254, 16385 + 8),
    C.ternary(stochastic=True): (5, 7, 254, 16385 + 8),
    C.topk(0.2): (1 + 4, 2 + 8, 200 * 6, 13107 * 8),
    C.topk(0.2, values="int8"): (1 + 5, 2 + 6, 400 + 204, 13107 * 4 + 13107 + 4 * 52),
    C.randk(0.3): (8 + 4, 8 + 12, 8 + 1200, 8 + 4 * 19661),
}


@every_codec
def test_packets_are_as_long_as_promised(codec):
    assert codec.wire_bytes(0) == 0
    assert tuple(codec.wire_bytes(numel) for numel in (1, 9, 1000, 65537)) == SIZES[codec]
    for numel in (0, 1, 2, 3, 7, 8, 9, 31, 64, 65, 255, 256, 257, 1000, 65535, 65536, 65537, 200_003):
        for dtype in (torch.float32, torch.float64):
            x = real(numel, dtype=dtype)
            packet = codec.encode(x, KEY)
            assert packet.dtype == torch.uint8
            assert packet.shape == (codec.wire_bytes(numel),)
            back = codec.decode(packet, numel, dtype)
            assert back.dtype == dtype
            assert back.shape == (numel,)
            assert torch.isfinite(back).all()


def test_one_bit_is_one_bit():
    assert C.sign().wire_bytes(9) == 2 + 4  # grace#3
    assert C.sign(block=8).wire_bytes(9) == 2 + 8
    assert C.bf16().wire_bytes(1) == 2  # hivemind PR 524
    x = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 1.0, -1.0])
    bits = C.sign().encode(x, KEY)[4:]
    assert len(bits) == 2
    assert sum(byte.bit_count() for byte in bits.tolist()) == 5


@every_codec
def test_encoding_is_a_pure_function(codec):
    for numel in (1, 9, 1000, 70_001):
        x = real(numel)
        before, rng, default = oracle.bits(x), torch.get_rng_state(), torch.get_default_dtype()
        packet = codec.encode(x, KEY)
        sent = oracle.bits(packet)
        back = oracle.bits(codec.decode(packet, numel, torch.float32))
        torch.rand(3, generator=torch.Generator().manual_seed(9))
        assert oracle.bits(codec.encode(x, KEY)) == sent
        assert oracle.bits(codec.decode(packet, numel, torch.float32)) == back
        assert oracle.bits(x) == before
        assert oracle.bits(packet) == sent
        assert torch.equal(torch.get_rng_state(), rng)
        assert torch.get_default_dtype() == default


@every_codec
def test_a_view_is_encoded_like_its_copy(codec):
    row = real(1009)
    view = row[3:1003]  # starts at no multiple of anything
    assert oracle.bits(codec.encode(view, KEY)) == oracle.bits(codec.encode(view.clone(), KEY))


@every_codec
def test_zeros_stay_zeros(codec):
    for numel in (0, 1, 9, 1000, 65537):
        for dtype in (torch.float32, torch.float64):
            assert not round_trip(codec, torch.zeros(numel, dtype=dtype)).any()
    sync = pc.chain(pc.error_feedback(), pc.compress(codec), pc.ring_reduce())
    run = pc.simulate(sync, [{"w": torch.zeros(9), "e": torch.zeros(0, 2)}] * 3)
    for tree, state in zip(run.trees, run.states, strict=True):
        assert not tree["w"].any()
        assert not state["error_feedback"]["residual"]["w"].any()


@every_codec
def test_accumulate_is_decode_and_add(codec):
    for dtype in (torch.float32, torch.float64):
        x, start = real(1000, 1, dtype), real(1000, 2, dtype)
        packet = codec.encode(x, KEY)
        decoded = codec.decode(packet, 1000, dtype).double()
        for keep, alpha in ((1.0, 1.0), (0.5, 0.25), (1.0, 0.5), (0.25, 1.0)):
            into = start.clone()
            codec.accumulate(packet, into, keep, alpha)
            off = into.double() - (keep * start.double() + alpha * decoded)
            # Two additions may be rounded (sign adds 2 s and takes away s).
            size = start.abs().double() + 2 * decoded.abs().max()
            assert (off.abs() <= 2 * oracle.eps(dtype) * size).all()


LONG = 2**19 + 2**16 + 70_001  # a whole group of blocks that are worked on together, and parts of one


@every_codec
def test_long_rows_decode_as_a_whole(codec):
    x, start = real(LONG, 41), real(LONG, 42)
    packet = codec.encode(x, KEY)
    decoded = codec.decode(packet, LONG, torch.float32)
    assert torch.isfinite(decoded).all()
    into = torch.full((LONG,), math.nan)
    codec.accumulate(packet, into, 0.0, 1.0)
    assert oracle.bits(into) == oracle.bits(decoded)
    into = start.clone()
    codec.accumulate(packet, into, 1.0, -1.0)
    assert torch.equal(into, start - decoded)


@every_codec
@pytest.mark.parametrize("numel", [0, 1, 9, 1000, LONG])
def test_what_was_lost_is_booked_in_its_place(codec, numel):
    x, before = real(numel, 43), real(numel, 44)
    packet = codec.encode(x, KEY)
    lost = x.double() - codec.decode(packet, numel, torch.float32).double()
    sent = oracle.bits(packet), oracle.bits(x)
    for keep, alpha in ((1.0, 1.0), (1.0, 4.0), (0.0, 3.0), (0.0, 1.0)):
        into = before.clone() if keep else torch.full((numel,), math.nan)
        codec.book(packet, x, into, keep, alpha)
        want = (before.double() if keep else 0) + alpha * lost
        # The difference, its multiple, and the sum are rounded once each.
        size = before.abs().double() + 3 * alpha * (x.abs().double() + lost.abs())
        assert ((into.double() - want).abs() <= oracle.eps(torch.float32) * size).all()
    assert (oracle.bits(packet), oracle.bits(x)) == sent


@every_codec
def test_codecs_are_values(codec):
    names = {name: getattr(C, name) for name in C.__all__}
    same = eval(repr(codec), names)
    for other in (same, pickle.loads(pickle.dumps(codec)), copy.deepcopy(codec)):
        assert other == codec
        assert hash(other) == hash(codec)
        assert repr(other) == repr(codec)
    assert sum(codec == other for other in CODECS) == 1


def test_names_of_plain_codecs():
    for name in sorted(set(C.__all__) - {"Codec", "Key", "by_name"}):
        assert C.by_name(name) == getattr(C, name)()
        assert pc.compress(name) == pc.compress(getattr(C, name)())
        assert repr(pc.compress(name)) == f'compress("{name}")'
    assert repr(pc.compress(C.int8(64, stochastic=True))) == "compress(int8(64, stochastic=True))"


# Key: the only source of randomness ---------------------------------------------------------------------------------

OTHER_KEYS = (replace(KEY, step=1), replace(KEY, path="v"), replace(KEY, rank=1), replace(KEY, hop=1))


@every_codec
def test_randomness_comes_from_the_key_alone(codec):
    x = real(200, 3)
    first = oracle.bits(codec.encode(x, KEY))
    assert oracle.bits(codec.encode(x, C.Key(0, "w", 0, 0))) == first
    others = [oracle.bits(codec.encode(x, key)) for key in OTHER_KEYS]
    assert len({first, *others}) == (5 if is_random(codec) else 1)


@pytest.mark.parametrize("make", [C.int8, C.int4, C.ternary], ids=lambda make: make.__name__)
def test_another_seed_draws_other_numbers(make):
    x = real(200, 3)
    assert oracle.bits(make(stochastic=True).encode(x, KEY)) != oracle.bits(
        make(stochastic=True, seed=1).encode(x, KEY)
    )
    assert oracle.bits(C.randk(0.3).encode(x, KEY)) != oracle.bits(C.randk(0.3, seed=1).encode(x, KEY))


def test_blocks_and_groups_of_blocks_draw_their_own_numbers():
    # The same 256 numbers in every block: were a draw repeated, blocks would be equal.
    x = real(256, 5).repeat(600)
    rows = round_trip(C.int8(stochastic=True), x).view(600, 256)
    assert len({oracle.bits(row) for row in rows}) == 600


# Casts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "dtype"), [(C.bf16(), torch.bfloat16), (C.fp16(), torch.float16)], ids=repr)
def test_casts_round_to_the_nearest_number_of_their_dtype(codec, dtype):
    bits = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    x = torch.cat(
        [real(2000), real(500, 1) * 1e-3, torch.tensor([65504.0, 2.0**-14, 1 + 2.0**-bits, 1 + 3 * 2.0**-bits])]
    )
    back = round_trip(codec, x)
    assert torch.equal(back, back.to(dtype).float())
    normal = x.abs() >= 2.0**-14
    assert (loss(codec, x).abs() <= 2.0**-bits * x.abs().double())[normal].all()
    assert back[-2:].tolist() == [1.0, 1 + 2 * 2.0 ** (1 - bits)]  # halves go to the even neighbour


def test_fp16_overflows_openly():
    assert round_trip(C.fp16(), torch.tensor([65504.0, 65520.0, -1e30])).tolist() == [65504.0, math.inf, -math.inf]


# Integers and fp8 with a scale per block ----------------------------------------------------------------------------

LEVELS = {"int8": 127, "int4": 7}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 5, 63, 64, 65, 1000, 140_001])
@pytest.mark.parametrize("block", [1, 3, 64, 256, 65536, 100_000])
@pytest.mark.parametrize("name", LEVELS)
def test_integers_are_the_nearest_multiples_of_the_scale(name, block, numel, dtype):
    levels, x = LEVELS[name], real(numel, 7, dtype)
    part, got = (rows(row.double(), block) for row in (x, round_trip(getattr(C, name)(block), x)))
    s = part.abs().amax(1, keepdim=True)
    # Half a step; the scale is rounded to float32, which at the largest code counts `levels` times.
    assert ((got - part).abs() <= s / (2 * levels) * (1 + 2 * levels * oracle.eps(torch.float32))).all()
    codes = got / (s / levels)
    assert (codes - codes.round()).abs().max() <= 4 * levels * oracle.eps(torch.float32)
    assert (codes.abs().amax(1).round() == levels).all()


def by_the_formula(x: Tensor, block: int, levels: int) -> tuple[Tensor, Tensor]:
    """Scales and codes, all blocks at once, for numbers that are neither huge nor subnormal."""
    part = rows(x, block)
    scale = (part.abs().amax(1, keepdim=True) / levels).float()
    codes = torch.where(scale == 0, 0.0, part / scale.to(x.dtype)).round()
    return scale.view(-1), codes.view(-1)[: x.numel()].to(torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("block", "numel"), [(3, 1000), (64, 65_536), (256, 1000), (256, LONG), (1000, LONG)])
def test_int8_packets_are_those_of_the_formula(block, numel, dtype):
    """Bit by bit, whichever way they were made: with blocks that need care, and without."""
    plain = real(numel, 45, dtype)
    zeros, halves = plain.clone(), (torch.arange(numel) % 509 - 254).to(dtype) / 4
    zeros[numel // 2 : numel // 2 + 600] = -0.0
    for x in (plain, zeros, halves):
        packet = C.int8(block).encode(x, KEY)
        scales, codes = packet.tensor_split([4 * -(-numel // block)])
        want_scales, want_codes = by_the_formula(x, block, 127)
        assert torch.equal(scales.view(torch.float32), want_scales)
        assert torch.equal(codes.view(torch.int8), want_codes)
    for bad in (math.nan, math.inf, 3e38, 1e-38, 1e-44):
        spoilt = zeros.clone()
        spoilt[:block] = torch.where(torch.arange(block) == 1, 1.0, 0.5).to(dtype) * bad
        packet = C.int8(block).encode(spoilt, KEY)
        scales, codes = packet.tensor_split([4 * -(-numel // block)])
        want_scales, want_codes = by_the_formula(zeros, block, 127)
        assert torch.equal(scales.view(torch.float32)[1:], want_scales[1:])
        assert torch.equal(codes.view(torch.int8)[block:], want_codes[block:])
        head = C.int8(block).decode(packet, numel, dtype)[:block]
        if math.isfinite(bad):
            assert torch.allclose(head, spoilt[:block], rtol=1 / 126, atol=127 * SUB)
        else:
            assert not torch.isfinite(head[1])


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", LEVELS)
def test_numbers_on_the_grid_are_exact(name, stochastic):
    levels = LEVELS[name]
    x = torch.arange(-levels, levels + 1, dtype=torch.float32)
    for step in (1.0, 0.5, 2.0**-20):  # the scale is a power of two, and so exact
        assert torch.equal(round_trip(getattr(C, name)(stochastic=stochastic), x * step), x * step)


def test_blocks_do_not_touch_each_other():
    x = torch.tensor([1.0, -0.5, 0.25, 127.0, 1e6, 3.0, 2.0, -1e6, 0.0, 0.0, 0.0, 0.0, 1e-9])
    for codec in (C.int8(4), C.int4(4), C.fp8(4), C.ternary(4), C.ternary(4, stochastic=True)):
        whole = round_trip(codec, x)
        assert torch.equal(whole[8:12], torch.zeros(4))
        if not is_random(codec):
            parts = [round_trip(codec, part) for part in blocks_of(x, 4)]
            assert torch.equal(whole, torch.cat(parts)), codec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp8_keeps_small_numbers_within_a_sixteenth(dtype):
    # Magnitudes over 8 decades in each block of 256.
    x = real(1024, 11, dtype) * 10.0 ** (torch.arange(1024, dtype=dtype) % 256 / -32)
    off = loss(C.fp8(), x).abs()
    s = torch.stack(blocks_of(x.double().abs(), 256)).amax(1).repeat_interleave(256)
    size, slack = x.double().abs(), 1 + 8 * oracle.eps(torch.float32)
    normal = size >= s / 28672
    assert normal.sum() > 400
    assert (~normal).sum() > 100
    assert (off[normal] <= size[normal] / 16 * slack).all()
    assert (off[~normal] <= (s / 448 * 2.0**-10)[~normal] * slack).all()  # half of e4m3's smallest number


# sign and ternary ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 9, 64, 1000, 65537])
def test_scaled_sign_has_the_error_of_its_formula(numel):
    x = real(numel, 13, torch.float64)
    whole = 0.0
    for part in blocks_of(x, 65536):
        d, l1, l2 = part.numel(), float(part.abs().sum()), float(part.norm())
        whole += (1 - l1**2 / (d * l2**2)) * l2**2
    # The scale is rounded to float32.
    assert float((loss(C.sign(), x) ** 2).sum()) == pytest.approx(whole, rel=1e-5, abs=1e-12 * float(x.norm()) ** 2)


def test_scaled_sign_by_hand():
    assert round_trip(C.sign(), torch.tensor([3.0, -1.0, 0.0, -4.0])).tolist() == [2.0, -2.0, 2.0, -2.0]
    x = torch.tensor([1.0] * 8 + [-4.0, 4.0] * 4 + [-10.0])
    assert round_trip(C.sign(8), x).tolist() == x.tolist()


@pytest.mark.parametrize("numel", [1, 3, 9, 1000, 65537])
def test_ternary_keeps_what_is_above_its_threshold_at_their_mean(numel):
    x = real(numel, 17)
    back = round_trip(C.ternary(), x)
    for part, got in zip(blocks_of(x.double(), 65536), blocks_of(back.double(), 65536), strict=True):
        threshold = 0.7 * float(part.abs().mean())
        clear = (part.abs() - threshold).abs() > 1e-4 * threshold
        kept = part.abs() > threshold
        assert torch.equal((got != 0)[clear], kept[clear])
        assert torch.equal(got.sign()[got != 0], part.sign()[got != 0])
        assert got.abs().max() == pytest.approx(float(part[got != 0].abs().mean()), rel=1e-5)


# topk ---------------------------------------------------------------------------------------------------------------


def positions_sent(codec: pc.Codec, x: Tensor) -> list[int]:
    """Read from the packet itself, so that values that are zero count."""
    width = 1 if x.numel() <= 256 else 2 if x.numel() <= 65536 else 4
    k = codec.wire_bytes(x.numel()) // (width + 4)
    head = bytes(codec.encode(x, KEY)[: k * width].tolist())
    return [int.from_bytes(head[i : i + width], "little") for i in range(0, len(head), width)]


def largest_by_sorting(x: Tensor, k: int) -> list[int]:
    size = x.abs().tolist()
    return sorted(sorted(range(len(size)), key=lambda i: (-size[i], i))[:k])


def spikes(numel: int, where: Any) -> Tensor:
    x = torch.zeros(numel)
    x[where] = torch.arange(len(x[where]), dtype=torch.float32) % 7 + 5
    return x


LARGE = 200_000  # from 131072 elements on a threshold may come from every third element or so
ADVERSARIES = {
    "normal": real(LARGE, 19),
    "small": real(100, 19),
    "constant": torch.full((LARGE,), -2.0),
    "zeros": torch.zeros(LARGE),
    "one spike": spikes(LARGE, slice(77_777, 77_778)),
    "spike at the end": spikes(LARGE, slice(LARGE - 1, LARGE)),
    "ascending": torch.arange(1.0, LARGE + 1),
    "descending": torch.arange(1.0, LARGE + 1).flip(0),
    "many duplicates": torch.randint(0, 4, (LARGE,), generator=torch.Generator().manual_seed(1)).float() - 2,
    "large ones at every third": spikes(LARGE, slice(0, 3 * 1000, 3)),
    "large ones between them": spikes(LARGE, slice(1, LARGE, 3)),
    "half zeros": real(LARGE, 21) * (torch.arange(LARGE) % 2),
    "one repeated beside larger": torch.cat([torch.ones(LARGE - 5), torch.full((5,), 3.0)]),
    "one huge block": real(LARGE, 31) * (1 + 1e6 * (torch.arange(LARGE) // 2048 == 40)),
    "many ties at the threshold": torch.cat([torch.ones(LARGE // 2), torch.full((LARGE // 100,), 2.0)]).repeat(2)[
        :LARGE
    ],
    "subnormal": real(LARGE, 23) * 1e-40,
    "huge": real(LARGE, 25).clamp(-3, 3) * 1e38,
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_topk_is_what_sorting_finds(name):
    x = ADVERSARIES[name]
    for ratio in (0.0001, 0.01, 0.1):
        k = max(1, math.floor(ratio * x.numel() + 0.5))
        codec = C.topk(ratio)
        want = largest_by_sorting(x, k)
        assert positions_sent(codec, x) == want
        back = torch.zeros_like(x)
        back[want] = x[want]
        assert torch.equal(round_trip(codec, x), back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_takes_nan_for_the_largest(dtype):
    for numel, bad in ((10, [3]), (1000, [0, 999]), (LARGE, [5, 77_777, LARGE - 1]), (LARGE, range(0, LARGE, 3))):
        x = real(numel, 33, dtype)
        x[list(bad)] = -math.nan
        k = max(1, math.floor(0.01 * numel + 0.5))
        first = sorted(bad)[:k]
        rest = largest_by_sorting(x.nan_to_num(0.0), k - len(first))
        assert positions_sent(C.topk(0.01), x.float()) == sorted([*first, *rest])
        assert round_trip(C.topk(0.01), x)[first].isnan().all()


def test_topk_sends_exactly_k():
    assert (round_trip(C.topk(0.1), real(100)) != 0).sum() == 10  # epfml/powersgd#5
    for numel, ratio, k in ((1, 0.01, 1), (49, 0.01, 1), (150, 0.01, 2), (3, 0.5, 2), (7, 1.0, 7), (1000, 0.0004, 1)):
        assert (round_trip(C.topk(ratio), real(numel)) != 0).sum() == k
        assert (round_trip(C.randk(ratio), real(numel)) != 0).sum() == k


def test_topk_takes_ties_from_the_front():
    assert round_trip(C.topk(0.5), torch.tensor([1.0, -1.0, 1.0, -1.0])).tolist() == [1.0, -1.0, 0.0, 0.0]
    assert round_trip(C.topk(0.5), torch.tensor([1.0, 2.0, -1.0, 1.0])).tolist() == [1.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize(("numel", "width"), [(256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_positions_are_as_wide_as_they_must_be(numel, width):
    codec = C.topk(4 / numel)
    assert codec.wire_bytes(numel) == 4 * (width + 4)
    x = torch.zeros(numel)
    where = sorted({0, 1, numel // 2 + 1, numel - 1})
    x[where] = torch.tensor([5.0, -6.0, 7.0, -8.0])
    assert torch.equal(round_trip(codec, x), x)


def test_topk_contracts_and_only_constants_reach_the_bound():
    for seed, numel, ratio in ((0, 100, 0.1), (1, 1000, 0.01), (2, 65537, 0.01), (3, 7, 0.5)):
        d, k = numel, max(1, math.floor(ratio * numel + 0.5))
        x = real(numel, seed, torch.float64)
        assert float((loss(C.topk(ratio), x) ** 2).sum()) < (1 - k / d) * float(x.norm()) ** 2
        constant = torch.full((numel,), 3.0)
        assert float((loss(C.topk(ratio), constant) ** 2).sum()) == 9 * (d - k)


def test_values_go_through_their_own_codec():
    x = real(1000, 27)
    codec = C.topk(0.1, values="int8")
    assert codec == C.topk(0.1, values=C.int8())
    back, where = round_trip(codec, x), largest_by_sorting(x, 100)
    s = float(x.abs().max())
    assert torch.equal((back != 0).nonzero().view(-1), torch.tensor(where))
    assert ((back - x)[where].abs() <= s / 254 * 1.0001).all()
    assert codec.wire_bytes(1000) == 200 + 104


# randk --------------------------------------------------------------------------------------------------------------


def test_randk_keeps_what_it_chose_and_nothing_else():
    x = real(50, 29)
    for step in range(20):
        back = round_trip(C.randk(0.2), x, replace(KEY, step=step))
        kept = back != 0
        assert kept.sum() == 10
        assert torch.equal(back[kept], x[kept])
        scaled = round_trip(C.randk(0.2, unbiased=True), x, replace(KEY, step=step))
        assert torch.allclose(scaled, back * 5, rtol=1e-6)


def test_randk_chooses_evenly():
    # Each position is kept with probability k/d: over N keys a binomial count, 5 deviations from N k/d at most.
    d, k, N = 40, 8, 3000
    x = torch.ones(d)
    counts = sum(round_trip(C.randk(k / d), x, C.Key(i, "w", i % 3, i % 2)).double() for i in range(N))
    deviation = math.sqrt(N * k / d * (1 - k / d))
    assert counts.sum() == N * k
    assert (counts - N * k / d).abs().max() <= 5 * deviation
    # Pairs too: positions are drawn without replacement, and not as a run of neighbours.
    together = sum(float(round_trip(C.randk(k / d), x, C.Key(i, "w", 0, 0))[:2].prod()) for i in range(N))
    p = k / d * (k - 1) / (d - 1)
    assert abs(together - N * p) <= 5 * math.sqrt(N * p * (1 - p))


# Unbiasedness and variance, against the closed forms -----------------------------------------------------------------

SAMPLES = 8_000
POINTS = torch.tensor([1.0, -0.95, 0.9, 0.61, -0.43, 0.25, -0.1, 0.033, 0.004, -0.0007, 0.0, 0.5])


def samples(codec: pc.Codec) -> Tensor:
    """`POINTS` encoded many times, each in a block of its own, with numbers of their own drawn."""
    return round_trip(codec, POINTS.repeat(SAMPLES)).double().view(SAMPLES, -1)


def farthest(drawn: Tensor, variance: Tensor) -> tuple[float, float]:
    """How many deviations the sample's mean and its mean square error are off, at worst, if that is the variance."""
    error = drawn - POINTS.double()
    slack = 1e-6  # of the scale in float32
    mean = (error.mean(0).abs() - slack).clamp(min=0) / (variance / SAMPLES).sqrt().clamp(min=1e-12)
    square = error**2
    spread = (square.std(0) / SAMPLES**0.5).clamp(min=1e-9)
    return float(mean.max()), float(((square.mean(0) - variance).abs() - slack).clamp(min=0).div(spread).max())


def qsgd_variance(levels: int) -> Tensor:
    s = float(POINTS.abs().max())
    p = (levels * POINTS.double().abs() / s) % 1
    return (s / levels) ** 2 * p * (1 - p)


def ternary_variance() -> Tensor:
    size = POINTS.double().abs()
    return size.max() * size - size**2


UNBIASED = {
    "int8": (C.int8(12, stochastic=True), qsgd_variance(127)),
    "int4": (C.int4(12, stochastic=True), qsgd_variance(7)),
    "ternary": (C.ternary(12, stochastic=True), ternary_variance()),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_stochastic_rounding_is_unbiased_with_the_variance_of_its_formula(name):
    codec, variance = UNBIASED[name]
    drawn = samples(codec)
    off_mean, off_variance = farthest(drawn, variance)
    assert off_mean <= 5
    assert off_variance <= 5
    # QSGD, lemma 3.1, whole vectors: E |C(x) - x|^2 is the sum of the variances.
    whole = ((drawn - POINTS.double()) ** 2).sum(1)
    assert abs(float(whole.mean() - variance.sum())) <= 5 * float(whole.std()) / SAMPLES**0.5 + 1e-6


@pytest.mark.parametrize("name", UNBIASED)
def test_that_test_can_fail(name):
    codec, variance = UNBIASED[name]
    assert farthest(samples(replace(codec, stochastic=False)), variance)[0] > 50  # rounding to nearest is biased
    assert farthest(samples(codec), variance * 1.2)[1] > 5  # another variance is noticed
    assert farthest(samples(codec) * 1.02, variance)[0] > 5  # and another scale


def test_randk_unbiased_has_the_variance_of_its_formula():
    d, k, N = 12, 3, 4000
    codec = C.randk(k / d, unbiased=True)
    drawn = torch.stack([round_trip(codec, POINTS, C.Key(i, "w", 0, 0)).double() for i in range(N)])
    x = POINTS.double()
    variance = (d / k - 1) * x**2
    deviation = (variance / N).sqrt() + 1e-12
    assert ((drawn.mean(0) - x).abs() / deviation).max() <= 5
    square = (drawn - x) ** 2
    assert ((square.mean(0) - variance).abs() <= 5 * square.std(0) / N**0.5 + 1e-9).all()


# Values at the edges ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_codec
def test_what_is_not_finite_does_not_become_finite_silently(codec, bad):
    if isinstance(codec, type(C.randk())):
        codec = C.randk(1.0)  # of fewer it may well drop that one
    for numel in (1, 100, 70_001):
        x = torch.ones(numel)
        x[numel // 3] = bad
        assert not torch.isfinite(round_trip(codec, x)).all(), numel


@every_codec
def test_large_numbers_stay_finite(codec):
    # Up to the largest float32 that bf16 has; fp16 says that it overflows.
    if codec == C.fp16():
        return
    most = F32.max * (1 - 2.0**-9)
    for x in (torch.tensor([most]), torch.tensor([most, -most, most / 2, 1.0] * 40)):
        back = round_trip(codec, x)
        assert torch.isfinite(back).all(), back[:4]
        assert (back - x).double().abs().max() <= most
        assert not (back.sign() * x.sign() < 0).any()
        assert back.any() or "randk" in repr(codec)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec not in {C.bf16(), C.fp16()}], ids=repr)
def test_the_largest_number_does_not_overflow(codec):
    assert torch.isfinite(round_trip(codec, torch.tensor([F32.max, -F32.max, 1.0] * 4))).all()


@every_codec
def test_subnormals_get_no_worse_than_if_they_were_dropped(codec):
    for most in (1, 2, 10, 100, 127, 128, 189, 190, 447, 448, 500, 670, 3000):
        x = torch.tensor([most, -most, most // 2, 1, 0, -1], dtype=torch.float64) * SUB
        x = x.to(torch.float32)
        off = loss(codec, x).abs()
        assert torch.isfinite(off).all()
        assert off.max() <= most * SUB, f"{most}: {(round_trip(codec, x) / SUB).tolist()}"
        assert not (round_trip(codec, x)[:2].sign() * x[:2].sign() < 0).any()


@pytest.mark.parametrize("codec", [C.int8(), C.int4(), C.fp8()], ids=repr)
def test_mixed_magnitudes_across_blocks(codec):
    block = codec.block
    x = torch.cat([torch.full((block,), size) for size in (1e-38, 1e38, 1e-44, 0.0, 1.0)])
    back = round_trip(codec, x)
    assert torch.allclose(back[: 2 * block], x[: 2 * block], rtol=1e-5)
    assert torch.allclose(back[3 * block :], x[3 * block :], rtol=1e-5)


# Mistakes -----------------------------------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_known_ones():
    known = "'bf16', 'fp16', 'fp8', 'int4', 'int8', 'randk', 'sign', 'ternary', 'topk'"
    for call in (lambda: pc.compress("zip"), lambda: C.by_name("zip"), lambda: C.topk(0.1, values="zip")):
        with pytest.raises(ValueError, match=f"'zip'.*{known}"):
            call()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: C.int8(0), "int8(block): expected a whole number from 1 on, got 0"),
        (lambda: C.int8(2.5), "int8(block): expected a whole number from 1 on, got 2.5"),
        (lambda: C.int4(-1), "int4(block)"),
        (lambda: C.int4(True), "int4(block)"),
        (lambda: C.fp8("256"), "fp8(block)"),
        (lambda: C.sign(12), "sign(block): expected a whole number from 1 on and a multiple of 8, got 12"),
        (lambda: C.ternary(6), "ternary(block): expected a whole number from 1 on and a multiple of 4, got 6"),
        (lambda: C.topk(0), "topk(ratio): expected a fraction above 0 and at most 1, got 0"),
        (lambda: C.topk(1.5), "topk(ratio)"),
        (lambda: C.topk(math.nan), "topk(ratio)"),
        (lambda: C.topk(True), "topk(ratio)"),
        (lambda: C.randk(-0.1), "randk(ratio)"),
        (lambda: C.randk("0.1"), "randk(ratio)"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_what_is_no_codec():
    with pytest.raises(TypeError, match="values: expected a codec or its name, got 3"):
        C.topk(0.1, values=3)
    with pytest.raises(TypeError, match=re.escape("compress(codec): expected a name")):
        pc.compress(3)


def test_a_packet_of_another_size_than_promised_is_an_error():
    with pytest.raises(pc.PipelineError, match=r"packed 3 numbers.*wire_bytes promises 6"):
        pc.simulate(pc.chain(pc.compress(_Liar()), pc.all_gather_avg()), [torch.ones(3)] * 2)


class _Liar(type(C.bf16())):  # type: ignore[misc]
    """Promises another size than it packs."""

    def encode(self, x: Tensor, key: C.Key) -> Tensor:
        return super().encode(x, key)[:-1]
