# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernel for XXH3 checksums of many KV blocks in GPU memory, equal to the xxhash library's.

It computes the 64-bit XXH3 without a seed, equal to the xxhash library's on a CPU (algorithm for inputs over 240 bytes:
Collet, "xxHash fast digest algorithm", version 0.8). The accumulators are scrambled once a KiB, but what a KiB adds to
them does not depend on their state. So all programs compute those sums in parallel; only the scrambling, 64 bytes per
KiB, is sequential."""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from xxhash import xxh3_64_intdigest

MIN_BYTES = 241
KIB = 1024
"""Bytes of a KiB."""
WORDS, LANES, STRIPES = 128, 8, 16
"""8-byte words of a KiB: 16 stripes of one word for each of the 8 accumulators."""
KIBS = 4
"""Number of KiBs that a program takes."""
MASK = (1 << 64) - 1
PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
AVALANCHE = 0x165667919E3779F9
"""Multiplier of XXH3's avalanche."""
START = (PRIME32[2], *PRIME64[:4], PRIME32[1], PRIME64[4], PRIME32[0])
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""Secret of the algorithm, 192 bytes."""
LAST_STRIPE, SCRAMBLE, MERGE = len(SECRET) - 71, len(SECRET) - 64, 11
"""Offsets of the secret's parts."""


@triton.jit
def _stripes(words, secret, stripes, live):
    """Return the addends of the accumulators by stripes [n, 1] of 8 words, where `live`: int64 [8]."""
    lanes = tl.arange(0, 8)[None, :]
    data = tl.load(words + stripes * 8 + lanes, mask=live, other=0)
    swapped = tl.load(words + stripes * 8 + (lanes ^ 1), mask=live, other=0)
    key = data ^ tl.load(secret + stripes % 16 + lanes)
    product = (key & 0xFFFFFFFF) * ((key >> 32) & 0xFFFFFFFF)
    return tl.sum(tl.where(live, product, 0) + swapped, 0)


@triton.jit(do_not_specialize=["stripes"])
def sums_kernel(blocks, secret, sums, stripes, kibs, KIBS: tl.constexpr):
    """Program (block, some of its KiBs): write each KiB's addends of the accumulators to sums [block, kib, 8]."""
    block = tl.program_id(0).to(tl.int64)
    words = tl.load(blocks + block).to(tl.pointer_type(tl.int64))
    for part in range(KIBS):
        kib = tl.program_id(1) * KIBS + part
        if kib < kibs:
            mine = (kib * 16 + tl.arange(0, 16))[:, None]
            added = _stripes(words, secret, mine, mine < stripes)
            tl.store(sums + (block * kibs + kib) * 8 + tl.arange(0, 8), added)


@triton.jit(do_not_specialize=["whole", "words"])
def scramble_kernel(blocks, secret, sums, out, whole, kibs, words):
    """Program (block): fold the sums of `whole` KiBs, the rest, and the last stripe once more into the digest.

    secret: int64 [40]: its words, those of the last stripe, and the accumulators' start."""
    block, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, 8)
    key, total = tl.load(secret + 16 + lanes), tl.load(secret + 32 + lanes)
    for kib in range(whole):
        total += tl.load(sums + (block * kibs + kib) * 8 + lanes)
        total = (total ^ ((total >> 47) & 0x1FFFF) ^ key) * 0x9E3779B1
    if whole < kibs:
        total += tl.load(sums + (block * kibs + whole) * 8 + lanes)
    start = tl.load(blocks + block).to(tl.pointer_type(tl.int64))
    data = tl.load(start + words - 8 + lanes)
    swapped = tl.load(start + words - 8 + (lanes ^ 1))
    key = data ^ tl.load(secret + 24 + lanes)
    total += (key & 0xFFFFFFFF) * ((key >> 32) & 0xFFFFFFFF) + swapped
    tl.store(out + block * 8 + lanes, total)


def digests(blocks: Sequence[torch.Tensor]) -> list[int]:
    """Return XXH3, 0 to 2^64 - 1, of each of the blocks: contiguous uint8 [bytes] of one size.

    Small blocks, and sizes that are not multiples of 8, are hashed on the host. Waits for the device's current
    stream."""
    size = blocks[0].numel()
    if size < MIN_BYTES or size % 8:
        return [xxh3_64_intdigest(block.cpu().numpy().data) for block in blocks]
    return [_merged([lane & MASK for lane in lanes], size) for lanes in accumulated(blocks).tolist()]


def accumulated(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the blocks' accumulators, int64 [blocks, 8]: the device's part of `digests`."""
    size, device = blocks[0].numel(), blocks[0].device
    stripes = (size - 1) // 64
    whole, kibs = (size - 1) // KIB, triton.cdiv(stripes, STRIPES)
    starts = torch.tensor([block.data_ptr() for block in blocks], dtype=torch.int64, device=device)
    secret = _secret(device)
    sums = torch.empty(len(blocks), kibs, LANES, dtype=torch.int64, device=device)
    out = torch.empty(len(blocks), LANES, dtype=torch.int64, device=device)
    sums_kernel[(len(blocks), triton.cdiv(kibs, KIBS))](starts, secret, sums, stripes, kibs, KIBS=KIBS, num_warps=4)
    scramble_kernel[(len(blocks),)](starts, secret, sums, out, whole, kibs, size // 8, num_warps=1)
    return out


def _merged(lanes: list[int], size: int) -> int:
    digest = size * PRIME64[0]
    for lane in range(0, LANES, 2):
        product = (lanes[lane] ^ _word(MERGE + 8 * lane)) * (lanes[lane + 1] ^ _word(MERGE + 8 * lane + 8))
        digest += (product & MASK) ^ (product >> 64)
    digest &= MASK
    digest = (digest ^ digest >> 37) * AVALANCHE & MASK
    return digest ^ digest >> 32


def _word(offset: int) -> int:
    """Return a word of the secret."""
    return int.from_bytes(SECRET[offset : offset + 8], "little")


@cache
def _secret(device: torch.device) -> torch.Tensor:
    """Return int64 [40], see `scramble_kernel`."""
    words = [_word(offset) for offset in (*range(0, 192, 8), *range(LAST_STRIPE, LAST_STRIPE + 64, 8))] + list(START)
    return torch.tensor([word - (word >> 63 << 64) for word in words], dtype=torch.int64, device=device)
