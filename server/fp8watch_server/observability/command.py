"""`fp8watch grafana push`: the dashboards for those whose Grafana is somebody else's; `files`: what else is shipped.

Shapes:     argv -> exit status: 0 pushed, 1 refused or no answer, 2 usage
Thread:     main
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from fp8watch_server.observability.grafana_push import (
    POSTGRES_UID,
    PROMETHEUS_UID,
    Api,
    PushError,
    Target,
    connect,
    dashboards,
    push,
)
from fp8watch_server.observability.shipped_files import Taken, write

DESCRIPTION = "Dashboards for those whose Grafana is somebody else's, and what else is shipped."
URL, TOKEN, TOKEN_FILE = "FP8WATCH_GRAFANA_URL", "FP8WATCH_GRAFANA_TOKEN", "FP8WATCH_GRAFANA_TOKEN_FILE"
EXIT_REFUSED, EXIT_USAGE = 1, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8watch grafana", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("push", help="write the dashboards into a Grafana, over those of the same uid")
    made.add_argument("--url", default=None, help=f"root URL of Grafana [{URL}]")
    made.add_argument("--token-file", type=Path, default=None, help=f"file with its token [{TOKEN_FILE}, or {TOKEN}]")
    made.add_argument(
        "--folder", default="fp8watch", help="title of the folder, where it is made (default: %(default)s)"
    )
    made.add_argument("--postgres-uid", default=POSTGRES_UID, help="uid of the data source (default: %(default)s)")
    made.add_argument("--prometheus-uid", default=PROMETHEUS_UID, help="uid of the data source (default: %(default)s)")
    made.add_argument(
        "--dashboards", type=Path, default=None, help="folder of other dashboards than those that are shipped"
    )
    files = commands.add_parser(
        "files", help="write compose file, Prometheus rules, Alertmanager example, provisioning and dashboards"
    )
    files.add_argument("folder", type=Path, help="where to; made where it is not there")
    return parser


def _files(folder: Path) -> int:
    try:
        for path in write(folder):
            print(path)
    except BrokenPipeError:
        raise  # the reader has what it wanted, which fp8watch.cli knows
    except (Taken, OSError) as e:
        print(f"fp8watch grafana: {e}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _token(path: Path | None) -> str:
    path = path or (Path(os.environ[TOKEN_FILE]) if os.environ.get(TOKEN_FILE) else None)
    if path is None:
        return os.environ.get(TOKEN, "")
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise PushError(f"token file {str(path)!r} cannot be read ({e}); name another with --token-file") from e


def main(argv: list[str], *, connect: Callable[[Target], Api] = connect) -> int:
    """Push the dashboards. `connect` makes the client."""
    args = _parser().parse_args(argv)
    if args.command == "files":
        return _files(args.folder)
    url = args.url or os.environ.get(URL, "")
    if not url:
        print(f"fp8watch grafana: which Grafana? Give --url, or {URL}", file=sys.stderr)
        return EXIT_USAGE
    if find_spec("torch") and find_spec("grafana_client"):
        print(
            "fp8watch grafana: grafana-client has replaced urllib3 in an environment that trains; "
            "keep it in one of its own, and install urllib3 again here",
            file=sys.stderr,
        )
    try:
        target = Target(url, _token(args.token_file), args.folder, args.postgres_uid, args.prometheus_uid)
        boards = dashboards(args.dashboards)
        for line in push(connect(target), target, boards):
            print(line)
    except PushError as e:
        print(f"fp8watch grafana: {e}", file=sys.stderr)
        return EXIT_REFUSED
    return 0
