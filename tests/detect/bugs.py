"""What is broken on purpose in detection, and the test that sees it: a mode a line."""

from __future__ import annotations

from detect.bugs_apart import OF_APART
from detect.bugs_batches import OF_BATCHES, OF_TRAINING
from detect.bugs_causes import CAUSES
from detect.bugs_engine import ENGINE, REPORTS
from detect.bugs_graver import OF_DELAYED, OF_GRAVER, OF_NORM, OF_PLACES
from detect.bugs_names import NAMES
from detect.bugs_overflows import OVERFLOWS
from detect.bugs_ranks import OF_RANKS
from detect.bugs_replicas import OF_REPLICAS
from detect.bugs_seen import SEEN_TO_BE_WRONG
from detect.bugs_spread import OF_SPREAD
from detect.bugs_told import TOLD_BY_CAUSE
from detect.bugs_updates import OF_UPDATES
from support.planted import Bug

D = "server/fp8watch_server/detect"
T = "tests/detect"


def _scenario(name: str) -> str:
    return f"{T}/test_scenarios.py::test_a_medium_fault_is_named_at_its_place[{name}]"


def _mild(name: str) -> str:
    return f"{T}/test_scenarios.py::test_mild_and_severe_faults_are_named_at_their_place[{name}-mild]"


