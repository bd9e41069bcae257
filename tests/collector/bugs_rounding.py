"""What is broken on purpose in how light records are rounded, and the test that sees it: a promise a line."""

from __future__ import annotations

from support.planted import Bug

R = "tests/store/test_light_rounding.py"
WITHIN = f"{R}::test_every_ratio_within_the_invariant_stays_within_it"
WRONG = f"{R}::test_a_record_that_counts_anything_wrong_or_is_full_keeps_every_bit"
NORMAL = f"{R}::test_what_is_no_normal_amax_keeps_every_bit"
LARGEST = f"{R}::test_the_smallest_amax_is_never_above_the_largest"
ANSWERS = f"{R}::test_answers_say_that_they_are_rounded_and_are_the_same_before_and_after_compaction[sqlite]"

ROUNDING = [
    Bug(
        "no ratio is rounded to its lower bound",
        "light_rounding:round_ratio",
        "np.where(ratios <= lowest, lowest, np.rint(ratios / step) * step)",
        "np.rint(ratios / step) * step",
        WITHIN,
    ),
    Bug(
        "a ratio above its bound keeps every bit",
        "light_rounding:round_ratio",
        "(ratios < np.float32(1))",
        "(ratios < np.float32(2))",
        f"{R}::test_a_ratio_outside_keeps_every_bit",
    ),
    Bug(
        "a ratio below its bound keeps every bit",
        "light_rounding:round_ratio",
        "(ratios > np.float32(0.5))",
        "(ratios > np.float32(0.25))",
        f"{R}::test_a_ratio_outside_keeps_every_bit",
    ),
    Bug(
        "the smallest amax keeps its scale",
        "light_rounding:round_smallest",
        "if turned.any():",
        "if False:",
        f"{R}::test_the_smallest_amax_keeps_its_side_of_where_its_scale_changes",
    ),
    Bug(
        "the smallest amax is never above the largest",
        "light_rounding:round_smallest",
        'np.minimum((down + cell).view("<f4"), largest)',
        '(down + cell).view("<f4")',
        LARGEST,
    ),
    Bug(
        "extremes that make no sense keep every bit",
        "light_rounding:round_smallest",
        " & (amax <= largest)",
        "",
        NORMAL,
    ),
    Bug(
        "a subnormal amax keeps every bit",
        "light_rounding:round_smallest",
        "(amax >= _SMALLEST_NORMAL)",
        "(amax > 0)",
        NORMAL,
    ),
    Bug(
        "a record that counts anything wrong keeps every bit",
        "light_rounding:_in_order",
        "else values[index] == 0",
        "else values[index] >= 0",
        WRONG,
    ),
    Bug(
        "a full record keeps every bit",
        "light_rounding:_in_order",
        "(values[index] & _FULL) == 0",
        "values[index] >= 0",
        WRONG,
    ),
    Bug(
        "all counts of a record must be in order",
        "light_rounding:_in_order",
        "may & fine",
        "may | fine",
        WRONG,
    ),
    Bug(
        "sheets are rounded as hot batches are",
        "compact:compact",
        "        round_light(sent_now.columns, sent_now.columns, slice(None))\n",
        "",
        ANSWERS,
    ),
    Bug(
        "hot batches are rounded as sheets are",
        "hot_batches:parts_of",
        "    if rounded:\n",
        "    if False:\n",
        ANSWERS,
    ),
    Bug(
        "answers say that a field is rounded",
        "store.fields:SeriesField.said",
        " if within else {}",
        " if within > 1 else {}",
        ANSWERS,
    ),
]
