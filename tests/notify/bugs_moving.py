"""What is broken on purpose in how notices of a run that is being moved wait, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

M = "tests/notify/test_moving.py"
HOLD = f"{M}::test_they_hold_up_no_other"
SILENCE = f"{M}::test_silence_of_a_run_that_moves_is_told_later_and_that_of_others_now"

MOVING = [
    Bug(
        "what is for everybody waits for its run",
        "fanout:fan_out",
        ', t.c.state == "pending", unfenced(t.c.run_id))',
        ', t.c.state == "pending")',
        HOLD,
    ),
    Bug(
        "nobody looks again and again for what waits for its run",
        "fanout:waits_for_all",
        ", unfenced(t.run_id))",
        ")",
        HOLD,
    ),
    Bug("what was never tried waits for its run", "group:_fresh", ", unfenced(t.run_id))", ")", HOLD),
    Bug("what was tried waits for its run", "outbox_lease:_due_again", ", unfenced(t.c.run_id))", ")", HOLD),
    Bug(
        "a lease of the dead waits for its run",
        "outbox_lease:release_leases_of_the_dead",
        ", unfenced(t.c.run_id))",
        ")",
        HOLD,
    ),
    Bug("a stranger waits for its run", "fanout:give_up_strangers", ", unfenced(t.c.run_id))", ",)", HOLD),
    Bug("an untold resolve waits for its run", "fanout:drop_untold", "unfenced(t.c.run_id), ", "", HOLD),
    Bug(
        "a channel waits for a moment for a run that is being moved",
        "notify.outbox:Dispatcher._settle",
        "if is_fenced(e) and time.monotonic() > until:",
        "if False:",
        f"{M}::test_a_fence_that_is_raised_while_a_message_is_sent_stops_its_channel_for_a_moment",
    ),
    Bug("the silence of others is told", "stale_run:StalledWatch._silent", ", unfenced(r.run_id))", ",)", SILENCE),
    Bug("a run that is being moved is not back", "stale_run:_told", ".where(unfenced(t.run_id))", "", SILENCE),
]
