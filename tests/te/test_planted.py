"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.planted import Bug, all_fit, seen_to_fail

T = "tests/te/test_turns.py"
OBSERVER = "tests/te/test_observer.py"
UNREAD = "tests/te/test_unread.py"
BUGS = [
    Bug("codes are held against the operand", "te_turns:TeTurns.operand",
        'if recipe in ("delayed", "nvfp4") or not', "if True or not",
        f"{T}::test_codes_of_a_gradient_that_are_all_zero_are_counted_there"),
    Bug("dgrad reads the weight the other way round", "te_turns:TeTurns.gemm",
        'elif layout == "NN":', 'elif layout == "none":', f"{T}::test_a_healthy_module_is_looked_at_whole_and_silent"),
    Bug("wgrad contracts over tokens", "te_turns:TeTurns.gemm",
        "left, right = _turned(left), _turned(right)", "pass", f"{T}::test_a_healthy_module_is_looked_at_whole_and_silent"),
    Bug("a product has a row of its own", "te_products:products_of",
        "rows.get((name, operand, direction))", 'rows.get((name, _TOLD_AT[layout][0], "rowwise"))',
        f"{T}::test_a_product_that_is_wrong_is_wrong_in_its_own_row"),
    Bug("dgrad's copy of a weight is held against the weight", "transformer_engine:TeObserver._look_at_copy",
        "if turns is None or not", "if True or not",
        f"{T}::test_the_transposed_copy_of_a_weight_is_held_against_the_weight"),
    Bug("what a GEMM returns is looked at", "transformer_engine:TeObserver._made",
        'if not how.get("accumulate"):', "if False:", f"{T}::test_a_product_that_is_not_finite_is_counted_where_it_was_born"),
    Bug("of experts each product is looked at", "te_products:products_of",
        'if te.kind == "GroupedLinear":', 'if te.kind == "GroupedLinear":\n        return []',
        f"{T}::test_each_expert_has_its_products_looked_at_and_one_without_tokens_its_weight_gradient"),
    Bug("one scale a tensor is no block of 16", "te_modules:recipe_of",
        "if is_nvfp4(tensor):", "if 16 in tile:",
        f"{UNREAD}::test_one_scale_a_tensor_is_told_by_itself_whatever_the_shape"),
    Bug("an observer that ends blinds no other", "te_seams:Seams.put_back",
        "if current.show is not None:", "if False:", f"{OBSERVER}::test_observers_end_in_any_order"),
    Bug("what ended beneath another is let go of", "te_seams:Seams.put_back",
        "last.original = current.original", "pass", f"{OBSERVER}::test_observers_end_in_any_order"),
    Bug("somebody else's wrapper is not taken away", "te_seams:Seams.put_back",
        "while isinstance(current, Seam):", "setattr(module, name, seam.original)\n            while isinstance(current, Seam):",
        f"{OBSERVER}::test_what_somebody_else_has_wrapped_since_stays"),
    Bug("AMD's own formats are not taken for others", "te_tensors:_is_fnuz",
        '.startswith("gfx94")', '.startswith("none")',
        f"{UNREAD}::test_amds_own_formats_are_not_read_by_the_names_of_others"),
    Bug("a weight gradient behind the backward is named", "te_modules:without_sites",
        "if delays_wgrad(module):", "if False:",
        f"{OBSERVER}::test_a_weight_gradient_that_is_computed_behind_the_backward_is_named"),
]  # fmt: skip


def test_what_is_broken_on_purpose_still_fits_the_code() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_seen(tree: Path, bug: Bug) -> None:
    seen_to_fail(tree, bug)
