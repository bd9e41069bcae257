"""What is broken on purpose where detection, people and messages meet at one incident, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

F = "tests/incidents/test_fold.py"
LATE = f"{F}::test_a_late_critical_finding_of_a_warning_that_is_over_is_an_incident_of_its_own_which_ends"
GONE = "tests/collector/test_deleted_run.py::test_what_was_told_of_it_is_over"
PERSON = f"{F}::test_what_a_person_does_while_detection_writes_comes_before_it_or_after"
RULES = "tests/collector/test_rules_in_force.py::test"
ENDS = f"{RULES}_an_incident_ends_after_as_many_clean_steps_as_the_rules_say"
SAVED = "tests/collector/test_worker.py::test_a_state_that_cannot_be_saved_costs_no_batch"

INCIDENTS = [
    Bug(
        "a state that cannot be saved costs no batch",
        "engine_restore:save",
        "    except Exception:\n",
        "    except ValueError:\n",
        SAVED,
    ),
    Bug(
        "where a state cannot be saved that of before goes",
        "engine_restore:save",
        "        conn.execute(sa.delete(t.detect_state).where(c.run_id == run_id, c.tenant == tenant))\n",
        "",
        SAVED,
    ),
    Bug(
        "what is worse than was told is no part of what is over",
        "fold:fold",
        "if not _grew_worse(i.told_severity, finding.severity)]",
        "]",
        LATE,
    ),
    Bug(
        "what a person does waits for findings that are being written",
        "incidents.stored:load",
        "        .with_for_update(key_share=True)  # what people do meanwhile comes after\n",
        "",
        PERSON,
    ),
    Bug(
        "what was told of a run that is deleted is over",
        "deleted_run:delete_run",
        "        write_resolved(conn, {**row, **over}, now, public_url)\n",
        "        pass\n",
        GONE,
    ),
    Bug(
        "prune ends what was told",
        "incidents.prune_command:main",
        "command.prune_main(argv, _delete)",
        "command.prune_main(argv)",
        GONE,
    ),
    Bug(
        "rules are in force behind a restart",
        "fp8watch_server.app:_detection",
        "DetectEngine.load(saved, facts, rules.thresholds_for(run_id, run_name))",
        "DetectEngine.load(saved, facts)",
        f"{RULES}_rules_are_in_force_behind_a_restart",
    ),
    Bug(
        "an incident ends when the rules say",
        "detect_worker:DetectWorker._write_incidents",
        '{"after_clean_steps": after, ',
        "{",
        ENDS,
    ),
    Bug(
        "a replayed incident ends when the rules say",
        "pipeline.replay:replay",
        "old.at, after, engine.stride)",
        "old.at, stride=engine.stride)",
        ENDS,
    ),
    Bug(
        "what comes again before its incident would be over is of it",
        "match:target_of",
        "quiet = after_clean_steps * stride",
        "quiet = CLOSE_AFTER_STEPS * stride",
        "tests/incidents/test_at_its_place.py::test_what_comes_again_while_its_incident_is_kept_open_is_of_it",
    ),
]
