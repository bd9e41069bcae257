"""What is broken on purpose in what is told of tails of weights, of small elements, and of rows that are alike."""

from __future__ import annotations

from support.planted import Bug

TAIL = "tests/detect/test_weight_tail.py"
HEAVIER = f"{TAIL}::test_a_tail_that_got_heavier_is_an_outlier"
SMALL = "tests/detect/test_small_elements.py"
ELSE = f"{SMALL}::test_what_else_becomes_zero_is_a_warning_as_ever"
ROOM = "gain:of_one_size"
ONE = "tests/detect/test_gain.py::test_values_of_one_size_are_rounded_alike"
GAIN = "tests/detect/test_gain.py::test_rows_that_are_alike_are_rounded_alike"
SPREAD = "chronic_quantization_noise.small_elements:spread"
OBSERVE = "chronic_quantization_noise.detector:Noise.observe"
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
    Bug(
        "small elements beside many are information",
        OBSERVE,
        "loud = hit & ~small & ",
        "loud = hit & ",
        f"{SMALL}::test_what_an_activation_leaves_of_negative_values_is_information",
    ),
    Bug("owners of tiles by the kurtosis", SPREAD, " & (now.log2_kurtosis <= math.log2(SPREAD_KURTOSIS))", "", ELSE),
    Bug("owners of some tiles by the energy", SPREAD, "(amax**2 * num_tiles <= energy) & ", "", ELSE),
    Bug("tiles that an eps clamps", SPREAD, ' & (now.column("num_eps_tiles") == 0)', "", ELSE),
    Bug("a scale that nobody measured", SPREAD, '(now.column("scale_ratio_min") >= OWN_SCALE) & ', "", ELSE),
    Bug("noise of the operand as a whole", SPREAD, " & (whole_db >= band)", "", ELSE),
    Bug(
        "one scale a tensor",
        SPREAD,
        " & ~table.per_tensor",
        "",
        f"{SMALL}::test_one_scale_for_the_whole_tensor_excuses_nothing",
    ),
    Bug("weights", SPREAD, " & (table.role == INPUT)", "", f"{SMALL}::test_a_weight_is_excused_nothing"),
    Bug("rows that are alike", "gain:allowed", "np.clip(alike, limit, ", "np.clip(limit, limit, ", GAIN),
    Bug("truncation of rows that are alike", "gain:allowed", "ALIKE_MOST * limit", "1.0", GAIN),
    Bug("weights have no rows that are alike", "gain:allowed", "now.table.role == INPUT", "now.table.role >= 0", GAIN),
    Bug("values of one size", "gain:beyond", ", chance), room)", ", chance), 0.0 * room)", ONE),
    Bug("values of one size are known by their moments", "gain", "ONE_SIZE = 0.65\n", "ONE_SIZE = 0.0\n", ONE),
    Bug("truncation of values of one size", ROOM, "step**2 / 4 /", "step**2 /", ONE),
    Bug("owners of tiles have errors of their own", ROOM, "np.minimum(1.0, ALIKE_SIGMA / np.sqrt(tiles))", "1.0", ONE),
    Bug("tiles that are alike", ROOM, "np.where(alike, 1.0, ", "np.where(alike, 0.0, ", ONE),
    Bug(
        "half a step is the most",
        ROOM,
        "step / 2 / (1.0 + step / 2)",
        "1.0",
        "tests/detect/test_gain.py::test_no_rounding_is_further_off_than_half_a_step",
    ),
    Bug(
        "values of one size are no quantiser's",
        "gain:rescaled",
        "e5m2, limit, room)",
        "e5m2, limit)",
        "tests/detect/test_gain.py::test_no_rounding_is_further_off_than_half_a_step",
    ),
    Bug(
        "the steps of E5M2",
        ROOM,
        "COARSER * STEP, STEP",
        "STEP, STEP",
        "tests/detect/test_gain.py::test_the_room_of_values_of_one_size_holds_for_codes_of_both_formats",
    ),
]
