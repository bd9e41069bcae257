"""`fp8watch open`: shows what training left on disk, or a report, and changes neither.

Thread:     main serves; one thread sends a copy of the spool

A spool is copied into a temporary folder and sent to a collector of this process, on loopback, with a database that ends
with it. A spool of a training that runs is shown as it was when the command began.
"""

from __future__ import annotations

import argparse
import html
import re
import shutil
import sys
import tempfile
import threading
import webbrowser
from pathlib import Path

from fp8watch_agent.ring import RING_SUFFIX
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.spool_segment import SEGMENT_SUFFIX
from fp8watch_agent.sync import Report, Sync
from fp8watch_agent.terminal.text import plain
from fp8watch_agent.transport import Transport
from fp8watch_agent.uploader import Uploader
from fp8watch_server.cli import CannotServe, build, listen, url_of
from fp8watch_server.http.server import Server
from fp8watch_server.settings import Settings

HOST = "127.0.0.1"
SEND_TIMEOUT_S = 600.0
GENERATOR = re.compile(rb'<meta name="generator" content="fp8watch [^"]*">')
TITLE = re.compile(r"<title>(.*?)</title>", re.S)


def main(argv: list[str]) -> int:
    """Entry point of `fp8watch open`. Exit status: 0 shown, 2 nothing that can be shown."""
    parser = argparse.ArgumentParser(
        prog="fp8watch open", description="Show a spool or a report without a server. Neither is changed."
    )
    parser.add_argument(
        "FILE", nargs="?", help="a report, a spool folder, or a file of one (default: FP8WATCH_SPOOL_DIR)"
    )
    parser.add_argument("--port", type=int, default=0, help="port of the pages (default: any free one)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    args = parser.parse_args(argv)
    try:
        path = Path(args.FILE) if args.FILE else AgentSettings.from_environ().spool_dir
        if path.is_file() and path.suffix in (".html", ".htm"):
            return _open_report(path, browse=not args.no_browser)
        files = spool_files(path)
        with tempfile.TemporaryDirectory(prefix="fp8watch-open-") as folder:
            return _open_spool(files, Path(folder), args.port, browse=not args.no_browser)
    except BrokenPipeError:
        raise  # the reader has what it wanted, which fp8watch.cli knows
    except (ValueError, OSError, CannotServe) as e:
        print(f"fp8watch open: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def spool_files(path: Path) -> list[Path]:
    """Rings and segments of a folder, or the one that is named.

    Raises:
        ValueError: there are none.
    """
    found = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    files = [f for f in found if f.name.endswith((RING_SUFFIX, SEGMENT_SUFFIX)) and f.is_file()]
    if not files:
        raise ValueError(
            f"{path}: must be a report (.html), or a spool with files of {RING_SUFFIX} or {SEGMENT_SUFFIX}; name one, "
            "or set FP8WATCH_SPOOL_DIR"
        )
    return files


def _open_report(path: Path, *, browse: bool) -> int:
    text = path.read_bytes()
    if not GENERATOR.search(text[:4096]):
        raise ValueError(f"{path}: must be a report that fp8watch has written; open any other page in a browser")
    title = TITLE.search(text[:65536].decode(errors="replace"))
    print(plain(html.unescape(title[1]).strip() if title else path.name))
    address = path.resolve().as_uri()
    if not (browse and webbrowser.open(address)):
        print(f"open it in a browser: {address}")
    return 0


def _open_spool(files: list[Path], folder: Path, port: int, *, browse: bool) -> int:
    spool = folder / "spool"
    spool.mkdir()
    for path in files:
        shutil.copyfile(path, spool / path.name)
    sock = listen(HOST, port)
    try:
        url = url_of(sock, HOST)
        app = build(Settings(database_url=f"sqlite:///{folder / 'fp8watch.sqlite'}", public_url=url))

        def send() -> None:
            report = sent(spool, url)
            for line in report.lines():
                print(line)
            print(f"fp8watch open: {url} (a copy; Ctrl-C ends)", flush=True)
            if browse:
                webbrowser.open(url)

        server = Server(app, on_started=lambda: threading.Thread(target=send, daemon=True).start(), lifespan="on")
        server.run(sockets=[sock])
        return 0 if server.started else 2
    finally:
        sock.close()


def sent(spool: Path, url: str) -> Report:
    """Send everything in a folder to a collector."""
    transport = Transport(url)
    try:
        return Sync(spool, Uploader(transport), SEND_TIMEOUT_S).run()
    finally:
        transport.close()