MODES = [
    Bug(
        "quantiser-fault",
        "quantiser_fault.detector:_kinds",
        "wrong |= checked & (view.raw(name) > 0)",
        "pass",
        _scenario("quantiser-fault"),
    ),
    Bug(
        "an operand under 3 dB is destroyed",
        "quantiser_fault.detector:_destroyed",
        "tile_sqnr_db(view) < limit_db",
        "tile_sqnr_db(view) < -limit_db",
        f"{T}/test_modes.py::test_an_operand_under_three_decibels_is_destroyed_not_noisy",
    ),
    Bug(
        "a lasting bias is told",
        "chronic_quantization_noise.detector:Noise.observe",
        "hit = chronic | fast | rounded | drop | biased",
        "hit = chronic | fast | rounded | drop",
        f"{T}/test_gain.py::test_a_lasting_bias_is_a_warning",
    ),
    Bug(
        "what comes out larger is the quantiser's, whatever its scale",
        "quantiser_fault.detector:_kinds",
        "| (judged & larger)",
        "",
        f"{T}/test_gain.py::test_scales_rounded_up_beside_codes_that_were_not_are_the_quantisers",
    ),
    Bug(
        "an operand under 3 dB is critical",
        "engine:DetectionEngine._with_context",
        'worse = found.severity == "warning" and destroyed',
        "worse = False",
        f"{T}/test_gain.py::test_an_operand_under_three_db_is_critical_whatever_explains_it",
    ),
    Bug(
        "a gain beyond rounding is the quantiser's",
        "quantiser_fault.detector:_kinds",
        "| rescaled * _RESCALED |",
        "|",
        f"{T}/test_gain.py::test_more_than_rounding_can_do_is_a_fault_of_the_quantiser_at_once",
    ),
    Bug(
        "what a few elements are rounded by is no bias",
        "gain:beyond",
        "np.maximum(np.maximum(np.where(e5m2, COARSER * limit, limit), chance), room)",
        "np.where(e5m2, COARSER * limit, limit)",
        f"{T}/test_gain.py::test_what_is_healthy_is_not_told",
    ),
    Bug(
        "nan-in-loss",
        "nonfinite:examine",
        "    if loss_broken and not len(forward):\n",
        "    if loss_broken and not len(broken):\n",
        _scenario("nan-in-loss"),
    ),
    Bug(
        "zero-tile-eps",
        "degenerate:degenerate",
        "bad = scale & ((low <= 0) | ~np.isfinite(low) | ~np.isfinite(high))",
        "bad = scale & (~np.isfinite(low) | ~np.isfinite(high))",
        _scenario("zero-tile-eps"),
    ),
    Bug(
        "dying-tile",
        "dying_tile.detector:Dying.observe",
        "slow = ctx.warm & (fallen > limit.dying_fall_octaves)",
        "slow = ctx.warm & (fallen > 100 * limit.dying_fall_octaves)",
        _scenario("dying-tile"),
    ),
    Bug(
        "a-smallest-tile-that-comes-back-is-dying",
        "dying_tile.detector:Dying.observe",
        "deep[deep] = ~(change >= RISE_OCTAVES).any(axis=1)",
        "deep[deep] = True",
        "tests/detect/test_faint_tiles.py::test_a_smallest_tile_that_comes_back_by_chance_is_not_dying[by-chance]",
    ),
    Bug(
        "a-smallest-tile-that-is-another-then-is-dying",
        "dying_tile.detector:Dying.observe",
        "falls & goes_on & ~(change >= SLOW_RISE_OCTAVES).any(axis=1)",
        "falls & goes_on",
        "tests/detect/test_faint_tiles.py::test_a_smallest_tile_that_falls_and_is_another_then_is_not_dying[by-chance]",
    ),
    Bug(
        "a-smallest-tile-that-settles-is-dying",
        "dying_tile.detector:Dying.observe",
        "falls & goes_on & ~",
        "falls & ~",
        "tests/detect/test_faint_tiles.py::test_gradients_that_settle_behind_a_change_of_the_data_are_not_dying",
    ),
    Bug(
        "chance-is-not-waited-for",
        "dying_tile.detector:Dying.observe",
        "& (self._recent.count >= KNOWN)",
        "",
        "tests/detect/test_faint_tiles.py::test_a_smallest_tile_that_comes_back_by_chance_is_not_dying[by-chance]",
    ),
    Bug(
        "dead-layer",
        "dead_layer.detector:DeadLayers.observe",
        "hit = self._latch.update(far | (low & inputs & gradients), named, now.step)",
        "hit = self._latch.update(far & ~far, named, now.step)",
        _scenario("dead-layer"),
    ),
    Bug(
        "delayed-clip",
        "delayed:Delayed.observe",
        "hit = settled & ctx.warm & ((depth > clip_limit) | (damaged & forward))\n",
        "hit = settled & ctx.warm & damaged & forward\n",
        f"{T}/test_scenarios.py::test_clips_that_come_again_are_told_though_none_of_them_did_harm",
    ),
    Bug(
        "a single clip that did harm",
        "delayed:Delayed.observe",
        "            sure |= settled & ctx.warm & forward & both\n",
        "",
        f"{T}/test_scenarios.py::test_a_single_clip_is_told_by_its_depth_or_by_its_damage_too",
    ),
    Bug(
        "frozen-scale",
        "delayed:Delayed._judge_frozen",
        "        hit = settled & same & (num_same >= limit.frozen_steps) & (under_clip | deaf)\n",
        "        hit = settled & same & (num_same > SAME_WINDOW) & (under_clip | deaf)\n",
        _scenario("frozen-scale"),
    ),
    Bug(
        "stale-weight-scale",
        "invariant:examine",
        "    weights = rest & (role == WEIGHT)\n",
        "    weights = rest & (role == WEIGHT) & (view.values('scale_ratio_max') > 1.5)\n",
        _scenario("stale-weight-scale"),
    ),
    Bug(
        "gradient-underflow",
        "gradient_underflow.detector:Underflow.observe",
        '            harmed = dropped | (ctx.now.column("num_eps_tiles") > 0)\n',
        "            harmed = dropped\n",
        _scenario("gradient-underflow"),
    ),
    Bug(
        "gradient-underflow by the invariant",
        "invariant",
        "UNDERFLOW_RATIO = 0.25\n",
        "UNDERFLOW_RATIO = 0.001\n",
        f"{T}/test_modes.py::test_gradients_with_the_scale_of_something_larger_underflow",
    ),
    Bug(
        "scale-rounding",
        "invariant:examine",
        "    if len(roles_up) >= 2:\n",
        "    if len(roles_up) >= 9:\n",
        _scenario("scale-rounding"),
    ),
    Bug(
        "recipe-mismatch",
        "engine:DetectionEngine.add_sites",
        "        self._registry.add_sites(self._table.sites, news)\n",
        "        self._registry.add_sites({}, news)\n",
        _scenario("recipe-mismatch"),
    ),
    Bug(
        "outlier-growth",
        "outlier:Outliers._growing_weights",
        "            grown = known & (over > need) & (monotone >= MONOTONE)\n",
        "            grown = known & (over > 10 * need) & (monotone >= MONOTONE)\n",
        _mild("outlier-growth"),
    ),
    Bug(
        "attention-logit-growth",
        "families.attention_logits:AttentionLogits._is_over",
        "return ctx.warm and value > limit.attention_logit_floor and slope",
        "return value < 0 and slope",
        f"{T}/test_attention_logits.py::test_growth_that_lasts_is_told_before_the_limit",
    ),
    Bug(
        "logits of a young model grow in health",
        "families.attention_logits:AttentionLogits._slope",
        "        return slope if slope > young else 0.0\n",
        "        return slope\n",
        f"{T}/test_attention_logits.py::test_a_young_model_whose_logits_rise_and_level_off_is_silent",
    ),
    Bug(
        "logits that rise with the learning rate warn nobody",
        "families.attention_logits:AttentionLogits._judge",
        "            if not ctx.warm:\n",
        "            if not value:\n",
        f"{T}/test_attention_logits.py::test_logits_that_rise_with_the_learning_rate_are_information_and_then_the_usual",
    ),
    Bug(
        "of faint tiles only those of an operand that is well are information",
        "chronic_quantization_noise.detector:Noise.observe",
        "(whole_db >= band) & (has",
        "(has",
        f"{T}/test_faint_tiles.py::test_what_else_is_lost_is_a_warning_as_ever[noisy-as-a-whole]",
    ),
    Bug(
        "faint tiles excuse no more noise than they can hold",
        "chronic_quantization_noise.faint_parts:FaintParts.explain",
        " & (self._others_db >= band[self.rows])",
        "",
        f"{T}/test_faint_tiles.py::test_what_else_is_lost_is_a_warning_as_ever[too-few-tiles]",
    ),
    Bug(
        "faint elements excuse no more zeros than they are",
        "chronic_quantization_noise.faint_parts:FaintParts.explain",
        " & ~flushed",
        "",
        f"{T}/test_faint_tiles.py::test_what_else_is_lost_is_a_warning_as_ever[too-few-elements]",
    ),
    Bug(
        "gradients of faint tokens excuse nothing",
        "chronic_quantization_noise.detector:Noise.observe",
        " & (now.table.role == INPUT)\n",
        "\n",
        f"{T}/test_faint_tiles.py::test_a_gradient_with_faint_tokens_is_excused_nothing",
    ),
    Bug(
        "across faint tiles those that are noisy themselves are a warning",
        "chronic_quantization_noise.detector:Noise.observe",
        " & ~(noisy & ~self._faint)",
        "",
        f"{T}/test_faint_tiles.py::test_across_them_the_same_elements_become_zero_in_tiles_that_are_well[20.0-warning]",
    ),
    Bug(
        "a gradient that is clipped less than its limit wakes nobody",
        "delayed:Delayed._clip_finding",
        "backward = now.clip_depth > ctx.limit.clip_depth_grad_output",
        "backward = now.clip_depth > 0",
        f"{T}/test_scenarios.py::test_a_gradient_that_is_clipped_less_than_its_limit_wakes_nobody[grad_output-2.5-warning]",
    ),
    Bug(
        "a level of logits is no growth",
        "families.attention_logits:AttentionLogits._is_over",
        "was <= limit.attention_logit_warning or value > GREW * was",
        "True",
        f"{T}/test_attention_logits.py::test_what_was_above_the_limit_when_it_was_attached_is_no_growth_until_it_doubles",
    ),
    Bug(
        "a young model may pass the first limit and come back",
        "families.attention_logits:AttentionLogits._is_over",
        "            if ctx.warm and (ctx.now.step < YOUNG_STEPS or not known)",
        "            if ctx.warm and not known",
        f"{T}/test_attention_logits.py::test_a_young_model_may_pass_the_first_limit_and_come_back",
    ),
    Bug(
        "a jump past the limit warns a young model as well",
        "families.attention_logits:AttentionLogits._is_over",
        "not (jumped or slope > 0)",
        "not slope > 0",
        f"{T}/test_attention_logits.py::test_crossing_the_limit_after_the_warm_up_warns_at_once",
    ),
    Bug(
        "attention-logit-growth as a bound",
        "outlier:Outliers._q_and_k",
        "if len(parents[parent]) == 2]] = True",
        "if len(parents[parent]) == 3]] = True",
        _scenario("attention-logit-bound"),
    ),
    Bug(
        "optimizer-divergence",
        "optimizer_divergence.detector:Divergence._judge",
        "        over = np.count_nonzero(growing) >= limit.divergence_layers * np.count_nonzero(moving)\n",
        "        over = np.count_nonzero(growing) > np.count_nonzero(moving)\n",
        _scenario("optimizer-divergence"),
    ),
    Bug(
        "growth across weights that something else wrote",
        "optimizer_divergence.detector:Divergence.observe",
        "            self._steps = []\n            self._amax.forget()\n",
        "            pass\n",
        "tests/detect/test_divergence.py::test_growth_across_weights_that_something_else_wrote_is_none_of_the_optimizers",
    ),
    Bug(
        "what writes weights all the time is part of the updates",
        "optimizer_divergence.detector:Divergence._notice_written",
        "last is None or self._num_steps - last > GROWTH_STEPS",
        "True",
        "tests/detect/test_divergence.py::test_growth_across_weights_that_something_else_wrote_is_none_of_the_optimizers",
    ),
    Bug(
        "bad-batch",
        "loss_jump:LossJumps._begins",
        "        far = max(ctx.limit.loss_jump_sigma",
        "        far = 99 * max(ctx.limit.loss_jump_sigma",
        _scenario("bad-batch"),
    ),
    Bug(
        "silent-data-corruption",
        "families.corruption:Corruption.observe",
        "        few = np.count_nonzero(moves) <= max(1, FEW * np.count_nonzero(known))\n",
        "        few = np.count_nonzero(moves) > 1\n",
        _scenario("silent-data-corruption"),
    ),
    Bug(
        "a weight that stays while all others leap",
        "families.corruption:Corruption.observe",
        "known & (np.abs(move - usual) > need) & (apart_from_all > need)",
        "known & (apart_from_all > need)",
        "tests/detect/test_divergence.py::test_a_weight_that_stays_where_it_is_while_all_others_leap_is_not_corrupted",
    ),
    Bug(
        "after a jump of the LR all weights scatter",
        "families.corruption:_apart_from_all",
        "SIGMA * MAD_TO_SIGMA * float(",
        "0.01 * MAD_TO_SIGMA * float(",
        "tests/detect/test_divergence.py::test_after_a_jump_of_the_lr_no_weight_is_called_corrupted",
    ),
    Bug(
        "silent-data-corruption by the hash",
        "replica_consistency:_differing",
        "both & (columns[at] != columns[at[0]]).any(axis=0)",
        "both & (columns[at] != columns[at[0]]).all(axis=0)",
        _scenario("corruption-by-hash"),
    ),
    Bug(
        "accumulator-precision",
        "kernel_output:wrong_outputs",
        "        noisy = has & ~scaled & (error > limit.gemm_error)\n",
        "        noisy = has & scaled & (error > limit.gemm_error)\n",
        _scenario("accumulator-precision"),
    ),
    Bug(
        "inf-laundering",
        "nonfinite:examine",
        "    laundered = bool(view.infinite[first]) and not loss_broken and view.role[first] != OUTPUT\n",
        "    laundered = False\n",
        _scenario("inf-laundering"),
    ),
    Bug(
        "sensitive-layer-quantized",
        "sensitive_layer_quantized.detector:sensitive",
        "        if what is not None:\n            hit.append((site, what))\n",
        "        if what is not None and site.operand == 'weight':\n            hit.append((site, what))\n",
        _scenario("sensitive-layer-quantized"),
    ),
    Bug(
        "the role that the session says of a module counts more than its name",
        "sensitive_layer_quantized.detector:sensitive",
        "told.get(pattern(site.module)) or role_of(site.module)",
        "role_of(site.module)",
        "tests/detect/test_reports.py::test_the_gate_of_an_mlp_is_no_router_where_the_session_says_so",
    ),
    Bug(
        "GEMMs that nobody observes are suspected",
        "unobserved:with_unobserved",
        "    suspects = [name for name in names if name not in seen and _lies_in(name, inside)]\n",
        "    suspects: list[str] = []\n",
        "tests/detect/test_reports.py::test_a_nan_behind_experts_that_nobody_observes_may_be_theirs",
    ),
    Bug(
        "GEMMs that ran elsewhere are not suspected",
        "unobserved:with_unobserved",
        "    suspects = [name for name in names if name not in seen and _lies_in(name, inside)]\n",
        "    suspects = names\n",
        "tests/detect/test_reports.py::test_a_nan_between_two_sites_of_one_mlp_is_not_of_experts_elsewhere",
    ),
    Bug(
        "kernel-output-fault",
        "kernel_output:faulty_outputs",
        "            made = view.facts(int(i)).gemm in READS and",
        "            made = view.facts(int(i)).gemm not in READS and",
        _scenario("kernel-output-fault"),
    ),
    Bug(
        "what a router made of what was finite is its own",
        "families.nonfinite:_given_finite",
        "bool(given) and not view.nonfinite[given].any()",
        "False",
        "tests/detect/test_reports.py::test_what_a_router_made_of_what_was_finite_is_its_own",
    ),
    Bug(
        "what entered a head was not made by its GEMM",
        "kernel_output:faulty_outputs",
        " and not num_entered(view, int(i))",
        "",
        "tests/detect/test_reports.py::test_what_entered_a_head_was_not_made_by_its_gemm[came-in]",
    ),
    Bug(
        "cross-rank-disagreement",
        "scale_agreement:_compared",
        "both & (high != low)",
        "both & (high > 9 * low)",
        _scenario("cross-rank-disagreement"),
    ),
    Bug(
        "chronic-quantization-noise",
        "chronic_quantization_noise.detector:Noise.observe",
        "            noisy = self._lasting(now.sqnr_db < band, now)",
        "            noisy = self._lasting(now.sqnr_db < band / 2, now)",
        _scenario("chronic-quantization-noise"),
    ),
    Bug(
        "scale-collapse",
        "scale_collapse.detector:Collapse._fall",
        "        return np.where(enough & steady & ~leap, fallen, np.nan)\n",
        "        return np.where(enough & steady & leap, fallen, np.nan)\n",
        _scenario("scale-collapse"),
    ),
    Bug(
        "scale-collapse of a GradScaler",
        "scale_collapse.overflows:Overflows._judge",
        "len(self._halvings) >= limit.collapse_halvings",
        "len(self._halvings) >= 10 * limit.collapse_halvings",
        _scenario("loss-scale-collapse"),
    ),
    Bug(
        "nan-in-activation",
        "nonfinite:examine",
        "    named = weights if len(weights) else broken\n",
        "    named = weights if len(weights) else broken[::-1]\n",
        _scenario("nan-in-activation"),
    ),
]

BUGS = [
    *MODES,
    *REPORTS,
    *ENGINE,
    *CAUSES,
    *SEEN_TO_BE_WRONG,
    *NAMES,
    *OF_BATCHES,
    *OF_TRAINING,
    *TOLD_BY_CAUSE,
    *OF_UPDATES,
    *OF_REPLICAS,
    *OF_SPREAD,
    *OF_APART,
    *OVERFLOWS,
    *OF_DELAYED,
    *OF_GRAVER,
    *OF_NORM,
    *OF_PLACES,
    *OF_RANKS,
]
