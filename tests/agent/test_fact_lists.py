"""A list of modules in a fact holds whole items, and says how many had no room."""

from __future__ import annotations

import pytest

from fp8watch_agent.fact_lists import MAX_FACT_CHARS, joined, without_number

ITEM = "layers.{}.self_attn.q_proj (filter_fn)"


@pytest.mark.parametrize("num", [0, 1, 40, 51, 52, 128, 2000])
def test_what_has_no_room_is_counted(num: int) -> None:
    items = [ITEM.format(i) for i in range(num)]
    text = joined(iter(items))
    named, more = without_number(text)
    assert len(text) <= MAX_FACT_CHARS
    kept = named.split("; ") if named else []
    assert kept == items[: len(kept)]
    assert len(kept) + more == num
    assert not more or len(text) + len("; ") + len(ITEM.format(num)) > MAX_FACT_CHARS - len(str(num))


def test_an_item_that_is_too_long_is_counted_alone() -> None:
    assert joined(["x" * MAX_FACT_CHARS]) == "x" * MAX_FACT_CHARS
    assert joined(["x" * (MAX_FACT_CHARS + 1)]) == "and 1 more"
    assert without_number("and 1 more") == ("", 1)


def test_a_name_is_no_number() -> None:
    for text in ("", "a (r)", "sand 3 more", "a (r); and 3 more of them"):
        assert without_number(text) == (text, 0)
