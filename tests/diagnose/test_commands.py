"""fp8watch diagnose and calibrate: from a function's name to tables, files and clear errors."""

from __future__ import annotations

import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diagnose.small_models import batch_of, trained

import fp8watch
from fp8watch.cli import main
from fp8watch.diagnose import bisect_command
from fp8watch.diagnose.calibrate_command import main as calibrate_main
from fp8watch.diagnose.command import SUBCOMMANDS
from fp8watch.diagnose.command import main as diagnose_main
from fp8watch.diagnose.stored_what_if import stored_what_if
from fp8watch.recipe.file import read_recipe_file
from fp8watch_agent import fix_command
from fp8watch_server.observability.command import main as grafana_main

SUBJECT = """
from diagnose.small_models import batch_of, trained


def build():
    model, optimizer = trained(3)
    return model, (batch_of(seed) for seed in range(8)), lambda m, b: m(*b), optimizer


def plain():
    return trained(1)[0], batch_of(1)


def empty():
    return trained(1)[0], iter(())


def wrong():
    return "a model"
"""


@pytest.fixture(autouse=True)
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"subject_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SUBJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for variable in ("FP8WATCH_COLLECTOR", "FP8WATCH_RECIPE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path / "spool"))
    return name


def test_loss_impact_prints_a_table_or_json_and_writes_a_picture(subject: str, capsys: Any, tmp_path: Path) -> None:
    assert main(["diagnose", "loss-impact", f"{subject}:build", "--measure", "--backward", "--svg", "a.svg"]) == 0
    text = capsys.readouterr().out
    assert "layers.0.gate" in text
    assert "One batch at these weights" in text
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert (
        main(["diagnose", "loss-impact", f"{subject}:plain", "--only", "layers.1.*", "--recipe", "current", "--json"])
        == 0
    )
    data = json.loads(capsys.readouterr().out)
    assert [x["module"] for x in data["layers"]] == ["layers.1.gate", "layers.1.up", "layers.1.down"]
    assert data["recipe"] == "current"


def test_what_if_prints_formats_and_how_they_are_had(subject: str, capsys: Any) -> None:
    asked = ["diagnose", "what-if", f"{subject}:build", "--format", "delayed", "--format", "nvfp4", "--history", "2"]
    assert main([*asked, "--summary"]) == 0
    text = capsys.readouterr().out
    assert "NVFP4BlockScaling" in text
    assert "layers.0.gate" not in text
    assert main([*asked, "--json"]) == 0
    assert [f["name"] for f in json.loads(capsys.readouterr().out)["formats"]] == ["delayed", "nvfp4"]


def test_moments_prints_a_table(subject: str, capsys: Any) -> None:
    assert main(["diagnose", "moments", f"{subject}:build", "--steps", "2", "--format", "bf16"]) == 0
    text = capsys.readouterr().out
    assert "exp_avg_sq stuck" in text
    assert "\nbf16 " in text
    assert "2 steps; loss " in text


