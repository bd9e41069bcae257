"""Decompression of zstd and gzip bodies with bounded memory.

Shapes:     bytes -> at most MAX_INFLATED_BYTES bytes
Thread:     any; pure

zstandard's one-shot decompress ignores its own limit when a frame declares a size, so both formats are read in chunks,
and an oversized body is rejected before any of it is kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import zstandard

MAX_INFLATED_BYTES = 64 << 20
MAX_WINDOW_BYTES = 8 << 20
GZIP_MAGIC = b"\x1f\x8b"
_PIECE_BYTES = 1 << 20


class WireError(ValueError):
    """A body that is not a valid batch. `column` names the wrong part; the text gives value, rule and remedy."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(f"{column}: {message}")
        self.column = column


class TooLarge(WireError):
    """A body that decompresses past its limit."""


def decompress(body: bytes, max_bytes: int = MAX_INFLATED_BYTES) -> bytes:
    """Decompress a zstd frame (or a gzip stream) with bounded memory.

    A frame that declares more than `max_bytes` is refused unread. One that declares no size is counted chunk by chunk
    first and kept only when it fits, so a refused body never takes more memory than one chunk.

    Raises:
        WireError: neither, truncated, larger than `max_bytes`, or a window above MAX_WINDOW_BYTES.
    """
    if body[:2] == GZIP_MAGIC:
        return _gunzip(body, max_bytes)
    try:
        size = zstandard.get_frame_parameters(body).content_size
        declared = size != zstandard.CONTENTSIZE_UNKNOWN
        if not declared:
            size = _counted(_unzstd(body), max_bytes)
        if size > max_bytes:
            raise _too_large(max_bytes)
        reader = _unzstd(body)
        out = reader.read(size) if size else b""
        behind = reader.read(1)  # a frame larger than it declares is refused here, or by zstd
    except zstandard.ZstdError as e:
        raise WireError("body", f"not a zstd frame ({e}); send Content-Encoding: zstd") from e
    if len(out) != size or behind:
        raise WireError("body", f"zstd frame declares {size} bytes and holds {len(out)}; it was cut or padded")
    return bytes(out)


def _unzstd(body: bytes) -> zstandard.ZstdDecompressionReader:
    return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(body)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge("body", f"inflates to more than {max_bytes} bytes; send smaller batches")


def _counted(reader: zstandard.ZstdDecompressionReader, max_bytes: int) -> int:
    """Decompressed size, without keeping the data; stops reading once past the limit."""
    piece, total = bytearray(_PIECE_BYTES), 0
    while total <= max_bytes and (got := reader.readinto(piece)):
        total += got
    return total


def _gunzip(body: bytes, max_bytes: int) -> bytes:
    try:
        if sum(map(len, _pieces(body, max_bytes))) > max_bytes:
            raise _too_large(max_bytes)
        return b"".join(_pieces(body, max_bytes))
    except zlib.error as e:
        raise WireError("body", f"not a gzip stream ({e}); send Content-Encoding: zstd") from e


def _pieces(body: bytes, max_bytes: int) -> Iterator[bytes]:
    """Chunks of a gzip stream, up to the one that exceeds the limit.

    Raises:
        WireError: it was cut, or something lies behind it.
    """
    reader, rest, total = zlib.decompressobj(wbits=31), body, 0
    while rest and not reader.eof and total <= max_bytes:
        piece = reader.decompress(rest, _PIECE_BYTES)
        total += len(piece)
        yield piece
        rest = reader.unconsumed_tail
    while not reader.eof and total <= max_bytes and (piece := reader.decompress(rest, _PIECE_BYTES)):
        total += len(piece)
        yield piece
        rest = reader.unconsumed_tail
    if total <= max_bytes and (not reader.eof or reader.unused_data):
        raise WireError("body", "gzip stream was cut, or something lies behind its end")
