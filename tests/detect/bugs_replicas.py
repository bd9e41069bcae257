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
]
