"""The page of the wire has the tables of the code, and its example is what it says.

`python tests/house/test_wire_page.py` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import inspect

from fp8watch_agent.column_words import SAMPLED
from fp8watch_agent.record import FIELDS, HISTOGRAMS, STEP, empty_rows, site_id
from fp8watch_agent.wire import Header, decode_batch, decompress, encode_batch, rows_of
from fp8watch_server.ingest.registration import RunBody, SessionBody, SiteBody, SitesBody

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
WRITE = "run python tests/house/test_wire_page.py to write it"

MEANINGS = {
    RunBody: {
        "name": "display name; the id where it is empty",
        "recipe": "blockwise, current, delayed, mxfp8, nvfp4, rowwise, observe, or a name of your own",
        "backend": "what quantises",
        "world_size": "ranks",
        "tags": "for people to find the run by; added to those it has",
    },
    SessionBody: {
        "rank": "of this process",
        "world_size": "ranks",
        "mesh": "axis (dp, tp, pp, ep, cp) → coordinate of this rank",
        "host": "name of the machine",
        "pid": "process id",
        "started_at": "seconds since 1970, by the clock of the process",
        "versions": "package → version",
        "recipe": "as of the run",
        "fingerprint": "of the effective configuration: a change is told",
        "backend": "as of the run",
        "facts": "anything else that decides how operands are quantised: changes are told",
    },
    SitesBody: {"session": "as registered", "sites": "a list of these:"},
    SiteBody: {
        "id": "as above",
        "module": "fully qualified name",
        "operand": "input, weight or grad_output; output: what a module returned",
        "direction": "rowwise or columnwise",
        "gemm": "fprop, dgrad or wgrad: the GEMM that reads it, or made an output; probe: none",
        "order": "place in the order of execution; input before weight before grad_output",
        "shape": "rows and columns of the operand",
        "tile": "rows and columns of a tile of it: [1, 128], [128, 128], [128, 1]",
        "format": "E4M3, E5M2 or E2M1; empty where nothing is quantised",
        "power_2_scale": "whether scales are powers of two",
        "eps": "amax below it counts as it",
        "recipe": "as of the run; probe: no quantiser reads it",
        "backend": "as of the run",
        "evidence": "group of fields → exact, derived or absent",
    },
    Header: {
        "run": "id",
        "session": "as registered",
        "rank": "that of the session",
        "seq": "from 0, one more with each body",
        "step0": "first step",
        "num_steps": "at most 65,536",
        "num_records": "at most 262,144",
        "clock": "when it was made, seconds since 1970",
        "version": "of this format: send 3",
        "health": "counts of the sender, see below",
        "logs": "name → one number or nil a step",
        "batch_ids": "name of the data of each step, or nil; empty: none",
        "per_step": "see below",
        "depth_stride": "see below",
        "sparse": "see below",
    },
}
TITLES = {
    RunBody: "`PUT /v1/runs/{run}`",
    SessionBody: "`PUT /v1/runs/{run}/sessions/{session}`",
    SitesBody: "`PUT /v1/runs/{run}/sites`",
}


def _type(t: Any) -> str:
    if isinstance(t, inspect.StrType):
        return "text" + (f", {t.min_length or 0} to {t.max_length} characters" if t.max_length else "")
    if isinstance(t, inspect.IntType):
        return "integer" + (f", {t.ge} to {_number(t.le)}" if t.le is not None else "")
    if isinstance(t, inspect.FloatType):
        return "number" + (f", {t.ge:g} or more" if t.ge is not None else "")
    if isinstance(t, inspect.DictType):
        return f"map of {_type(t.value_type)}"
    if isinstance(t, inspect.ListType):
        return "list" if isinstance(t.item_type, inspect.StructType) else f"list of {_type(t.item_type)}"
    if isinstance(t, inspect.TupleType):
        return f"[{_type(t.item_types[0])}; the same]"
    if isinstance(t, inspect.UnionType):
        return " or ".join(_type(one) for one in t.types)
    return {inspect.BoolType: "true or false", inspect.NoneType: "null"}[type(t)]


def _number(value: int) -> str:
    return f"2^{value.bit_length()} − 1" if value & (value + 1) == 0 else str(value)


def _struct(kind: type[Any]) -> list[str]:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    assert [f.name for f in info.fields] == list(MEANINGS[kind]), f"{kind.__name__}: each key has its meaning here"
    for f in info.fields:
        if f.required:
            default = "required"
        else:
            value = f.default_factory() if f.default is msgspec.NODEFAULT else f.default
            default = f"`{msgspec.json.encode(value).decode()}`"
        rows.append(f"| `{f.name}` | {_type(f.type)} | {default} | {MEANINGS[kind][f.name]} |")
    return rows


def bodies() -> str:
    out: list[str] = []
    for kind in (RunBody, SessionBody, SitesBody, SiteBody):
        out += ["", f"{TITLES[kind]}:", ""] if kind in TITLES else [""]
        out += _struct(kind)
    return "\n".join(out[1:])


def header() -> str:
    return "\n".join(_struct(Header))


def steps() -> str:
    names = {"step": "absolute", "status": "how it ended", "present": "which scalars were given"}
    names["time"] = "seconds since 1970, by the clock of the process"
    rows = [f"| `{name}` | `{STEP[name].str.lstrip('|')}` | {names.get(name, '')} |" for name in STEP.names or ()]
    return "\n".join(["| name | dtype | |", "|---|---|---|", *rows])


def fields() -> str:
    head = ["| field | dtype | values | default | on the wire | sampled |", "|---|---|---|---|---|---|"]
    for f in FIELDS:
        how = (
            "histogram"
            if f.name in HISTOGRAMS
            else "24-bit words"
            if f.dtype == "<f8"
            else f"{int(f.dtype[2]) * 8}-bit words"
        )
        dtype = "u1" if f.name in HISTOGRAMS else f.dtype
        head.append(f"| `{f.name}` | `{dtype}` | {f.size} | {f.default:g} | {how} | {SAMPLED.get(f.name, '–')} |")
    return "\n".join(head)


EXAMPLE_SITE = ("layers.0.fc1", "input", "rowwise")
EXAMPLE_STEPS, EXAMPLE_AMAX = [10, 11], [1.5, 2.0]


def example_body() -> bytes:
    rows = empty_rows(2)
    rows["measured"], rows["num_elements"], rows["num_tiles"] = 7, [1024, 1024], 8
    rows["amax_max"], rows["scale_inv_max"] = EXAMPLE_AMAX, [2.0**-8, 2.0**-6]
    rows["amax_hist"][0, 49], rows["amax_hist"][1, 50] = 8, 8
    made = np.zeros(2, dtype=STEP)
    made["step"], made["time"], made["loss"], made["present"] = EXAMPLE_STEPS, [1e9, 1e9 + 1], [2.5, 2.25], 1
    given = Header(run="r", session="s", rank=0, seq=0, step0=10, num_steps=2, num_records=2)
    site = np.full(2, site_id(*EXAMPLE_SITE), np.uint64)
    return decompress(encode_batch(given, made, np.array(EXAMPLE_STEPS), site, rows))


def example() -> str:
    text = example_body().hex()
    lines = "\n".join(text[i : i + 96] for i in range(0, len(text), 96))
    return f"""One site, `{"`, `".join(EXAMPLE_SITE)}`; steps 10 and 11 with loss 2.5 and 2.25. Both records have `measured` 7,
