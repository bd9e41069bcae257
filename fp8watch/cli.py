"""The command line: `fp8watch COMMAND`. Commands are entry points, so this file imports nothing of theirs."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points

GROUP = "fp8watch.commands"
HELP = {
    "fix": "export the fix of an incident as a file for Megatron, Transformer Engine, torchtitan or torchao",
    "demo": "train a small model in FP8, break it on purpose, and see it named",
    "calibrate": "suggest a recipe from some steps in high precision, as a file",
    "diagnose": "why a run fails, and what to change: loss impact, what-if, bisect",
    "serve": "run the collector",
    "worker": "commit the batches that collectors have accepted into a queue",
    "shards": "show where runs lie, and move them between databases",
    "sync": "send the local spool to a collector",
    "relay": "take the batches of a host's ranks, and send them on together",
    "notify": "try the notification channels",
    "load": "send the statistics of synthetic ranks to a collector",
    "token": "make, list and revoke tokens of a collector",
    "grafana": "push the dashboards into a Grafana",
    "backup": "copy the collector's database while it runs",
    "export": "write a run as Parquet files, for DuckDB, polars and pandas",
    "check": "verify everything stored against its hashes and counts",
    "check-checkpoint": "check every tensor of a checkpoint before training resumes from it",
    "check-gemm": "check this machine's quantisers and FP8 GEMMs against the results they must give",
    "migrate": "bring the database to the newest revision",
    "prune": "delete old steps of a run, or the whole run",
    "replay": "run the detectors over a stored run again, with other rules",
    "rules": "show the thresholds of the detectors, or check a file of them",
    "runs": "list the runs of a collector",
    "incidents": "list incidents",
    "show": "show one run, or one incident",
    "top": "show runs, and the incidents that ask for you, live in the terminal",
    "compare": "show where two runs diverge, and how they differ",
    "report": "write an incident into one HTML file",
    "open": "show a spool or a report without a server",
}
NEED_NOTHING = ("runs", "incidents", "show", "top", "compare", "report")

RUN_THEIR_CODE = ("diagnose", "calibrate")
"""Commands that call functions of a training script, which may lack modules of its own."""
OURS = ("fp8watch", "fp8watch_agent", "fp8watch_server")


def _commands() -> dict[str, EntryPoint]:
    return {e.name: e for e in entry_points(group=GROUP)}


def _usage(commands: dict[str, EntryPoint]) -> str:
    width = max((len(name) for name in commands), default=0)
    lines = [f"  {name:<{width}}  {HELP.get(name, '')}".rstrip() for name in sorted(commands)]
    return "\n".join(["usage: fp8watch COMMAND [OPTIONS]", "", *lines, "", "fp8watch COMMAND --help describes one"])


def _importer(missing: ModuleNotFoundError) -> str:
    """The package whose code asked for a module."""
    frames = [frame for frame, _ in traceback.walk_tb(missing.__traceback__)]
    names = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames]
    return next((name for name in reversed(names) if name != "importlib"), "")


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is its own, 2 for a command line that makes no sense."""
    args = sys.argv[1:] if argv is None else argv
    commands = _commands()
    if not args or args[0] in ("-h", "--help"):
        print(_usage(commands))
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        from fp8watch import __version__

        print(__version__)
        return 0
    entry = commands.get(args[0])
    if entry is None:
        print(f"fp8watch: {args[0]!r} is not a command; known are {', '.join(sorted(commands))}", file=sys.stderr)
        return 2
    try:
        status = int(entry.load()(args[1:]))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("fp8watch: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python still writes at its end
        return 128 + signal.SIGPIPE
    except ModuleNotFoundError as e:
        if args[0] in RUN_THEIR_CODE and _importer(e) not in OURS:
            raise
        own = {
            "demo": "[demo]",
            "grafana": "[grafana]",
            "check-gemm": "[train]",
            "check-checkpoint": "[checkpoints]",
            "diagnose": "[train]",
            "calibrate": "[train]",
            "sync": "",
            "relay": "",
            "fix": "",
            **dict.fromkeys(NEED_NOTHING, ""),
        }
        extra = own.get(args[0], "[server]")
        print(f"fp8watch: {args[0]} needs {e.name}: pip install 'fp8watch{extra}'", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
