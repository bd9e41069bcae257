"""Bounded in-memory queue of tile maps on their way to the sender.

Thread:     one producer (training), one consumer (sender)
"""

from __future__ import annotations

from collections import deque

from fp8watch_agent.record import TileMap
from fp8watch_agent.wire_maps import MAX_TILES

MAX_QUEUE_BYTES = 16 << 20
BYTES_PER_TILE = 2 + 4 + 1 + 2 + 2


def map_bytes(tile_map: TileMap) -> int:
    return tile_map.shape[0] * tile_map.shape[1] * BYTES_PER_TILE


class MapQueue:
    """Bounded by bytes; the oldest maps are dropped, and counted. Whoever pops a map accounts for it."""

    def __init__(self, max_bytes: int = MAX_QUEUE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._maps: deque[TileMap] = deque()
        # each written by one side only
        self.pushed = 0
        self._pushed_bytes = 0
        self.too_large = 0
        self.dropped = 0
        self._dropped_bytes = 0
        self._claimed_bytes = 0

    def push(self, tile_map: TileMap) -> None:
        """Producer. A map that no collector takes is dropped here."""
        if tile_map.shape[0] * tile_map.shape[1] > MAX_TILES:
            self.pushed += 1
            self.too_large += 1
            return
        size = map_bytes(tile_map)
        while self._maps and self._pushed_bytes - self._dropped_bytes - self._claimed_bytes + size > self._max_bytes:
            try:
                gone = self._maps.popleft()
            except IndexError:
                break
            self.dropped += 1
            self._dropped_bytes += map_bytes(gone)
        self.pushed += 1
        self._pushed_bytes += size
        self._maps.append(tile_map)

    def claim(self, max_bytes: int) -> list[TileMap]:
        """Consumer: the oldest maps, up to `max_bytes`, or one that is larger: it may be refused, and alone then."""
        out: list[TileMap] = []
        taken = 0
        try:
            while taken < max_bytes:
                try:
                    out.append(self._maps.popleft())
                except IndexError:
                    break
                size = map_bytes(out[-1])
                if taken and taken + size > max_bytes:
                    self._maps.appendleft(out.pop())
                    break
                taken += size
        except Exception:
            self._maps.extendleft(reversed(out))  # over the limit: they wait for the next claim
            raise
        self._claimed_bytes += taken
        return out

    def __len__(self) -> int:
        return len(self._maps)
