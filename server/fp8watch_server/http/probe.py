"""`python -m fp8watch_server.http.probe [PATH]`: whether the collector of this environment answers; for health checks.

Thread:     main

Imports nothing but the standard library, because it runs every few seconds. It asks the port that FP8WATCH_PORT names, and
speaks TLS where FP8WATCH_TLS_CERT is set. The certificate names the collector as others reach it, and is not checked here:
the request does not leave the machine, and holds no secret.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping

TIMEOUT_S = 2.0
DEFAULT_PORT = "8420"
ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}


def connection(environ: Mapping[str, str]) -> http.client.HTTPConnection:
    """To the collector with these variables."""
    host = environ.get("FP8WATCH_HOST", "")
    host = ANY.get(host, host.strip("[]"))
    port = int(environ.get("FP8WATCH_PORT") or DEFAULT_PORT)
    if environ.get("FP8WATCH_TLS_CERT"):
        context = ssl._create_unverified_context()
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)


def main(argv: list[str], environ: Mapping[str, str] = os.environ) -> int:
    """Exit status 0: it answers 200. 1: it does not, with the reason."""
    path = argv[0] if argv else "/healthz"
    try:
        conn = connection(environ)
        conn.request("GET", path)
        status = conn.getresponse().status
    except (OSError, ValueError, http.client.HTTPException) as e:
        print(f"{path}: {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    if status != 200:
        print(f"{path}: HTTP {status}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
