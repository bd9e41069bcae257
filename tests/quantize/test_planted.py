"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantize.backends import USABLE
from support.planted import Bug, all_fit, seen_to_fail

W = "tests/quantize/test_cpu_width.py"
INTO = "tests/quantize/test_into_slab.py"
P = "tests/quantize/test_cpu_paths.py"
C = "fp8watch/kernels/cpu_source"
BUGS = [
    Bug("a cache without room is passed over", "cpu_library:_obtain", "except OSError as error:", "except KeyError as error:",
        "tests/quantize/test_cpu_library.py::test_a_cache_without_room_is_passed_over"),
    Bug("a device on which no kernel runs is passed over", "triton:probe", "return _trial(str(device))", "return None",
        "tests/interpreter/test_probe.py::test_a_device_on_which_no_kernel_runs_is_passed_over_with_the_reason"),
    Bug("numbers of one dtype are put together", "host_copy:side_by_side", "alike.setdefault(one.dtype, [])", "alike.setdefault(name, [])",
        "tests/quantize/test_slab_copy.py::test_numbers_of_one_dtype_are_put_together_before_they_are_converted"),
    Bug("no number is copied to the device as a call is folded", "row_fold:sections",
        "whole((1,), math.prod(stats.shape), dtype=torch.int64)", "torch.tensor([math.prod(stats.shape)])",
        "tests/quantize/test_slab.py::test_no_number_is_copied_to_the_device"),
    Bug("NVFP4 is decoded on the device", "te_nvfp4:decoded", "code = torch.arange(16, device=codes.device)",
        "code = torch.tensor(range(16))", "tests/quantize/test_slab.py::test_four_bit_codes_are_decoded_on_the_device"),
    Bug("a tile is found by its columns", "row_fold:_places", "index % kt), dim=1)", "index - kt), dim=1)",
        "tests/quantize/test_slab.py::test_accumulating_is_merging_records"),
    Bug("the fastest width of vectors is compiled", "cpu_width:fastest_width",
        "width = min(times,", "width = max(times,",
        f"{W}::test_the_fastest_width_is_compiled_and_the_measurement_is_kept"),
    Bug("a measurement that fails costs the measurement only", "cpu_width:fastest_width",
        "except (Unavailable, OSError) as reason:", "except OSError as reason:",
        f"{W}::test_a_measurement_that_fails_leaves_the_widest_and_alarms_nobody"),
    Bug("a width that is asked for is taken", "cpu_width:fastest_width",
        'argument.startswith("-DVB=")', "False", f"{W}::test_a_width_that_is_asked_for_is_taken"),
    Bug("each call has memory of its own", "cpu_call:_Memory.take",
        "self.used + num_bytes\n        return start", "self.used\n        return start",
        f"{INTO}::test_what_was_measured_stays_while_it_is_held_whatever_comes_after"),
    Bug("what is prepared belongs to a dtype", "cpu_call:prepare",
        "job.prepared[x.shape, x.dtype, kinds] = made",
        "job.prepared.update({(x.shape, d, kinds): made for d in DTYPES})",
        f"{INTO}::test_operands_of_many_shapes_are_each_told_apart"),
    Bug("what is prepared is bounded", "cpu_call:prepare",
        "job.prepared.clear()", "pass", f"{INTO}::test_operands_of_many_shapes_are_each_told_apart"),
    Bug("the second direction is merged into its own row", "slab:Slab.into",
        "rows[-1] * ROW.itemsize", "rows[0] * ROW.itemsize",
        f"{INTO}::test_a_call_into_the_slab_is_quantising_and_accumulating"),
    Bug("sums have one order for every width", f"{C}/full.h",
        "sum + k % LANE_VECTORS", "sum", f"{P}::test_no_width_changes_a_bit_of_a_sum"),
    Bug("bfloat16 rounds ties to even", f"{C}/rounding.h",
        "shift_down(magnitude, r->drop) & splat_s(1)", "splat_s(0)", f"{P}::test_bfloat16_is_rounded_as_float32_is"),
    Bug("a subnormal code of bfloat16 is seen", f"{C}/operand.h",
        "return any_b((vb)some);", "return 0;", f"{P}::test_bfloat16_is_rounded_as_float32_is"),
    Bug("depths are counted beyond the first planes", f"{C}/depth.h",
        "for (int n = f->depth_carries++; n & 1;", "for (int n = f->depth_carries++; 0;",
        f"{P}::test_depths_of_every_octave_are_counted_apart"),
    Bug("planes that were read begin anew", f"{C}/depth.h",
        "        *d = depth_take(f);\n", "", f"{P}::test_depths_beyond_what_the_planes_hold_are_counted"),
    Bug("a result past the caches is written where it belongs", f"{C}/columns.h",
        "stream_b((uint8_t *)(out + i + k * VL)", "stream_b((uint8_t *)(out + i)", f"{P}::test_large_results_bypass_the_caches_unchanged"),
]  # fmt: skip


def test_every_planted_bug_still_fits() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.skipif("cpu" not in USABLE, reason="no C compiler here: set CC")
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_every_planted_bug_is_seen(tree: Path, bug: Bug) -> None:
    seen_to_fail(tree, bug)
