"""What is broken on purpose in names that real trainings got wrong."""

from __future__ import annotations

from support.planted import Bug

NAMED = "tests/detect/test_names_of_real_trainings.py"
CORRUPTION = "families.corruption:Corruption"

NAMES = [
    Bug(
        "a scale that moves now is not frozen",
        "delayed:Delayed._judge_frozen",
        "        self._unanswered[seen & ~same] = False  # what moves has answered\n",
        "",
        f"{NAMED}::test_a_scale_that_moves_in_the_step_that_is_judged_is_not_frozen",
    ),
    Bug(
        "an outlier that no scale carries is not the history's",
        "delayed:Delayed.observe",
        "            settled &= ~outlier\n",
        "            settled &= True\n",
        f"{NAMED}::test_an_outlier_beyond_what_any_one_scale_carries_is_no_matter_of_the_history",
    ),
    Bug(
        "a weight that grows step by step is not corrupted",
        f"{CORRUPTION}.observe",
        "        leap &= ~reason & ~goes_on\n",
        "        leap &= ~reason\n",
        f"{NAMED}::test_a_weight_that_grows_step_by_step_is_no_flipped_bit",
    ),
    Bug(
        "growth in each step is told by its third",
        f"{CORRUPTION}.observe",
        "            found.append(self._growth(ctx, grown, amax))\n",
        "            pass\n",
        f"{NAMED}::test_a_weight_that_grows_step_by_step_is_no_flipped_bit",
    ),
    Bug(
        "a leap that waits keeps its step",
        f"{CORRUPTION}._settled",
        '"began": held.step, ',
        "",
        f"{NAMED}::test_a_weight_that_leaps_once_is_corrupted_from_the_step_of_its_leap",
    ),
    Bug(
        "a leap that waits is not lost to a NaN",
        f"{CORRUPTION}.cut_off",
        "        return [f for f in (held, first) if f is not None]\n",
        "        return [f for f in (first,) if f is not None]\n",
        f"{NAMED}::test_a_leap_that_waits_is_told_when_values_break_behind_it",
    ),
    Bug(
        "an onset that was seen is not moved",
        "finding:Finding.latest",
        'self.onset if self.extra.get("seen") else latest',
        "latest",
        f"{NAMED}::test_a_leap_that_waits_is_told_when_values_break_behind_it",
    ),
    Bug(
        "a quantiser bears what it bore when it was looked at",
        "outlier:Outliers._catches_up",
        " & self._bore)",
        " & ctx.health_known & ~np.isnan(ctx.now.sqnr_db))",
        f"{NAMED}::test_a_weight_that_began_at_zero_catches_up_between_samples_too",
    ),
    Bug(
        "an embedding that leaps is named",
        "context:Context.leaping",
        "(self.inputs() | (table.role == OUTPUT))",
        "self.inputs()",
        f"{NAMED}::test_an_embedding_that_leaps_is_named_and_fp8_is_not",
    ),
    Bug(
        "what comes before every GEMM leaps by less",
        "step_view:SiteTable._fill",
        "(self.order < first)",
        "(self.order > first)",
        f"{NAMED}::test_an_embedding_that_leaps_is_named_and_fp8_is_not",
    ),
    Bug(
        "logits make no input leap",
        "precedence:explains",
        'root not in ("bad-batch", "attention-logit-growth")',
        'root not in ("bad-batch",)',
        f"{NAMED}::test_an_input_that_leaps_makes_the_logits_leap_and_not_the_other_way_round",
    ),
    Bug(
        "an eps above every amax is told",
        "chronic_quantization_noise.clamped:Clamped.observe",
        "(unused >= UNUSED_OCTAVES)",
        "(unused >= 64)",
        f"{NAMED}::test_an_eps_above_every_amax_is_told_before_its_noise_is_seen",
    ),
    Bug(
        "wrong outputs own the NaN behind them",
        "precedence",
        '"silent-data-corruption", "nan-in-activation", "nan-in-loss"}',
        '"silent-data-corruption"}',
        f"{NAMED}::test_outputs_that_are_finite_and_wrong_own_the_nan_behind_them",
    ),
    Bug(
        "of dgrad and wgrad the one that broke is named",
        "kernel_output:_which_gemm",
        '    return {"gemm": "wgrad" if',
        '    return {"gemm": "dgrad" if',
        f"{NAMED}::test_of_a_gradient_that_two_gemms_read_the_one_is_named_that_broke",
    ),
]
