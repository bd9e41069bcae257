"""A sender written from docs/wire.md alone: it imports nothing of the product, and reads its tables out of the page.

Numbers are Python's, one value at a time: slow, and in the page's own words.
"""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path
from typing import Any

import msgspec
import zstandard

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
BATCH_TYPE = "application/vnd.fp8watch.batch+msgpack"
MAPS_TYPE = "application/vnd.fp8watch.tile-maps+msgpack"


class Field:
    """A row of the table of fields."""

    def __init__(self, cells: list[str]) -> None:
        name, dtype, values, default, how, sampled = cells
        self.name, self.dtype, self.num_values = name.strip("`"), dtype.strip("`"), int(values)
        self.default, self.how = float(default), how
        self.bit = 0 if sampled == "–" else int(sampled)
        self.width = 24 if how == "24-bit words" else 8 if how == "histogram" else int(how.split("-")[0])


def table(name: str) -> list[list[str]]:
    part = PAGE.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


FIELDS = {f.name: f for f in map(Field, table("fields"))}
STEPS = {name.strip("`"): dtype.strip("`") for name, dtype, *_ in table("steps")}
_CODES = {
    "<f8": "d",
    "<f4": "f",
    "<i8": "q",
    "<i4": "i",
    "<u8": "Q",
    "<u4": "I",
    "<u2": "H",
    "|u1": "B",
    "|i1": "b",
    "u1": "B",
}


