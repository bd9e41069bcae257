"""A fix as a file is what its consumer reads, whatever modules are called."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading

import pytest
import yaml
from torch import nn

from fp8watch.diagnose.tell_incident import tell_incident
from fp8watch_agent import fix_command
from fp8watch_server.incidents.fix_files import TARGETS, FixError, fix_file

NAMES = ["layers.1.mlp.down_proj", "layers.1.attention.wq"]
HOSTILE = "a title\n# with a line\x00 and \u2028 more: [}"
FACTS = {
    "recipe": "blockwise", "input.tile": "1x128", "input.format": "E4M3", "input.power_2_scale": True, "input.eps": 1e-12,
    "input.scaling": "current", "weight.tile": "128x128", "weight.format": "E4M3", "weight.power_2_scale": True,
    "weight.eps": 0.0, "weight.scaling": "current", "grad_output.format": "high precision",
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_a_title_stays_in_its_line_and_a_name_in_its_string(target):
    odd = 'layers.*[1]."down"\\'
    text = fix_file(target, [odd], HOSTILE, FACTS)
    lines = text.splitlines()
    assert lines[0] == "# a title # with a line and more: [}"
    assert not any(line.startswith(("with", "more")) for line in lines)
    for name in ("a\nb", "", "x" * 2000):
        with pytest.raises(FixError):
            fix_file(target, [name], "why", FACTS)
    with pytest.raises(FixError, match="no module"):
        fix_file(target, [], "why", FACTS)


@pytest.fixture(scope="module")
def float8():
    """torchao itself; its import takes seconds."""
    return pytest.importorskip("torchao.float8")


def test_torchao_converts_all_but_these(float8):
    made: dict[str, object] = {}
    exec(fix_file("torchao", ["1.down", "2"], "why", {}), made)
    block = nn.ModuleDict({"up": nn.Linear(32, 32), "down": nn.Linear(32, 32)})
    model = nn.ModuleList(
        [block, nn.ModuleDict({"up": nn.Linear(32, 32), "down": nn.Linear(32, 32)}), nn.Linear(32, 32)]
    )
    float8.convert_to_float8_training(model, module_filter_fn=made["module_filter_fn"])
    kinds = {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind == "Linear"} == {"1.down", "2"}
    assert {name for name, kind in kinds.items() if kind == "Float8Linear"} == {"0.up", "0.down", "1.up"}
    assert made["module_filter_fn"](None, "model.1.down") is False
    assert made["module_filter_fn"](None, "11.down") is True


def test_yaml_says_which_gemms_leave():
    read = yaml.safe_load(fix_file("te-debug", ["a.b", "c.d.grad_output", "e.input", "e.weight"], "why", {}))
    features = {
        section["layers"]["layer_name_regex_pattern"]: section["transformer_engine"] for section in read.values()
    }
    for name, want in {
        ".model.a.b": {"DisableFP8Layer": {"enabled": True}},
        "c.d": {"DisableFP8GEMM": {"enabled": True, "gemms": ["dgrad", "wgrad"]}},
        "x.e": {"DisableFP8Layer": {"enabled": True}},
    }.items():
        assert [f for pattern, f in features.items() if re.search(pattern, name)] == [want]
    for other in ("a.b.c", "xa.b", "a-b"):
        assert not [f for pattern, f in features.items() if re.search(pattern, other)]
    megatron = yaml.safe_load(fix_file("megatron", ["decoder.layers.1.mlp"], "why", {}))
    patterns = [m["pattern"] for m in megatron["matchers"].values()]
    assert patterns == ["decoder.layers.1.mlp", "*.decoder.layers.1.mlp"]


def test_the_recipe_file_has_the_recipe_in_effect():
    tomllib = pytest.importorskip("tomllib")
    read = tomllib.loads(fix_file("fp8watch", [*NAMES, "odd[0]"], "why", FACTS))
    recipe = read["recipe"]
    assert recipe["high_precision_modules"] == [*NAMES, "odd[[]0]"]
    assert recipe["input"] == {
        "tile": [1, 128],
        "format": "E4M3",
        "power_2_scale": True,
        "eps": 1e-12,
        "scaling": "current",
    }
    assert recipe["grad_output"] == {"high_precision": True}
    assert tomllib.loads(fix_file("torchtitan", NAMES, "why", {}))["filter_fqns"] == NAMES
    with pytest.raises(FixError, match="no recipe of fp8watch"):
        fix_file("fp8watch", NAMES, "why", {})


def test_the_recipe_file_is_read_by_attach(tmp_path):
    file = pytest.importorskip("fp8watch.recipe.file")
    import fp8watch

    for recipe in (fp8watch.blockwise(), fp8watch.delayed(), fp8watch.current(), fp8watch.mxfp8(), fp8watch.rowwise()):
        (tmp_path / "fix.toml").write_text(fix_file("fp8watch", ["0"], "why", recipe.facts()))
        read = file.read_recipe_file(tmp_path / "fix.toml")
        assert read.high_precision_modules == ("0",)
        same = {k: v for k, v in read.facts().items() if k != "high_precision_modules"}
        assert same == {k: v for k, v in recipe.facts().items() if not k.startswith("flag.")}


@contextlib.contextmanager
def listening(asked):
    """Answers with the path that it was asked for, or refuses. asked: paths and tokens."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self):
            asked.append((self.path, self.headers["Authorization"]))
            refuse = "/none/" in self.path
            body = b'{"detail": "there is no incident", "remedy": "list them"}' if refuse else self.path.encode()
            self.send_response(404 if refuse else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def collector():
    with listening([]) as url:
        yield url


def test_the_command_asks_the_collector_of_the_page(collector, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("FP8WATCH_COLLECTOR", raising=False)
    out = tmp_path / "fix.yaml"
    page = f"{collector}/behind/incidents/abc"
    assert fix_command.main([page, "--for", "megatron", "-o", str(out)]) == 0
    assert out.read_text() == "/behind/api/v1/incidents/abc/fix?for=megatron"
    assert fix_command.main(["a/b", "--for", "torchao", "--module", "x.y.input", "--collector", collector]) == 0
    assert capsys.readouterr().out == "/api/v1/incidents/a%2Fb/fix?for=torchao&module=x.y.input"
    assert fix_command.main(["none/", "--for", "torchao", "--collector", f"{collector}/none/x"]) == 2
    assert "404: there is no incident; list them" in capsys.readouterr().err
    assert fix_command.main(["abc", "--for", "torchao"]) == 2
    assert "no collector" in capsys.readouterr().err
    assert fix_command.main(["abc", "--for", "torchao", "--collector", "http://127.0.0.1:9"]) == 2


def test_a_token_goes_to_the_collector_that_it_is_for_whatever_the_address_says(capsys, monkeypatch):
    of_own, of_other = [], []
    token = "t" * 20
    with listening(of_own) as own, listening(of_other) as other:
        monkeypatch.setenv("FP8WATCH_TOKEN", token)
        monkeypatch.setenv("FP8WATCH_COLLECTOR", f"{own}/")
        page = f"{other}/incidents/abc"
        assert fix_command.main([page, "--for", "torchao"]) == 0
        tell_incident("bisection", {}, page)
        assert of_other == []
        assert [path.split("?")[0] for path, _ in of_own] == [
            "/api/v1/incidents/abc/fix",
            "/v1/incidents/abc/bisection",
        ]
        assert {said for _, said in of_own} == {f"Bearer {token}"}
        monkeypatch.setenv("FP8WATCH_COLLECTOR", f"{own}/none/")  # which does not know it
        for tell in (
            lambda: tell_incident("bisection", {}, page),
            lambda: fix_command.fetch(page, "torchao", [], f"{own}/none"),
        ):
            with pytest.raises(
                (OSError, ValueError), match=rf"the token is for {own}/none alone; .* set FP8WATCH_COLLECTOR={other}"
            ):
                tell()
        assert of_other == []
        # said by hand; or no other is known, or named; or none to give away
        tell_incident("bisection", {}, page, token=token)
        assert fix_command.main([page, "--for", "torchao", "--collector", other]) == 0
        monkeypatch.delenv("FP8WATCH_COLLECTOR")
        assert fix_command.main([page, "--for", "torchao"]) == 0
        assert [said for _, said in of_other] == [f"Bearer {token}"] * 3
        monkeypatch.delenv("FP8WATCH_TOKEN")
        monkeypatch.setenv("FP8WATCH_COLLECTOR", own)
        assert fix_command.main([page, "--for", "torchao"]) == 0
        assert of_other[3:] == [("/api/v1/incidents/abc/fix?for=torchao", None)]


def test_the_command_knows_the_same_targets_as_the_collector():
    assert set(fix_command.TARGETS) == set(TARGETS)
