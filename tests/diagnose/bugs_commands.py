"""Bugs in what the commands of diagnosis say of options, of modules that are missing, and of a reader that has gone."""

from __future__ import annotations

from support.planted import Bug

_C = "tests/diagnose/test_commands.py::"
CANNOT = f"{_C}test_what_cannot_work_is_said_in_one_line"
THEIRS = f"{_C}test_a_module_that_their_own_script_lacks_is_theirs"
GONE = f"{_C}test_a_reader_that_has_gone_is_no_mistake_of_the_command_line"
COMMAND_BUGS = [
    Bug("options of a model are none of a stored run", "what_if_command:_check_meant", "if getattr(args, name)]",
        "if getattr(args, name) and args.run is None]", CANNOT),
    Bug("options of a stored run are none of a model", "what_if_command:_check_meant", "if getattr(args, name)]",
        "if getattr(args, name) and args.run is not None]", CANNOT),
    Bug("a stored run is read with the token of a file", "stored_what_if:stored_what_if",
        "(read_token_file(Path(file)) if file else None)", "None",
        f"{_C}test_a_stored_run_is_read_with_the_token_of_a_file"),
    Bug("what a script cannot import is the script's", "subject:load_subject",
        'raise ValueError(f"{name!r}: {module_name} cannot be imported: {e}; {OF_THEIRS}") from e', "raise", THEIRS),
    Bug("what a script's function cannot import is the script's", "subject:load_subject",
        'raise ValueError(f"{name!r}: {function_name} failed: {e}; {OF_THEIRS}") from e', "raise", THEIRS),
    Bug("moments of a training that breaks are held against nothing", "diagnose.moments:moments_what_if",
        "if not math.isfinite(plain.loss):", "if False:",
        "tests/diagnose/test_moments.py::test_a_training_that_breaks_by_itself_is_held_against_nothing"),
    Bug("gradients that are not finite are held against nothing", "diagnose.collectives:_gradients",
        "if not bool(torch.isfinite(g).all()):", "if False:",
        "tests/diagnose/test_collectives.py::test_arguments_that_cannot_work_are_refused_by_name"),
    Bug("what a model lacks is no part of fp8watch", "fp8watch.cli:main",
        "if args[0] in RUN_THEIR_CODE and _importer(e) not in OURS:", "if False:",
        f"{_C}test_a_module_that_their_model_lacks_is_theirs"),
    Bug("a bisection whose reader has gone is no mistake", "bisect_command:run", "    except BrokenPipeError as e:", "    except ZeroDivisionError as e:",
        f"{_C}test_a_bisection_is_sent_though_its_reader_has_gone"),
    Bug("a bisection whose reader has gone is sent", "bisect_command:run", "        gone = e\n", "        raise\n",
        f"{_C}test_a_bisection_is_sent_though_its_reader_has_gone"),
    *(Bug(f"a reader that has gone is no mistake of {at.rpartition('.')[2]}", f"{at}:main", "    except BrokenPipeError:\n        raise",
          "    except ZeroDivisionError:\n        raise", GONE)
      for at in ("diagnose.command", "diagnose.calibrate_command", "fp8watch_agent.fix_command")),
]  # fmt: skip
