"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.planted import Bug, all_fit, seen_to_fail

T = "tests/ao/test_float8_linear.py"
HEALTHY = f"{T}::test_it_computes_as_before_by_its_own_recipe_and_nothing_is_raised[tensorwise-dtype0]"
BUGS = [
    Bug("a cast is held against its operand", "torchao_casts:_watched",
        "if turn is not None:", "if False:", f"{T}::test_a_broken_cast_is_named_at_its_site"),
    Bug("torchao casts a weight the other way round", "torchao_casts:_show",
        "x, data, scale_inv = x.t(), data.t(), scale_inv.t()", "pass", HEALTHY),
    Bug("torchao keeps the scale, not its inverse", "torchao_casts:_show",
        "scale_inv = 1.0 / scale", "scale_inv = 1.0 * scale", HEALTHY),
    Bug("a row has a scale of its own", "torchao_casts:_show",
        "1 if rows == x.shape[0] and rows > 1 else x.shape[0]", "x.shape[0]",
        f"{T}::test_it_computes_as_before_by_its_own_recipe_and_nothing_is_raised[rowwise-dtype0]"),
]  # fmt: skip


def test_what_is_broken_on_purpose_still_fits_the_code() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_seen(tree: Path, bug: Bug) -> None:
    seen_to_fail(tree, bug)