def test_calibrate_writes_a_file_that_is_a_recipe(subject: str, capsys: Any, tmp_path: Path) -> None:
    assert main(["calibrate", f"{subject}:build", "--steps", "3", "-o", "r.toml"]) == 0
    assert "recipe='r.toml'" in capsys.readouterr().out
    assert read_recipe_file(tmp_path / "r.toml").name == "current"
    assert main(["calibrate", f"{subject}:plain", "--steps", "1"]) == 0
    assert capsys.readouterr().out.startswith("# fp8watch calibrate, 1 steps")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["diagnose", "loss-impact", "nothing"], "must be MODULE:FUNCTION"),
        (["diagnose", "loss-impact", "no_such_module:f"], "there is no module no_such_module"),
        (["diagnose", "loss-impact", "{}:nope"], "has no function nope; it has batch_of, build, empty, plain"),
        (["diagnose", "loss-impact", "{}:wrong"], "must be (model, batch"),
        (["diagnose", "loss-impact", "{}:empty"], "without batches"),
        (["diagnose", "loss-impact", "{}:plain", "--recipe", "no.toml"], "no.toml"),
        (["diagnose", "loss-impact", "{}:plain", "--only", "nothing.*"], "no Linear"),
        (["diagnose", "moments", "{}:plain"], "gave no optimizer"),
        (["diagnose", "what-if"], "give MODULE:FUNCTION"),
        (["diagnose", "what-if", "{}:build", "--run", "r"], "give MODULE:FUNCTION"),
        (["diagnose", "what-if", "--run", "r"], "no collector"),
        (["diagnose", "what-if", "--run", "r", "--collector", "http://127.0.0.1:9"], "was not reached"),
        (["diagnose", "what-if", "--run", "r", "--collector", "nonsense"], "must be an http:// or https:// URL"),
        (["diagnose", "what-if", "--run", "r", "--svg", "a.svg"], "--svg: has no meaning with --run"),
        (
            [
                "diagnose",
                "what-if",
                "--run",
                "r",
                "--format",
                "nvfp4",
                "--summary",
                "--history",
                "2",
                "--backend",
                "cpu",
            ],
            "--backend, --format, --history, --summary: have no meaning with --run",
        ),
        (["diagnose", "what-if", "{}:build", "--steps", "1:2"], "--steps: has no meaning without --run"),
        (["fix", "abc", "--for", "torchao", "--collector", "nonsense"], "must be an http:// or https:// URL"),
        (["diagnose", "what-if", "{}:build", "--history", "9"], "gave 8 batches"),
        (["diagnose", "loss-impact", "{}:build", "--svg", "none/a.svg"], "--svg none/a.svg: there is no folder none"),
        (["calibrate", "{}:build", "-o", "r.txt"], "must end in .toml"),
        (["calibrate", "{}:build", "-o", "none/r.toml"], "-o none/r.toml: there is no folder none"),
        (["calibrate", "{}:build", "--svg", "."], "--svg .: is a folder"),
        (["calibrate", "{}:empty"], "batches is empty"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(subject: str, args: list[str], word: str, capsys: Any) -> None:
    assert main([a.format(subject) for a in args]) == 2
    said = capsys.readouterr()
    assert word in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


class _WithToken(BaseHTTPRequestHandler):
    """A collector without sites, that wants a token."""

    def do_GET(self) -> None:
        right = self.headers["Authorization"] == "Bearer fp8w_read"
        body = b'{"items": [], "next": null}' if right else b"no token"
        self.send_response(200 if right else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


def test_a_stored_run_is_read_with_the_token_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("FP8WATCH_TOKEN", raising=False)
    (tmp_path / "token").write_text("fp8w_read\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), _WithToken) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        asked = ["diagnose", "what-if", "--run", "r", "--collector", f"http://127.0.0.1:{server.server_port}"]
        assert main(asked) == 2
        assert "401" in capsys.readouterr().err
        monkeypatch.setenv("FP8WATCH_TOKEN_FILE", str(tmp_path / "token"))
        assert main(asked) == 0
        server.shutdown()


def test_every_subcommand_is_a_module_with_the_same_three_names() -> None:
    for name, module in SUBCOMMANDS.items():
        assert {"HELP", "arguments", "run"} <= set(vars(module)), name


@pytest.mark.parametrize("where", ["import numpy_of_the_moon", "def build():\n    import numpy_of_the_moon"])
@pytest.mark.parametrize("command", [["diagnose", "loss-impact"], ["calibrate"]])
def test_a_module_that_their_own_script_lacks_is_theirs(
    where: str, command: list[str], tmp_path: Path, capsys: Any
) -> None:
    name = f"broken_{len(where)}_{len(command)}"
    (tmp_path / f"{name}.py").write_text(f"{where}\n")
    assert main([*command, f"{name}:build"]) == 2
    said = capsys.readouterr().err
    assert "No module named 'numpy_of_the_moon'" in said
    assert f"{name}:build" in said
    assert "pip install 'fp8watch" not in said
    with pytest.raises(ValueError, match="numpy_of_the_moon") as raised:
        main([*command, f"{name}:build", "--traceback"])
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_a_module_that_their_model_lacks_is_theirs(subject: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "lacking.py").write_text(
        "def build():\n    model, batch = __import__('" + subject + "').plain()\n    return model, batch, loss\n\n\n"
        "def loss(model, batch):\n    import numpy_of_the_moon\n"
    )
    with pytest.raises(ModuleNotFoundError, match="numpy_of_the_moon"):
        main(["diagnose", "loss-impact", "lacking:build"])
    assert capsys.readouterr().err == ""


class _Closed(io.StringIO):
    """Standard output whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_reader_that_has_gone_is_no_mistake_of_the_command_line(
    subject: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(fix_command, "fetch", lambda *args: "text")
    commands = (
        (diagnose_main, ["moments", f"{subject}:build", "--steps", "1", "--format", "bf16"]),
        (calibrate_main, [f"{subject}:plain", "--steps", "1"]),
        (fix_command.main, ["abc", "--for", "torchao"]),
        (grafana_main, ["files", str(tmp_path / "files")]),
    )
    for run, args in commands:
        with monkeypatch.context() as closed:
            closed.setattr(sys, "stdout", _Closed())
            with pytest.raises(BrokenPipeError):
                run(args)
    assert capsys.readouterr().err == ""


def test_a_bisection_is_sent_though_its_reader_has_gone(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    sent: list[str] = []
    found = SimpleNamespace(verdict="fp8", as_json=dict, as_svg=str, send=sent.append)
    monkeypatch.setattr(bisect_command, "bisect", lambda *args, **kwargs: found)
    monkeypatch.setenv("FP8WATCH_COLLECTOR", "http://127.0.0.1:9")
    monkeypatch.setattr(sys, "stdout", _Closed())
    with pytest.raises(BrokenPipeError):
        diagnose_main(["bisect", "module:function", "--incident", "abc"])
    assert sent == ["abc"]
    assert capsys.readouterr().err == ""


@pytest.mark.long
def test_the_sketches_of_a_stored_run_say_what_other_formats_would_flush(tmp_path: Path, capsys: Any) -> None:
    """The real way: attach, collector, API. Held to the same formats on the operand itself."""
    from fp8watch.demo.collector import running_collector

    torch.manual_seed(0)
    model, optimizer = trained(1, dim=128)
    (tmp_path / "db").mkdir()
    with running_collector(tmp_path / "db", 0) as url:
        with fp8watch.attach(model, collector=url, optimizer=optimizer, overhead_budget=None) as watch:
            for seed in range(3):
                optimizer.zero_grad()
                model(*batch_of(seed, dim=128)).backward()
                optimizer.step()
            assert watch.flush(20)
            run = watch.identity.run_id
        found = stored_what_if(run, url, only=["layers.0.*"])
        assert main(["diagnose", "what-if", "--run", run, "--collector", url, "--only", "layers.0.gate"]) == 0
        with pytest.raises(ValueError, match="no-such-run"):
            stored_what_if("no-such-run", url)
    assert len(found.sites) == 15
    text = capsys.readouterr().out
    assert "E5M2, power-of-two scales" in text
    assert "layers.0.gate.input.rowwise" in text
    for site in found.sites:
        by_format = {c.format: c for c in site.costs}
        flushed = [by_format[f"{f}, power-of-two scales"].underflow or 0.0 for f in ("E4M3", "E5M2")]
        assert flushed[0] >= flushed[1]
        assert 30 < (by_format["E4M3, power-of-two scales"].tile_sqnr_db or 0) < 33
