"""What is broken on purpose in who is a replica of whom."""

from __future__ import annotations

from support.planted import Bug

_T = "tests/detect/test_no_replicas.py"
_ONE = f"{_T}::test_ranks_that_get_no_gradients_of_each_other_are_one_information"
_AT_LAST = f"{_T}::test_ranks_that_share_gradients_at_last_must_agree_from_then_on"
_WITHIN = f"{_T}::test_a_weight_that_differs_within_a_part_is_told_with_the_rank_and_the_steps"
_EQUAL = f"{_T}::test_weights_that_something_else_keeps_equal_must_agree"
_WHOSE = f"{_T}::test_who_got_whose_gradients"
_ALIKE = f"{_T}::test_gradients_that_are_alike_or_0_do_not_tell_whose_they_are"
_SHARED = "tests/detect/test_shared_scales.py"
_KNOWN = f"{_T}::test_a_rank_that_is_not_known_and_a_new_session_are_of_one_part"

OF_REPLICAS = [
    Bug(
        "ranks that get no gradients of each other",
        "replica_consistency:Agreement.observe",
        "self._parts.observe(now)",
        "pass",
        _ONE,
    ),
    Bug(
        "ranks that are no replicas are told once",
        "replica_consistency:Agreement._hashes",
        "self._told_parts = True",
        "pass",
        _ONE,
    ),
    Bug(
        "a weight that differs within a part",
        "replica_consistency:Agreement._hashes",
        "for group in groups:",
        "for group in groups if len(groups) == 1 else []:",
        _WITHIN,
    ),
    Bug(
        "where a part agreed last",
        "replica_consistency:Agreement._hashes",
        "                agreed &= both & ~differ",
        "                self._agreed_at[both & ~differ] = now.step",
        _WITHIN,
    ),
    Bug(
        "weights that are kept equal without gradients",
        "replica_consistency:Agreement._hashes",
        "                    groups = [whole]",
        "                    pass",
        _EQUAL,
    ),
    Bug(
        "how weights of parts that were kept equal agreed last",
        "replica_consistency:Agreement._hashes",
        "if len(groups) == len(whole):",
        "if False:",
        _EQUAL,
    ),
    Bug(
        "weights that are equal behind each average",
        "replica_consistency:Agreement._are_kept_equal",
        "self._num_differed += int(np.count_nonzero(differ))",
        "pass",
        _ONE,
    ),
    Bug(
        "gradients that were shared once",
        "gradient_sketches:GradientParts.observe",
        "if of in joined:",
        "if False:",
        _AT_LAST,
    ),
    Bug(
        "a part got the sum of its own gradients",
        "gradient_sketches:parts_of",
        "apart(said.got[first], said.given[part].sum(axis=0)) > SAME",
        "False",
        _WHOSE,
    ),
    Bug(
        "a rank that is left out is no part",
        "gradient_sketches:parts_of",
        "if len({len(part) for part in parts.values()}) > 1:",
        "if False:",
        _WHOSE,
    ),
    Bug(
        "gradients that are alike",
        "gradient_sketches:parts_of",
        "np.triu(_apart_of_each(said.given) < DIFFERENT, 1).any()",
        "False",
        _ALIKE,
    ),
    Bug(
        "gradients of zeros",
        "gradient_sketches:parts_of",
        "not (said.given.any(axis=1).all() and said.got.any(axis=1).all())",
        "False",
        _ALIKE,
    ),
    Bug(
        "a rank whose gradients are not known",
        "gradient_sketches:GradientParts.split",
        "if any(rank not in self._part for rank in ranks):",
        "if False:",
        _KNOWN,
    ),
    Bug(
        "weights that are kept equal no more",
        "replica_consistency:Agreement._are_kept_equal",
        "most or self._kept_equal",
        "most",
        f"{_T}::test_weights_that_something_else_kept_equal_and_does_no_more_stay_told",
    ),
    Bug(
        "a first look that tells nothing",
        "gradient_sketches:GradientParts.waits",
        "self._num_waited < WAIT_STEPS",
        "False",
        f"{_T}::test_a_first_look_that_tells_nothing_makes_no_page",
    ),
    Bug(
        "looks that never tell anything",
        "gradient_sketches",
        "WAIT_STEPS = 16\n",
        "WAIT_STEPS = 10**9\n",
        f"{_T}::test_where_no_look_ever_tells_weights_that_differ_are_told_all_the_same",
    ),
    Bug(
        "no replicas in the next attempt either",
        "replica_consistency:Agreement.session",
        "self._kept_equal = self._told_parts = False",
        "self._kept_equal = False",
        f"{_T}::test_ranks_that_are_no_replicas_in_the_next_attempt_either_are_told_again",
    ),
    Bug(
        "which rank is named",
        "replica_consistency:Agreement._hashes",
        "sorted(sorted(ranks[i] for i in group) for group in groups)",
        "[[ranks[i] for i in group] for group in groups]",
        f"{_T}::test_which_rank_is_named_does_not_hang_on_who_came_first",
    ),
    Bug("sessions that begin anew", "gradient_sketches:GradientParts.forget", "self._part.clear()", "", _KNOWN),
    Bug(
        "ranks of one declared group",
        "scale_agreement:_declared",
        "_parted(over) if len(part) > 1]",
        "_parted(over) if len(part) > 9]",
        f"{_SHARED}::test_ranks_of_one_group_must_agree_from_the_first_step_on",
    ),
    Bug(
        "a group is held against the mesh",
        "scale_agreement:_declared",
        "if len({over[int(i)] for i in p}) > 1]",
        "if False]",
        f"{_SHARED}::test_a_group_that_leaves_tensor_parallel_ranks_apart_is_named_with_its_ranks_and_the_axis",
    ),
    Bug(
        "a group is of delayed scales",
        "scale_agreement:ScaleAgreement.observe",
        "has &= ~now.table.current_scaling[None, :]",
        "pass",
        f"{_SHARED}::test_a_group_is_held_against_delayed_scales_alone",
    ),
    Bug(
        "scales are learned along an axis",
        "scale_agreement:_along",
        "for axis in axes if len(axes) > 1 else []:",
        "for axis in []:",
        f"{_SHARED}::test_what_ranks_had_in_common_along_an_axis_they_must_keep",
    ),
    Bug(
        "ranks of the group that differs along an axis",
        "scale_agreement:ScaleAgreement._as_learned",
        "order[group_of[order] == np.unique(group_of)[which]]",
        "order",
        f"{_SHARED}::test_what_ranks_had_in_common_along_an_axis_they_must_keep",
    ),
    Bug(
        "scales that agreed a few times",
        "scale_agreement:ScaleAgreement._as_learned",
        "must = agreed >= LEARN_STEPS",
        "must = agreed >= 0",
        f"{_SHARED}::test_ranks_that_never_shared_their_amax_are_not_compared",
    ),
    Bug(
        "ranks that hold a site",
        "scale_agreement:_compared",
        "both = np.add.reduceat(there.astype(np.int64), first, axis=0) >= 2",
        "both = np.logical_and.reduceat(there, first, axis=0)",
        f"{_SHARED}::test_of_a_stage_of_a_pipeline_those_ranks_are_compared_that_hold_the_site",
    ),
    Bug(
        "a rank that is not there teaches nothing",
        "scale_agreement:ScaleAgreement._as_learned",
        "moved = (held == self._num_holders) & (largest != self._last)",
        "moved = largest != self._last",
        f"{_SHARED}::test_a_rank_that_is_not_there_teaches_nothing",
    ),
    Bug(
        "scales of a new session are learned anew",
        "replica_consistency:Agreement.session",
        "            self._scales = ScaleAgreement()\n",
        "            pass\n",
        f"{_SHARED}::test_a_new_session_learns_anew",
    ),
]
