"""docs/grafana.md lists the dashboards and views that there are."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.database import fresh_database

from dashboards import boards
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine

PAGE = Path(__file__).parents[2] / "docs" / "grafana.md"
WRITE = "run python tests/dashboards/test_grafana_page.py"
RELATIONS = """
SELECT c.relname, string_agg(a.attname, ', ' ORDER BY a.attnum)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
WHERE n.nspname = 'grafana' AND c.relkind = 'v' GROUP BY c.relname ORDER BY c.relname"""
FUNCTIONS = """
SELECT p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')', pg_get_function_result(p.oid)
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'grafana' ORDER BY p.proname"""


def dashboards() -> str:
    """The first table."""
    return "| dashboard | shows |\n|---|---|\n" + "\n".join(
        f"| {b['title'].removeprefix('fp8watch · ')} (`{uid}`) | {b['description']} |"
        for uid, b in boards.load().items()
    )


def views() -> str:
    """The last table, as a migrated database has it."""
    with fresh_database("postgresql") as url:
        engine = make_engine(url)
        with engine.connect() as conn:
            found = [(name, columns) for name, columns in conn.execute(sa.text(RELATIONS))]
            for name, result in conn.execute(sa.text(FUNCTIONS)):
                columns = re.findall(r'(?:TABLE\(|, )("[^"]+"|\w+) ', result)
                octaves = [c for c in columns if c.startswith('"2^')]
                plain = [c.strip('"') for c in columns if c not in octaves]
                shown = [*plain, f"{octaves[0].strip(chr(34))} … {octaves[-1].strip(chr(34))}"] if octaves else plain
                found.append((name, ", ".join(shown)))
        engine.dispose()
    rows = [f"| `{name}` | {columns} |" for name, columns in found]
    return "\n".join(["| view or function | columns |", "|---|---|", *rows])


@pytest.mark.parametrize(("mark", "table"), [("dashboards", dashboards), ("views", views)])
def test_a_table_is_what_there_is(mark: str, table: object) -> None:
    assert callable(table)
    written = PAGE.read_text().split(f"<!-- {mark} -->\n")[1].split(f"<!-- /{mark} -->")[0]
    assert written.strip("\n") == table(), WRITE


def test_commands_and_variables_are_those_of_the_files() -> None:
    text = PAGE.read_text()
    folder = boards.ROOT / "dashboards"
    files = [*(folder / "grafana").rglob("*.yml"), folder / "prometheus" / "prometheus.yml"]
    asked = {v for f in files for v in re.findall(r"\$\{?(FP8WATCH_[A-Z_]+)", f.read_text())}
    assert asked == set(re.findall(r"`(FP8WATCH_[A-Z_]+)`", text)) | (asked & {"FP8WATCH_PUBLIC_URL"})
    assert "rendered in a Grafana" in text


if __name__ == "__main__":
    page = PAGE.read_text()
    for mark, rows in (("dashboards", dashboards()), ("views", views())):
        pattern = rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
        page = re.sub(pattern, lambda m, rows=rows: f"{m[1]}\n{rows}\n\n{m[2]}", page, flags=re.S)  # type: ignore[misc]
    PAGE.write_text(page)


def test_the_token_that_the_page_gives_prometheus_is_whole(tmp_path: Path) -> None:
    """The page's line, with a shell's pipe and all, in place of docker compose a command of this machine."""
    (line,) = [line for line in PAGE.read_text().splitlines() if "token create prometheus" in line]
    ours = f"{sys.executable} -m fp8watch token"
    line = line.replace("docker compose exec -T collector fp8watch token", ours).replace("secrets/", f"{tmp_path}/")
    env = {**os.environ, "FP8WATCH_DATABASE_URL": f"sqlite:///{tmp_path / 'x.db'}"}
    subprocess.run(line, shell=True, check=True, capture_output=True, timeout=60, env=env)
    with make_engine(env["FP8WATCH_DATABASE_URL"]).connect() as conn:
        (known,) = conn.execute(sa.select(t.token.c.token_sha256)).scalars()
    token = (tmp_path / "metrics_token").read_text().strip()
    assert hashlib.sha256(token.encode()).hexdigest() == known
