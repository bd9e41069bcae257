"""What Grafana's HTTP API promises of folders, data sources and dashboards, as a server that holds callers to it."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

TOKEN = "glsa_" + "x" * 40
MAY_NOT = "glsa_" + "v" * 40


class Grafana:
    """Its state, and what callers did wrong."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.sources = {"fp8watch-postgres": "grafana-postgresql-datasource", "fp8watch-prometheus": "prometheus"}
        self.wrong: list[str] = []
        self.status: int | None = None  # answered to everything, where set
        self.url = ""

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        """As the documentation of the HTTP API has it."""
        if self.status:
            return self.status, {"message": "as the test says"}
        if not path.startswith("/g/api/"):
            return 404, "<html>not here</html>"
        path = path.removeprefix("/g")
        if headers.get("Authorization") not in (f"Bearer {TOKEN}", f"Bearer {MAY_NOT}"):
            return 401, {"message": "Invalid API key"}
        if method == "POST":
            if headers["Authorization"] == f"Bearer {MAY_NOT}":
                return 403, {"message": "You'll need additional permissions to perform this action."}
            if not headers.get("Content-Type", "").startswith("application/json"):
                self.wrong.append(f"{path}: {headers.get('Content-Type')}")
                return 400, {"message": "bad request data"}
            return self._post(path, json.loads(body))
        if found := re.fullmatch(r"/api/datasources/uid/([\w-]{1,40})", path):
            kind = self.sources.get(found[1])
            return (200, {"uid": found[1], "type": kind}) if kind else (404, {"message": "Data source not found"})
        if found := re.fullmatch(r"/api/folders/([\w-]{1,40})", path):
            folder = self.folders.get(found[1])
            return (200, folder) if folder else (404, {"message": "folder not found"})
        self.wrong.append(f"{method} {path}")
        return 404, {"message": "Not found"}

    def _post(self, path: str, given: dict[str, Any]) -> tuple[int, Any]:
        if path == "/api/folders":
            if given["uid"] in self.folders:
                return 412, {"message": "the folder has been changed by someone else", "status": "version-mismatch"}
            self.folders[given["uid"]] = {"uid": given["uid"], "title": given["title"], "id": 1}
            return 200, self.folders[given["uid"]]
        if path != "/api/dashboards/db":
            self.wrong.append(f"POST {path}")
            return 404, {"message": "Not found"}
        if not set(given) <= {"dashboard", "folderUid", "message", "overwrite"}:
            self.wrong.append(f"unknown: {set(given)}")
        board = given["dashboard"]
        if board.get("id") is not None:
            return 404, {"message": "Dashboard not found", "status": "not-found"}
        if given["folderUid"] not in self.folders:
            return 400, {"message": "folder not found"}
        uid = board["uid"]
        if not re.fullmatch(r"[\w-]{1,40}", uid) or not board["title"]:
            return 400, {"message": "uid or title"}
        before = self.dashboards.get(uid)
        if before is not None and not given["overwrite"]:
            return 412, {"message": "A dashboard with the same uid already exists", "status": "version-mismatch"}
        version = before["version"] + 1 if before else 1
        self.dashboards[uid] = {**board, "version": version, "folder": given["folderUid"]}
        return 200, {"id": 1, "uid": uid, "url": f"/d/{uid}/x", "status": "success", "version": version, "slug": "x"}


@contextlib.contextmanager
def grafana() -> Iterator[Grafana]:
    """It, listening under a path, as behind many a proxy."""
    made = Grafana()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = made.answer(self.command, self.path, self.headers, body)
            html = isinstance(answer, str)
            data = answer.encode() if html else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if html else "application/json; charset=UTF-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = _serve

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}/g"
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
