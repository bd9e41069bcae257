"""Compressed bodies, inflated with bounded memory: zstd, and gzip for those who have no zstd.

Upstream:   fp8watch_agent.wire    Downstream: fp8watch_agent.record
Shapes:     bytes -> at most MAX_INFLATED_BYTES bytes
Thread:     any; pure

zstandard's one-shot decompress ignores its own limit where a frame declares a size, so both formats are read in pieces.
"""

from __future__ import annotations

import zlib

import zstandard

MAX_INFLATED_BYTES = 64 << 20
MAX_WINDOW_BYTES = 8 << 20
GZIP_MAGIC = b"\x1f\x8b"
_PIECE_BYTES = 1 << 20


class WireError(ValueError):
    """A body that is not a batch. `column` names the part that is wrong; the text says value, rule and remedy."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(f"{column}: {message}")
        self.column = column


class TooLarge(WireError):
    """A body that inflates past its limit."""


def decompress(body: bytes, max_bytes: int = MAX_INFLATED_BYTES) -> bytes:
    """Inflate a zstd frame (or a gzip stream) with bounded memory. No declared size is believed: it is read in pieces.

    Raises:
        WireError: neither, truncated, larger than `max_bytes`, or a window above MAX_WINDOW_BYTES.
    """
    if body[:2] == GZIP_MAGIC:
        return _gunzip(body, max_bytes)
    out = bytearray()
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(body)
        while piece := reader.read(_PIECE_BYTES):
            out += piece
            if len(out) > max_bytes:
                raise TooLarge("body", f"inflates to more than {max_bytes} bytes; send smaller batches")
        params = zstandard.get_frame_parameters(body)
    except zstandard.ZstdError as e:
        raise WireError("body", f"not a zstd frame ({e}); send Content-Encoding: zstd") from e
    declared = params.content_size
    if declared not in (zstandard.CONTENTSIZE_UNKNOWN, len(out)):
        raise WireError("body", f"zstd frame declares {declared} bytes and holds {len(out)}; it was cut or padded")
    return bytes(out)


def _gunzip(body: bytes, max_bytes: int) -> bytes:
    out, reader = bytearray(), zlib.decompressobj(wbits=31)
    try:
        piece = body
        while piece and not reader.eof:
            out += reader.decompress(piece, _PIECE_BYTES)
            piece = reader.unconsumed_tail
            if len(out) > max_bytes:
                raise TooLarge("body", f"inflates to more than {max_bytes} bytes; send smaller batches")
        out += reader.flush()
        if len(out) <= max_bytes and reader.eof and not reader.unused_data:
            return bytes(out)
    except zlib.error as e:
        raise WireError("body", f"not a gzip stream ({e}); send Content-Encoding: zstd") from e
    raise WireError("body", "gzip stream was cut, or something lies behind its end")
