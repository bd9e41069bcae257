"""Names of scalars by which a step says what its update did to a few weights, looked at in turns; only where there is news.

Shapes:     name -> one float64 a step
Thread:     any; data alone
"""

from __future__ import annotations

from fp8watch_agent.training_names import OPTIMIZER

GRADIENTS_LEFT = f"{OPTIMIZER}gradients_left"
"""Gradients that the optimizer had used and nobody had cleared when a backward added to them, of those that were looked at."""

GRADIENTS_KEPT = f"{OPTIMIZER}gradients_kept"
"""Gradients that were looked at for that."""

STEPPED_AGAIN = f"{OPTIMIZER}stepped_again"
"""1 where the optimizer stepped on gradients on which it had stepped, behind the step before this one."""

UPDATES_LOOKED = f"{OPTIMIZER}updates_looked"
"""Weights whose last update was looked at; the names below are of these."""

UPDATE_TIMES = f"{OPTIMIZER}update_times"
"""How many times as far weights moved as Adam's moments and rate say; only where that is not about 1, and nearly all agree."""

REPEATED = f"{OPTIMIZER}gradients_repeated"
"""Those whose gradient is that of the step before, times a number, while others have another one."""

COARSE = f"{OPTIMIZER}weights_coarse"
"""Those whose last bits are 0 in every element that the update has moved."""

COARSE_BITS = f"{OPTIMIZER}weight_bits"
"""Bits of the significand that those hold, the first among them: 8 is bfloat16, 11 is float16."""

UPDATES_LOST = f"{OPTIMIZER}updates_lost"
"""Share of their elements with a gradient that the update has not moved."""

SHRINK = f"{OPTIMIZER}weights_shrink"
"""By which share the median weight shrank along itself in one step."""

SHRINKING = f"{OPTIMIZER}weights_shrinking"
"""Weights that shrank."""

DECAY = f"{OPTIMIZER}decay"
"""By which share weight decay is to shrink a weight in one step: learning rate times decay, of the first group."""

ASTRAY = f"{OPTIMIZER}update_astray"
"""Share of what moved one weight that does not go against its moment, or its gradient, while that of all others does."""

RATE_TIMES = f"{OPTIMIZER}rate_times"
"""How many times its share of the other groups' rate the rate of some parameters is since this step."""

RATE_PARAMETERS = f"{OPTIMIZER}rate_parameters"
"""How many parameters."""

OF = f"{OPTIMIZER}of/"
"""Before the name of the first parameter that one of these is about: 1."""

WHICH = f"{OPTIMIZER}which/"
"""Before REPEATED, COARSE or ASTRAY without its beginning: which of the weights looked at is the first; not sent."""

RECOMPUTED = "recompute_differs/"
"""Before the name of an operand whose recomputation is not what the first pass had: ‖again − first‖/‖first‖ of a sample."""

GRADIENT_APART = f"{OPTIMIZER}gradient_apart/"
"""Before the name of a parameter whose gradient arrived at the optimizer otherwise than backward gave it, after it had arrived as
given: how far off it is, up to a number, as a share of its norm."""

GRADIENTS_FLUSHED = f"{OPTIMIZER}gradients_flushed"
"""Share of its elements that arrived as 0 and were not given as 0; the largest of those that are named."""

GRADIENTS_OTHER = f"{OPTIMIZER}gradients_other"
"""Parameters whose gradient arrives otherwise than backward gives it from the first look on, so far."""

GRADIENTS_NORMAL = f"{OPTIMIZER}gradients_normal"
"""How many of those that are named differ by what is distributed as normal noise, alike where gradients are small and large."""

GRADIENTS_FEW = f"{OPTIMIZER}gradients_few"
"""How many of those that are named have too few elements to say so."""

GRADIENT_CUT_OFF = f"{OPTIMIZER}gradient_cut_off/"
"""Before the name of a parameter of whose gradient nothing small is left, where at an earlier look less than half of it was 0: which share
of a sample is 0."""

GRADIENT_OF = f"{OPTIMIZER}gradient_of/"
"""Before the name of a parameter whose gradient several processes share: how many. What follows is of a sample of it. Where these are
not all processes of the run, `GROUP` and the first of them stand behind the name."""

GROUP = "@"
"""Between the name of a parameter and the first of the processes that share it."""

SKETCH_NUMBERS = 8
"""Products with random signs of a gradient that is shared."""

GRADIENT_GIVEN = f"{OPTIMIZER}gradient_given/"
"""Before 0 … SKETCH_NUMBERS − 1: those of what backward added up in this process; over all processes they add up to those of the sum."""

GRADIENT_GOT = f"{OPTIMIZER}gradient_got/"
"""Before the same: those of what the optimizer of this process got; none where another process has these elements."""

SKETCHES = (GRADIENT_OF, GRADIENT_GIVEN, GRADIENT_GOT)
"""Begin the names of one sketch. They are for who holds the sum against what arrived, and are not kept."""
