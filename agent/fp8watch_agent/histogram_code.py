"""Histograms of the wire: counts as u8 codes of an eighth of an octave, and their differences along a site.

Shapes:     counts [N, buckets] <-> codes u8 [N, buckets] <-> one byte string
Thread:     sender (pack), collector (unpack); pure
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.bounded_decompress import WireError
from fp8watch_agent.site_major import SiteMajor, unzigzag, zigzag

Array = npt.NDArray[Any]

_CODES = np.rint(8.0 * np.log2(1.0 + np.arange(1 << 15))).astype(np.uint8)
"""Codes of small counts: a lookup is faster than a logarithm."""
_COUNTS = np.exp2(np.arange(256) / 8.0) - 1.0
_STRIDES = (0, 1, 5)
"""Candidate strides between the first records of sites: none, the other direction, the same operand one Linear earlier."""
_SAMPLE_RECORDS = 64


def encode_histogram(counts: Array) -> npt.NDArray[np.uint8]:
    """Counts -> u8 codes round(8·log2(1 + count)); 255 stands for 2^31.9 and above."""
    counts = np.ascontiguousarray(counts)
    if counts.dtype.kind == "f":  # decoded ones
        return np.minimum(np.rint(8.0 * np.log2(1.0 + np.maximum(counts, 0))), 255).astype(np.uint8)
    codes = np.take(_CODES, counts, mode="clip")
    large = np.flatnonzero(counts >= len(_CODES))
    if len(large):
        exact = np.minimum(np.rint(8.0 * np.log2(1.0 + counts.reshape(-1)[large])), 255)
        codes.reshape(-1)[large] = exact.astype(np.uint8)
    return codes


def decode_histogram(codes: Array) -> npt.NDArray[np.float64]:
    """u8 codes -> counts, within 4.4 % (half a code step of 2^(1/8)); 0 is exact."""
    return _COUNTS[codes]


def pack_live(codes: npt.NDArray[np.uint8], order: SiteMajor) -> bytes:
    """Buckets that a site ever uses: a bit a bucket and site, then those buckets of each first record, then differences.

    Args:
        codes: [N, B], of the records in their order.
        order: where they lie.
    """
    codes = codes[order.index]
    live = np.bitwise_or.reduceat(codes, np.flatnonzero(order.first), axis=0) != 0
    first, rest = codes[order.first], zigzag(codes[1:] - codes[:-1], 8)[~order.first[1:]]
    of_rest = live[order.site[~order.first]]
    return b"".join((np.packbits(live, axis=1).tobytes(), first[live].tobytes(), rest[of_rest].tobytes()))


def live_buckets(name: str, raw: bytes, num_buckets: int, order: SiteMajor) -> npt.NDArray[np.bool_]:
    """Which buckets each site uses, [sites, B].

    Raises:
        WireError: not as many bytes as these bits say.
    """
    head = order.num_first * num_buckets // 8
    if len(raw) < head:
        raise WireError(name, f"{len(raw)} bytes; {order.num_first} sites take {head} for the bits of their buckets")
    bits = np.unpackbits(np.frombuffer(raw, "u1", count=head))
    live: npt.NDArray[np.bool_] = bits.view(bool).reshape(order.num_first, num_buckets)
    want = head + int(np.bincount(order.site, minlength=order.num_first) @ live.sum(axis=1))
    if len(raw) != want:
        raise WireError(name, f"{len(raw)} bytes; the buckets in use take {want}")
    return live


def unpack_live(name: str, raw: bytes, num_buckets: int, order: SiteMajor) -> npt.NDArray[np.uint8]:
    """Inverse of `pack_live`: codes [N, B].

    Raises:
        WireError: not as many bytes as the bits say.
    """
    live = live_buckets(name, raw, num_buckets, order)
    of_rest = live[order.site[~order.first]]
    num_live = int(live.sum())
    values = np.frombuffer(raw, "u1", offset=live.size // 8)
    codes = np.zeros((len(order), num_buckets), "u1")
    rest, first = np.zeros((len(of_rest), num_buckets), "u1"), np.zeros((len(live), num_buckets), "u1")
    first[live], rest[of_rest] = values[:num_live], unzigzag(values[num_live:], 8)
    codes[order.first], codes[~order.first] = first, rest
    return _by_record(codes, order)


def best_stride(codes: npt.NDArray[np.uint8], order: SiteMajor, compressor: Any) -> int:
    """Stride between first records with which their codes take the fewest bytes, by compressing some of them."""
    sample = codes[order.index[order.first][:_SAMPLE_RECORDS]]
    if len(sample) < _SAMPLE_RECORDS:
        return 0
    sizes = {s: len(compressor.compress(_strided(sample, s).tobytes())) for s in _STRIDES}
    return min(sizes, key=lambda s: (sizes[s], s))


def _strided(codes: Array, stride: int) -> Array:
    if not 0 < stride < len(codes):
        return codes
    out = codes.copy()
    out[stride:] -= codes[:-stride]
    return out


def pack_dense(codes: npt.NDArray[np.uint8], order: SiteMajor, stride: int) -> bytes:
    """All buckets: of first records the difference from the one `stride` before, then of the others along the site."""
    codes = codes[order.index]
    rest = (codes[1:] - codes[:-1])[~order.first[1:]]
    return b"".join((_strided(codes[order.first], stride).tobytes(), rest.tobytes()))


def unpack_dense(raw: bytes, num_buckets: int, order: SiteMajor, stride: int) -> npt.NDArray[np.uint8]:
    """Inverse of `pack_dense`; the length has been checked. [N, B]"""
    values = np.frombuffer(raw, "u1").reshape(-1, num_buckets)
    first = values[: order.num_first].copy()
    if 0 < stride < len(first):
        for lane in range(stride):
            np.cumsum(first[lane::stride], axis=0, dtype=np.uint8, out=first[lane::stride])
    codes = np.empty((len(order), num_buckets), "u1")
    codes[order.first], codes[~order.first] = first, values[order.num_first :]
    return _by_record(codes, order)


def _by_record(codes: Array, order: SiteMajor) -> npt.NDArray[np.uint8]:
    out = np.zeros((1, order.num_records, codes.shape[1]), "u1")
    order.put(order.sums(codes[None]), out)
    return np.asarray(out[0])
