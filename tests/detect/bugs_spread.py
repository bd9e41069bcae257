"""What is broken on purpose in what is told of tails of weights."""

from __future__ import annotations

from support.planted import Bug

TAIL = "tests/detect/test_weight_tail.py"
HEAVIER = f"{TAIL}::test_a_tail_that_got_heavier_is_an_outlier"
WEIGHTS = "outlier:Outliers._growing_weights"

OF_SPREAD = [
    Bug(
        "a weight that grows without a tail warns nobody",
        "outlier:Outliers.observe",
        "weights & heavier\n",
        "weights\n",
        f"{TAIL}::test_a_weight_that_grows_without_a_tail_is_information",
    ),
    Bug("a kurtosis that rose", WEIGHTS, "heavier |= hit & (", "heavier |= hit & 0 * (", f"{HEAVIER}[kurtosis-1]"),
    Bug("amax far beyond the rest of a weight", WEIGHTS, "> BEYOND_RMS * need", "> 99", f"{HEAVIER}[one-element-1]"),
    Bug("a tail that nobody measured", WEIGHTS, "np.isnan(rms) | ", "", f"{HEAVIER}[not-measured-1]"),
    Bug(
        "a sample from before the growth",
        "weight_tail:WeightTail.rms_growth",
        "np.where(self._at > since, gained, np.nan)",
        "gained",
        f"{TAIL}::test_energies_that_no_sample_has_yet_excuse_nothing",
    ),
    Bug(
        "a weight that grows far as one",
        "outlier:Outliers._together",
        "> TOGETHER_OCTAVES",
        "> 99",
        f"{TAIL}::test_a_weight_that_grows_eight_times_as_large_as_one_is_a_warning",
    ),
    Bug(
        "amax before is that of the growth that is told",
        "outlier:Outliers._weight_evidence",
        "ctx.now.log2_amax - octaves",
        "ctx.base.amax.median()",
        f"{TAIL}::test_both_ends_of_amax_are_as_far_apart_as_the_growth_that_is_told",
    ),
]