`num_elements` 1024 and `num_tiles` 8, which are constants; `amax_max` 1.5 and 2; `scale_inv_max` 2^-8 and 2^-6, where 2^-8 and
2^-7 follow from amax, so that the column holds the words 0 and 2 · 2^23; and 8 tiles in a bucket of `amax_hist`, 49 in the
first and 50 in the second. All else is at its default. In msgpack, before zstd:

```
{lines}
```"""


def ids() -> str:
    lines = [f"{site_id(*site)}  {' · '.join(site)}" for site in (EXAMPLE_SITE, ("lm_head", "weight", "columnwise"))]
    return "\n".join(["```", *lines, "```"])


PARTS: dict[str, Callable[[], str]] = {
    "site id": ids,
    "bodies": bodies,
    "header": header,
    "steps": steps,
    "fields": fields,
    "example": example,
}


@pytest.mark.parametrize("name", PARTS)
def test_the_page_has_what_the_code_has(name: str) -> None:
    written = PAGE.read_text().split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0]
    assert written == PARTS[name](), WRITE


def test_the_example_is_what_the_page_says_of_it() -> None:
    part = PAGE.read_text().split("<!-- example -->\n")[1].split("<!-- /example -->")[0]
    raw = bytes.fromhex("".join(re.findall(r"^[0-9a-f]{2,96}$", part, re.M)))
    batch = decode_batch(raw, compressed=False)
    assert [int(s) for s in batch.steps["step"]] == EXAMPLE_STEPS
    assert rows_of(batch)["amax_max"].tolist() == EXAMPLE_AMAX
    assert decode_batch(raw, compressed=False).site.tolist() == [site_id(*EXAMPLE_SITE)] * 2
    assert len(raw) < 700, "an example that can be read"
    body = msgspec.msgpack.decode(raw)
    assert set(body["constants"]) == {"measured", "num_elements", "num_tiles"}
    words = np.frombuffer(body["columns"]["scale_inv_max"], "u1").reshape(4, 2).T.copy().view("<u4")[:, 0]
    assert words.tolist() == [0, 2 << 23]


def write() -> None:
    text = PAGE.read_text()
    for name, part in PARTS.items():
        before, rest = text.split(f"<!-- {name} -->\n")
        after = rest.split(f"<!-- /{name} -->")[1]
        text = f"{before}<!-- {name} -->\n{part()}\n<!-- /{name} -->{after}"
    PAGE.write_text(text)


if __name__ == "__main__":
    write()
