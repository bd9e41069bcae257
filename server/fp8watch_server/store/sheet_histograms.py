"""Histograms of many sites as few bytes: a lane is one bucket of one site, and lanes of like spread share a zstd frame.

Shapes:     codes u8 [N, buckets] of records sorted by site -> entry and payload of each part of the sites; and back
Thread:     compactor (pack), query pool (unpack)

A site uses few of the buckets, and the codes of a bucket stay within a band: its smallest is taken off. What is left is
noise of the width of that band, so lanes are put together by width, in classes of one octave; of class 0, where nothing is
left, nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_server.store.sheet_codec import Places, compress, decompress

Array = npt.NDArray[Any]


def pack_histogram(
    code: int, codes: npt.NDArray[np.uint8], places: Places, edges: Sequence[tuple[int, int]]
) -> list[tuple[list[Any], list[bytes]]]:
    """Entry [code, bits of the lanes in use, their minima and classes, sizes of the frames], and frames, of each part."""
    out: list[tuple[list[Any], list[bytes]]] = []
    for a, b in edges:
        first, last = int(places.starts[a]), int(places.ends[b - 1])
        of_part = Places(places.lengths[a:b])
        lanes = np.array(codes[first:last].T, order="C")  # [buckets, n], changed below
        starts = of_part.starts
        low = np.minimum.reduceat(lanes, starts, axis=1)
        total = np.add.reduceat(lanes, starts, axis=1, dtype=np.int64)
        live = total > 0
        if not live.any():
            out.append(([], []))
            continue
        mean = (total - low * of_part.lengths) / of_part.lengths
        of_class = np.ceil(np.log2(1.0 + mean)).astype(np.uint8)
        lanes -= np.repeat(low, of_part.lengths, axis=1)
        at = list(zip(starts.tolist(), of_part.ends.tolist(), strict=True))
        frames: dict[int, list[bytes]] = {}
        for bucket, site in np.argwhere(live & (of_class > 0)).tolist():
            start, end = at[site]
            frames.setdefault(int(of_class[bucket, site]), []).append(lanes[bucket, start:end].tobytes())
        payload = [compress(b"".join(frames[k])) for k in sorted(frames)]
        about = compress(np.packbits(live).tobytes() + low[live].tobytes() + of_class[live].tobytes())
        sizes = [[k, len(frame)] for k, frame in zip(sorted(frames), payload, strict=True)]
        out.append(([code, about, sizes], payload))
    return out


def unpack_histogram(
    body: bytes, entry: Sequence[Any], payload: int, num_buckets: int, places: Places, part: slice = slice(None)
) -> npt.NDArray[np.uint8]:
    """Codes [n, buckets] of the records of a slice, bucket by bucket in memory; its ends are those of sites."""
    first, last, _ = part.indices(places.n)
    _, about, sizes = entry
    num_sites = len(places.lengths)
    raw = np.frombuffer(decompress(about), np.uint8)
    num_bits = -(-num_buckets * num_sites // 8)
    live = np.unpackbits(raw[:num_bits], count=num_buckets * num_sites).view(bool).reshape(num_buckets, num_sites)
    num_live = int(live.sum())
    lows, classes = raw[num_bits : num_bits + num_live].tolist(), raw[num_bits + num_live :].tolist()
    frames: dict[int, bytes] = {}
    for k, size in sizes:
        frames[k] = decompress(body[payload : payload + size])
        payload += size
    at = dict.fromkeys(frames, 0)
    starts, ends = places.starts.tolist(), places.ends.tolist()
    lanes = np.zeros((num_buckets, last - first), np.uint8)
    for (bucket, site), low, of_class in zip(np.argwhere(live).tolist(), lows, classes, strict=True):
        start, end = starts[site], ends[site]
        here = first <= start and end <= last
        if here:
            lanes[bucket, start - first : end - first] = low
        if of_class:
            if here:
                values = np.frombuffer(frames[of_class], np.uint8, count=end - start, offset=at[of_class])
                lanes[bucket, start - first : end - first] += values
            at[of_class] += end - start
    return lanes.T


def payload_bytes(entry: Sequence[Any]) -> int:
    """Bytes of an entry's frames."""
    return sum(size for _, size in entry[2])
