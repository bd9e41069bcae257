"""Each example trains in a process of its own, on a CPU, and what it recorded is in the collector afterwards.

With every change they run in forks of a process that has imported torch; the long test runs the commands of the README.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import zygote as zygote_module
from faults.zygote import Zygote

from fp8watch.demo.collector import incidents, running_collector

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
IMITATION = ROOT / "tests" / "te" / "surface"


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_collector(tmp_path_factory.mktemp("collector"), 0) as url:
        yield url


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("FP8WATCH", "TORCHELASTIC"))]:
            patch.delenv(name)
        made = zygote_module.start()
    yield made
    assert made.process.stdin is not None
    assert made.process.stdout is not None
    made.process.stdin.close()
    assert made.process.wait(60) == 0
    made.process.stdout.close()


def execute(command: list[str], folder: Path, status: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FP8WATCH", "TORCHELASTIC"))}
    env |= {"FP8WATCH_SPOOL_DIR": str(folder / "spool"), "OMP_NUM_THREADS": "1"} | environ
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def example(zygote: Zygote, tmp_path: Path) -> Callable[..., str]:
    """Runs an example and returns what it printed."""

    def run(name: str, *arguments: str, **environ: str) -> str:
        environ.setdefault("FP8WATCH_SPOOL_DIR", str(tmp_path / "spool"))
        return "\n".join(zygote.run(tmp_path, str(EXAMPLES / name), *arguments, **environ))

    return run


def sync(folder: Path, collector: str) -> str:
    return execute([sys.executable, "-m", "fp8watch", "sync", "--collector", collector], folder).stdout


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", printed)}


def run_id(printed: str) -> str:
    return re.findall(r"run ([\w-]+)", printed)[-1]


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return json.loads(answer.read())


def stored(collector: str, run: str, last_step: int) -> dict[str, Any]:
    """The run, once all of its steps are there."""
    deadline = time.monotonic() + 60
    told: dict[str, Any] = {}
    while time.monotonic() < deadline:
        told = get(f"{collector}/api/v1/runs/{run}")
        if told["status"] == "ended" and told["last_step"] == last_step:
            return told
        time.sleep(0.1)
    raise AssertionError(told)


def test_every_example_is_tested_and_listed() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    tests = Path(__file__).read_text()
    assert {name for name in names if f'"{name}"' not in tests} == set()
    assert set(re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text(), re.M)) == names


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_uses_the_public_names_only(path: Path) -> None:
    text = path.read_text()
    assert 30 <= len(text.splitlines()) <= 75
    assert set(re.findall(r"^(?:import|from) (fp8watch\S*)", text, re.M)) == {"fp8watch"}
    assert not re.findall(r"fp8watch\._|watch\._", text)


def test_the_plain_loop_learns_and_its_spool_can_be_sent(
    example: Callable[..., str], tmp_path: Path, collector: str
) -> None:
    printed = example("plain_loop.py")
    seen = losses(printed)
    assert seen[29] < 0.5 * seen[0]
    assert "fp8watch sync" in printed
    assert "660 records" in sync(tmp_path, collector)  # 20 operands and 2 norms in 30 steps
    told = stored(collector, run_id(printed), 29)
    assert (told["name"], told["num_sites"], told["num_open_incidents"]) == ("plain loop", 20 + 2, 0)
    address = f"{collector}/api/v1/runs/{run_id(printed)}/scalars?from=0&to=100&points=100&name="
    recorded = get(address + "loss")
    assert recorded["steps"] == list(range(30))
    assert recorded["values"][29] == pytest.approx(seen[29], abs=1e-3)
    assert len(get(address + "grad_norm")["values"]) == 30


def test_micro_batches_are_one_step_each_that_a_collector_gets_live(
    example: Callable[..., str], collector: str
) -> None:
    printed = example("gradient_accumulation.py", FP8WATCH_COLLECTOR=collector)
    seen = losses(printed)
    assert seen[19] < 0.8 * seen[0]
    assert "20 steps recorded" in printed
    run = run_id(printed)
    stored(collector, run, 19)
    address = f"{collector}/api/v1/runs/{run}"
    assert get(f"{address}/scalars?name=loss&from=0&to=100&points=100")["values"][0] == pytest.approx(seen[0], abs=1e-3)
    site = next(s["id"] for s in get(f"{address}/sites")["items"] if s["operand"] == "input")
    calls = get(f"{address}/series?site={site}&field=num_calls&from=0&to=100&points=100")["values"]
    assert calls == [4] * 20
    assert incidents(collector, run) == []


def test_a_resumed_job_continues_its_step_number_its_run_and_its_scales(
    example: Callable[..., str], tmp_path: Path, collector: str
) -> None:
    first = example("checkpoint_and_resume.py", "--checkpoint", str(tmp_path / "checkpoint.pt"))
    second = example("checkpoint_and_resume.py", "--checkpoint", str(tmp_path / "checkpoint.pt"))
    assert list(losses(first)) == [0, 5, 10, 14]
    assert list(losses(second)) == [15, 20, 25, 29]
    assert losses(second)[15] < losses(first)[14]
    assert run_id(second) == run_id(first)
    sync(tmp_path, collector)
    run = run_id(first)
    stored(collector, run, 29)
    recorded = get(f"{collector}/api/v1/runs/{run}/scalars?name=loss&from=0&to=100&points=100")
    assert recorded["steps"] == list(range(30))
    scales = get(f"{collector}/api/v1/runs/{run}/sites")["items"]
    site = next(s["id"] for s in scales if s["operand"] == "input")
    series = get(f"{collector}/api/v1/runs/{run}/series?site={site}&field=scale_inv_max&from=0&to=100&points=100")
    assert series["values"][0] == 1.0, "delayed scaling begins with scale 1"
    assert series["values"][15] != 1.0, "and a resumed job does not begin again"


def ddp_as_one_run(printed: list[str], tmp_path: Path, collector: str) -> None:
    first, second = (losses(p) for p in printed)
    assert list(first) == list(second) == [0, 5, 10, 15, 19]
    assert first[0] != second[0], "each rank has data of its own"
    assert max(first[19] / first[0], second[19] / second[0]) < 0.8
    assert len({run_id(p) for p in printed}) == 1
    sync(tmp_path, collector)
    told = stored(collector, run_id(printed[0]), 19)
    assert (told["world_size"], told["num_open_incidents"]) == (2, 0)


def test_two_ranks_are_one_run(zygote: Zygote, tmp_path: Path, collector: str) -> None:
    spool = {"FP8WATCH_SPOOL_DIR": str(tmp_path / "spool")}
    envs = [spool | rank for rank in zygote_module.ranks(2)]
    ddp_as_one_run(zygote.run_ranks(tmp_path, str(EXAMPLES / "ddp.py"), envs=envs), tmp_path, collector)


def test_each_block_of_the_training_page_runs_and_is_recorded(zygote: Zygote, tmp_path: Path, collector: str) -> None:
    lines = zygote.run(
        tmp_path, "examples.page_snippets", FP8WATCH_COLLECTOR=collector, FP8WATCH_SPOOL_DIR=str(tmp_path / "spool")
    )
    said = json.loads(lines[-1])
    num_steps = {heading: of["num_steps"] for heading, of in said.items()}
    assert num_steps.pop("Gradient accumulation") == 3
    assert num_steps == dict.fromkeys(
        ("A loop", "GradScaler", "Schedules", "Evaluation", "Resume", "Many ranks", "Notebooks"), 4
    )
    assert all(of["internal_errors"] == {} and of["loss"] == "seen" for of in said.values())

    def values(heading: str, name: str) -> dict[int, float]:
        run = said[heading]["run_id"]
        stored(collector, run, said[heading]["last_step"])
        found = get(f"{collector}/api/v1/runs/{run}/scalars?name={name}&from=0&to=100&points=100")
        return {k: v for k, v in zip(found["steps"], found["values"], strict=True) if v is not None}

    def calls(heading: str) -> list[float]:
        address = f"{collector}/api/v1/runs/{said[heading]['run_id']}"
        site = next(s["id"] for s in get(f"{address}/sites")["items"] if s["operand"] == "input")
        return list(get(f"{address}/series?site={site}&field=num_calls&from=0&to=100&points=100")["values"])

    scales = values("GradScaler", "loss_scale")
    assert [scales[step] for step in (1, 2, 3)] == [65536.0, 32768.0, 32768.0]  # the second step was skipped
    assert list(values("Schedules", "lr").values()) == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    assert list(values("Evaluation", "accuracy")) == [1, 3]
    assert list(values("A loop", "loss")) == [0, 1, 2, 3]
    assert (calls("Gradient accumulation"), calls("Evaluation")) == ([4] * 3, [1] * 4)
    assert list(values("Resume", "loss")) == [7, 8, 9, 10]
    assert said["Resume"]["run_id"] == "resumed"
    assert said["Many ranks"]["source"] == "torch.distributed"
    assert "\n" not in said["Notebooks"]["repr"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain_loop.py", "gradient_accumulation.py", "checkpoint_and_resume.py"])
def test_a_command_of_the_readme_trains(name: str, tmp_path: Path) -> None:
    assert f"`python examples/{name}`" in (EXAMPLES / "README.md").read_text()
    seen = list(losses(execute([sys.executable, str(EXAMPLES / name)], tmp_path).stdout).values())
    assert seen[-1] < 0.8 * seen[0]


@pytest.mark.heavy(8, "examples/ddp.py")
def test_torchrun_launches_two_ranks_of_one_run(tmp_path: Path, collector: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    execute([*torchrun, "--redirects", "3", str(EXAMPLES / "ddp.py")], tmp_path)
    printed = [p.read_text() for rank in (0, 1) for p in tmp_path.rglob(f"{rank}/stdout.log")]
    ddp_as_one_run(printed, tmp_path, collector)


def test_modules_in_fp8_are_observed_over_an_imitation_of_transformer_engine(
    example: Callable[..., str], tmp_path: Path, collector: str
) -> None:
    printed = example("transformer_engine_layers.py", PYTHONPATH=str(IMITATION))
    assert losses(printed)[19] < 0.5 * losses(printed)[0]
    assert "10 sites observed" in printed
    sync(tmp_path, collector)
    stored(collector, run_id(printed), 19)
    sites = get(f"{collector}/api/v1/runs/{run_id(printed)}/sites")["items"]
    assert {s["backend"] for s in sites if s["operand"] == "weight"} == {"transformer_engine"}


def test_without_transformer_engine_its_example_says_so_and_fails(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("transformer_engine is installed")
    done = execute([sys.executable, str(EXAMPLES / "transformer_engine_layers.py")], tmp_path, status=1)
    assert done.stdout == ""
    assert "this example needs Transformer Engine: pip install 'transformer_engine[pytorch]'" in done.stderr


def test_transformer_engine_itself_is_observed(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("transformer_engine is not installed; `make test-te` runs the example on its Python packages")
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no GPU of compute capability 9.0 or later")
    printed = execute([sys.executable, str(EXAMPLES / "transformer_engine_layers.py")], tmp_path).stdout
    assert losses(printed)[19] < losses(printed)[0]
    assert "10 sites observed" in printed