def site_id(module: str, operand: str, direction: str) -> int:
    digest = hashlib.blake2b(f"{module}\0{operand}\0{direction}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**53


def packed(dtype: str, values: list[Any]) -> bytes:
    return struct.pack(f"<{len(values)}{_CODES[dtype]}", *values)


def word_of(f: Field, value: float) -> int:
    """The unsigned word of a value; a float is given as its bits where those matter."""
    if f.how == "24-bit words":
        bits = int.from_bytes(struct.pack("<d", value), "little")
        rounded = (bits + 2**39) >> 40
        if math.isnan(value):
            return bits >> 40 | 1 << 11
        if math.isinf(value) or rounded & 0x7FF000 == 0x7FF000:
            return bits >> 40
        return rounded
    raw = packed(f.dtype, [value if "f" in f.dtype else int(value)])
    return int.from_bytes(raw, "little")


def smaller(difference: int, bits: int) -> int:
    """A difference mod 2^bits as 2d, or −2d − 1."""
    d = difference % 2**bits
    return 2 * d if d < 2 ** (bits - 1) else 2 * (2**bits - d) - 1


def expected_scale(amax_word: int) -> int:
    upper, lower = amax_word >> 23, amax_word & 0x7FFFFF
    return ((upper - 8 + (lower > 0x600000)) << 23) % 2**32


def planes(words: list[int], num: int) -> bytes:
    return b"".join(bytes(word >> 8 * k & 0xFF for word in words) for k in range(num))


class Batch:
    """Records of one session: `records[step][site]` maps fields to values (histograms to counts)."""

    def __init__(
        self, steps: list[dict[str, Any]], sites: list[int], records: dict[int, dict[int, dict[str, Any]]]
    ) -> None:
        self.steps, self.sites, self.records = steps, sites, records
        self.there = [[site in records[s["step"]] for site in sites] for s in steps]
        self.order: list[tuple[bool, dict[str, Any]]] = []  # site by site, by step; whether it is the first of its site
        for site in sites:
            of_site = [records[s["step"]][site] for s in steps if site in records[s["step"]]]
            self.order += [(i == 0, record) for i, record in enumerate(of_site)]

    def value(self, record: dict[str, Any], f: Field, k: int) -> float:
        given = record.get(f.name, f.default)
        return given[k] if isinstance(given, list | tuple) else given

    def column(self, f: Field, order: list[tuple[bool, dict[str, Any]]]) -> bytes | None:
        """The bytes of a field; None where all values are the default."""
        if f.how == "histogram":
            return self.histogram(f, order)
        words = [[word_of(f, self.value(record, f, k)) for _, record in order] for k in range(f.num_values)]
        if all(word == word_of(f, f.default) for of_value in words for word in of_value):
            return None
        amax = {"scale_inv_max": "amax_max", "scale_inv_min": "amax_min_nonzero"}.get(f.name)
        if amax is not None:
            of_amax = FIELDS[amax]
            for i, (_, record) in enumerate(order):
                amax_word = word_of(of_amax, self.value(record, of_amax, 0))
                words[0][i] = (words[0][i] - expected_scale(amax_word)) % 2**32
        sent = []
        for of_value in words:
            first = [w for w, (is_first, _) in zip(of_value, order, strict=True) if is_first]
            rest = [
                smaller(of_value[i] - of_value[i - 1], f.width) for i, (is_first, _) in enumerate(order) if not is_first
            ]
            sent.append(first + rest)
        num = max(1, *(-(-w.bit_length() // 8) for of_value in sent for w in of_value))
        return b"".join(planes(of_value, num) for of_value in sent)

    def histogram(self, f: Field, order: list[tuple[bool, dict[str, Any]]]) -> bytes | None:
        counts = [record.get(f.name, [0] * f.num_values) for _, record in order]
        codes = [[min(255, round(8 * math.log2(1 + c))) for c in of_record] for of_record in counts]
        if not any(map(any, codes)):
            return None
        firsts = [i for i, (is_first, _) in enumerate(order) if is_first]
        rest = [i for i, (is_first, _) in enumerate(order) if not is_first]
        if f.name == "depth_hist":  # depth_stride 0
            first = bytes(c for i in firsts for c in codes[i])
            return first + bytes((b - a) % 256 for i in rest for a, b in zip(codes[i - 1], codes[i], strict=True))
        live: dict[int, list[int]] = {}
        site_of = {}
        for i in range(len(order)):
            site_of[i] = i if order[i][0] else site_of[i - 1]
            of_site = live.setdefault(site_of[i], [0] * f.num_values)
            live[site_of[i]] = [int(a or c > 0) for a, c in zip(of_site, codes[i], strict=True)]
        bits = bytes(
            sum(bit << 7 - j for j, bit in enumerate(live[i][k : k + 8]))
            for i in firsts
            for k in range(0, f.num_values, 8)
        )
        used = {i: [k for k, bit in enumerate(live[site_of[i]]) if bit] for i in range(len(order))}
        first = bytes(codes[i][k] for i in firsts for k in used[i])
        return bits + first + bytes(smaller(codes[i][k] - codes[i - 1][k], 8) for i in rest for k in used[i])

    def body(self, header: dict[str, Any], *, sparse: int = 0) -> bytes:
        columns: dict[str, bytes] = {"site": packed("<u8", self.sites)}
        if not all(map(all, self.there)):
            bits = [b for row in self.there for b in row]
            bits += [False] * (-len(bits) % 8)
            columns["there"] = bytes(
                sum(b << 7 - j for j, b in enumerate(bits[i : i + 8])) for i in range(0, len(bits), 8)
            )
        constants = {}
        for f in FIELDS.values():
            order = self.order
            if f.bit & sparse:
                has = [(i, record) for i, (_, record) in enumerate(order) if record["measured"] & f.bit]
                site_of = [sum(is_first for is_first, _ in order[: i + 1]) for i, _ in has]
                order = [(k == 0 or site_of[k] != site_of[k - 1], record) for k, (_, record) in enumerate(has)]
            column = self.column(f, order) if order else None
            if column is None:
                continue
            values = (
                {tuple(word_of(f, self.value(r, f, k)) for k in range(f.num_values)) for _, r in order}
                if f.how != "histogram"
                else set()
            )
            if len(values) == 1:
                size = 4 if f.width == 24 else f.width // 8
                constants[f.name] = b"".join(w.to_bytes(size, "little") for w in values.pop())
            else:
                columns[f.name] = column
        num_records = len(self.order)
        steps = {name: packed(dtype, [s.get(name, 0) for s in self.steps]) for name, dtype in STEPS.items()}
        given = {"version": 3, "step0": self.steps[0]["step"], "num_steps": len(self.steps), "num_records": num_records}
        given |= {"per_step": len(self.sites), "sparse": sparse, **header}
        return compressed({"header": given, "steps": steps, "columns": columns, "constants": constants})


def compressed(body: dict[str, Any]) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(msgspec.msgpack.encode(body))


def tile_map_body(header: dict[str, Any], site: int, step: int, shape: tuple[int, int], exponents: list[int]) -> bytes:
    """One map, of which amax is 1 everywhere and scales are powers of two."""
    columns = {"site": packed("<u8", [site]), "step": packed("<i8", [step])}
    columns |= {"num_tile_rows": packed("<u4", [shape[0]]), "num_tile_columns": packed("<u4", [shape[1]])}
    columns |= {"amax": packed("<u2", [0x3F80] * len(exponents)), "scale_inv_e8m0": bytes(e + 127 for e in exponents)}
    return compressed({"header": {"version": 1, "num_maps": 1, **header}, "columns": columns})


def required_keys() -> list[set[str]]:
    """Keys that each registration requires, by the page: of a run, a session, a list of sites, a site."""
    part = PAGE.split("<!-- bodies -->\n")[1].split("<!-- /bodies -->")[0]
    tables = [t for t in part.split("\n\n") if t.startswith("|")]
    rows = [[row for row in t.splitlines() if "| required |" in row] for t in tables]
    return [{row.split("`")[1] for row in of_table} for of_table in rows]
