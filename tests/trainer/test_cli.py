"""The console command in a process of its own where exit codes and signals count, else in this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import tiny

import overspill
from overspill import cli
from overspill.trainer.config import make_config

COMMAND = [sys.executable, "-c", "from overspill.cli import main; main()"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(tmp_path: Path, model: Path) -> Path:
    """A config file that trains two steps and spills to disk."""
    tiny.texts(tmp_path / "train.jsonl", 4)
    data = {
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": "train.jsonl", "max_length": 64},
        "train": {"output_dir": "out", "max_steps": 2},
        "memory": {"gpu": None, "ram": "200MiB", "disk": {"path": "swap/here", "size": "50MiB"}},
        "device": "cpu",
    }
    file = tmp_path / "config.yaml"
    file.write_text(make_config(data, tmp_path).to_yaml())
    return file


class Command:
    """`overspill ...` in this process: its exit code and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: object) -> tuple[int, str, list[str]]:
        self._monkeypatch.setattr("sys.argv", ["overspill", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = self._capsys.readouterr()
        code = end.value.code
        return int(code or 0), out, [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


def test_train_saves_and_says_so(job: Path, command: Command) -> None:
    code, _, errors = command("train", job, "--set", "train.learning_rate=1e-4", "--set", "train.max_steps=1")
    assert (code, errors) == (0, [])
    saved = job.parent / "out"
    assert (saved / "model.safetensors").is_file()
    assert (saved / "tokenizer.json").is_file()
    assert "learning_rate: 0.0001" in (saved / "config.yaml").read_text()
    assert not list((job.parent / "swap" / "here").iterdir())
    assert not list(job.parent.glob(".out*"))


def test_plan_prints_and_leaves_nothing(job: Path, command: Command) -> None:
    before = sorted(job.parent.rglob("*"))
    code, out, errors = command("plan", job)
    assert (code, errors) == (0, [])
    assert "predicted" in out
    code, out, _ = command("plan", job, "--json")
    assert {tier["name"] for tier in json.loads(out)["tiers"]} == {"ram", "disk"}
    assert sorted(job.parent.rglob("*")) == before


def test_all_faults_of_a_config_are_shown_at_once(job: Path, command: Command) -> None:
    code, _, errors = command("train", job, "--set", "train.learning_rte=1", "--set", "model.dtype=bf61")
    assert code == cli.USER_ERROR
    assert len(errors) == 2
    assert any("did you mean learning_rate?" in line for line in errors)
    assert any("did you mean bf16?" in line for line in errors)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("train.output_dir", "train.jsonl/out", "is a file"),
        ("train.output_dir", "/proc/nowhere/out", "/proc/nowhere"),
        ("memory.ram", "100KiB", "the ram budget is too small"),
        ("device", "cuda:99", "torch sees"),
    ],
)
def test_faults_found_late_are_one_line_and_leave_nothing(
    key: str, value: str, message: str, job: Path, command: Command
) -> None:
    before = sorted(job.parent.rglob("*"))
    code, _, errors = command("train", job, "--set", f"{key}={value}")
    assert code == cli.USER_ERROR
    assert len(errors) == 1
    assert message in errors[0]
    assert sorted(job.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 100}, "is not among the model's 100"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "no causal language model"),
        ({"model_type": "nothing_known"}, "does not recognize this architecture"),
        ({"model_type": "other", "auto_map": {"AutoConfig": "code.Config"}}, "custom code"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(
    changes: dict[str, Any], message: str, job: Path, model: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job.parent / "odd"
    folder.mkdir()
    for file in model.glob("tok*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "code.py").write_text("raise SystemExit('the model ran its own code')\n")
    (folder / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | changes))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked whether to run the model's code"))
    code, _, errors = command("train", job, "--set", f"model.path={folder}", "--set", "model.init=random")
    assert code == cli.USER_ERROR
    assert len(errors) == 1
    assert message in errors[0]


def test_a_full_disk_is_one_line_and_a_bug_keeps_its_traceback(
    job: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> Any:
        def train(*_: object) -> None:
            raise error

        return train

    monkeypatch.setattr("overspill.trainer.run.train", fail(OSError(28, "No space left on device")))
    assert command("train", job)[::2] == (cli.USER_ERROR, ["error: No space left on device"])
    monkeypatch.setattr("overspill.trainer.run.train", fail(PermissionError(13, "Permission denied", "/x/y")))
    assert command("train", job)[::2] == (cli.USER_ERROR, ["error: /x/y: Permission denied"])
    for bug in (OSError("no number, no file"), KeyError("bug"), ValueError("bug")):
        monkeypatch.setattr("overspill.trainer.run.train", fail(bug))
        monkeypatch.setattr("sys.argv", ["overspill", "train", str(job)])
        with pytest.raises(type(bug)):
            cli.main()


def test_the_python_functions_take_a_file_name(job: Path) -> None:
    assert overspill.plan(str(job)).total_steps == 2
    assert overspill.train(job).steps == 2


def test_help_and_version_import_no_torch() -> None:
    code = (
        "import sys; from overspill.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    for arguments in (["--help"], ["train", "--help"], ["plan", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == overspill.__version__


def test_an_interrupted_run_ends_clean_with_130(job: Path) -> None:
    arguments = ["train", str(job), "--set", "train.max_steps=1000000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # A shell starts its background jobs with this signal ignored, and children inherit that.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(COMMAND + arguments, stderr=subprocess.PIPE, text=True, env=environment) as process:
        signal.signal(signal.SIGINT, inherited)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if any(path.stat().st_size for path in job.parent.glob(".out*/metrics.jsonl")):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == cli.INTERRUPTED, err
    assert "Traceback" not in err
    assert {path.name for path in job.parent.iterdir()} == {"config.yaml", "train.jsonl"}
