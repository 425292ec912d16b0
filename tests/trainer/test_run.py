"""Whole runs through the command, as a user would start them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import tiny
from support.plain import PlainTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from overspill import cli
from overspill.offload import AdamW
from overspill.trainer import budget, run
from overspill.trainer.config import Config, load_config, make_config
from overspill.trainer.data import Batches, load_dataset
from overspill.trainer.loss import causal_lm_loss, trained_tokens
from overspill.trainer.run import plan, train
from overspill.trainer.schedule import learning_rate


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    tiny.model(tmp_path / "model")
    tiny.texts(tmp_path / "train.jsonl", 18)
    tiny.texts(tmp_path / "eval.jsonl", 6, seed=1)
    return tmp_path


def config(workspace: Path, **changes: object) -> Config:
    data = {
        "model": {"path": "model", "dtype": "fp32"},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 64},
        "train": {
            "output_dir": "out", "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2, "warmup_steps": 1,
        },
        "memory": {"gpu": None, "ram": "200MiB"},
        "device": "cpu",
    }  # fmt: skip
    for key, value in changes.items():
        section, _, name = key.partition("__")
        data[section] = {**data[section], name: value} if name else value
    return make_config(data, workspace)


def test_a_run_matches_plain_training_and_loads(workspace: Path) -> None:
    settings = config(workspace, data__max_length=128)
    result = train(settings)
    assert result.eval_loss_after is not None
    assert result.eval_loss_before is not None
    assert result.eval_loss_after < result.eval_loss_before
    saved = AutoModelForCausalLM.from_pretrained(result.output_dir, dtype=torch.float32)
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    assert saved.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(result.output_dir)

    reference = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.float32).train()
    plain = PlainTrainer(reference, AdamW(), torch.float32)
    dataset = load_dataset(settings.data.train, settings.data, tokenizer)
    windows = list(Batches(dataset=dataset, batch_size=2, accumulation=2, seed=0, pad_id=0).epoch(0))
    for step in range(4):
        tokens = sum(map(trained_tokens, windows[step]))
        rate = learning_rate(step, kind="cosine", peak=1e-2, warmup_steps=1, total_steps=4)
        losses, _ = plain.step(windows[step], lambda m, b, n=tokens: causal_lm_loss(m, b, n), rate)
        assert result.train_losses[step] == pytest.approx(sum(losses), abs=1e-6)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(saved.get_parameter(name), parameter, rtol=0, atol=1e-5)
    records = [json.loads(line) for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert (result.output_dir / "config.yaml").read_text() == settings.to_yaml()


def test_the_untied_head_is_saved_apart(workspace: Path) -> None:
    tiny.model(workspace / "model", tie_word_embeddings=False)
    result = train(config(workspace))
    saved = AutoModelForCausalLM.from_pretrained(result.output_dir)
    assert not torch.equal(saved.lm_head.weight, saved.model.embed_tokens.weight)


@pytest.mark.parametrize("memory", [{"gpu": "1100KiB", "ram": "2MiB", "disk": {"path": "swap", "size": "20MiB"}}])
def test_placements_end_in_the_same_weights(workspace: Path, memory: dict[str, object]) -> None:
    one = train(config(workspace))
    other = train(config(workspace, memory=memory, train__output_dir="spilled"))
    assert one.train_losses == other.train_losses
    left, right = (AutoModelForCausalLM.from_pretrained(r.output_dir) for r in (one, other))
    for name, parameter in left.named_parameters():
        assert torch.equal(parameter, right.get_parameter(name)), name
    assert list((workspace / "swap").iterdir()) == []


def test_accumulation_weighs_tokens_not_microbatches(workspace: Path) -> None:
    whole = train(config(workspace, train__per_device_train_batch_size=4, train__gradient_accumulation_steps=1))
    parts = train(
        config(
            workspace, train__per_device_train_batch_size=1, train__gradient_accumulation_steps=4,
            train__output_dir="parts",
        )
    )  # fmt: skip
    assert parts.train_losses == pytest.approx(whole.train_losses, abs=1e-5)


def test_plan_reads_no_weights_and_writes_nothing(workspace: Path) -> None:
    (workspace / "model" / "model.safetensors").unlink()
    before = sorted(workspace.rglob("*"))
    report = plan(config(workspace))
    assert sorted(workspace.rglob("*")) == before
    text = json.loads(report.to_json())
    assert text["moved_bytes"] == {}
    assert text["predicted_step_s"] > 0
    assert "beside the fast tier" in str(report)


@pytest.mark.parametrize(
    "asked, bf16_rate, says, saved",
    [
        ("auto", 5e9, "computes in fp32\n", "fp32"),
        ("auto", 25e9, "computes in bf16, which this device multiplies at 2.5 x its rate in fp32\n", "bf16"),
        ("bf16", 5e9, "at 0.5 x its rate in fp32; model.dtype: fp32 computes faster\n", "bf16"),
    ],
)
def test_the_dtype_of_auto_is_told_and_saved(
    asked: str, bf16_rate: float, says: str, saved: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {torch.bfloat16: bf16_rate, torch.float32: 10e9}
    monkeypatch.setattr(budget, "matmul_flops_per_s", lambda device, dtype: rates[dtype])
    settings = config(workspace, model__dtype=asked)
    assert says in str(plan(settings))
    result = train(settings)
    assert load_config(result.output_dir / "config.yaml").model.dtype == saved
    weights = AutoModelForCausalLM.from_pretrained(result.output_dir, dtype="auto")
    assert weights.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[saved]


def run_cli(*arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["overspill", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("data.train", "nowhere.jsonl", "cannot be read: No such file"),
        ("data.train", "empty.jsonl", "the file has no rows"),
        ("data.max_length", "4096", "is more than the model's 128 positions"),
        ("data.overlength", "error", "data.max_length is"),
        ("model.path", "nowhere", "neither a model folder"),
        ("model.frozen", "['*']", "every parameter is frozen"),
        ("model.frozen", "['nothing.*']", "matches no parameter"),
        ("memory.ram", "1MiB", "the ram budget is too small"),
        ("memory.disk", "{path: train.jsonl/x, size: 1MiB}", "memory.disk.path"),
        ("train.warmup_steps", "50", "is more than the 4 steps"),
        ("train.learning_rat", "1", "did you mean learning_rate?"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    key, value, message, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "empty.jsonl").touch()
    file = workspace / "config.yaml"
    file.write_text(config(workspace, data__max_length=16).to_yaml())
    before = sorted(workspace.rglob("*"))
    code, err = run_cli("train", str(file), "--set", f"{key}={value}", capsys=capsys, monkeypatch=monkeypatch)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in err
    assert sorted(workspace.rglob("*")) == before


def test_one_row_trains_and_a_lost_weight_file_does_not(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.texts(workspace / "train.jsonl", 1)
    result = train(config(workspace, train__max_steps=2))
    assert len(result.train_losses) == 2
    file = workspace / "config.yaml"
    file.write_text(config(workspace, train__output_dir="again").to_yaml())
    weights = workspace / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, err = run_cli("train", str(file), capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    assert "not a readable safetensors file" in err
    assert not (workspace / "again").exists()
    assert not list(workspace.glob(".again*"))


def test_a_foreign_output_folder_is_refused(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "out").mkdir()
    (workspace / "out" / "thesis.txt").write_text("mine")
    file = workspace / "config.yaml"
    file.write_text(config(workspace).to_yaml())
    code, err = run_cli("train", str(file), capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    assert "is not empty and no overspill run" in err
    assert (workspace / "out" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("norm", [1.0, None])
def test_losses_that_are_not_finite_never_pass_as_progress(
    norm, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = workspace / "config.yaml"
    changes = {"train__learning_rate": 1e30, "train__lr_scheduler_type": "constant", "train__warmup_steps": 0}
    settings = config(
        workspace, data__eval=None, train__max_steps=8, train__max_skipped_steps=2, train__max_grad_norm=norm, **changes
    )
    file.write_text(settings.to_yaml())
    code, err = run_cli("train", str(file), capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    assert "not finite" in err
    assert not (workspace / "out").exists()


def test_help_and_version() -> None:
    runner = CliRunner()
    shown = runner.invoke(cli.app, ["--help"])
    assert shown.exit_code == 0
    assert "train" in shown.output
    assert "plan" in shown.output
    assert runner.invoke(cli.app, ["--version"]).output.strip()


def test_a_held_out_batch_larger_than_any_training_batch_is_planned_for(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.texts(workspace / "train.jsonl", 1)
    asked = []
    build = run.Job.build

    def recording(*arguments: object, **settings: object) -> object:
        asked.append(settings["max_tokens"])
        return build(*arguments, **settings)

    monkeypatch.setattr(run.Job, "build", recording)
    plan(config(workspace, train__per_device_train_batch_size=4))
    ((rows, _),) = asked
    assert rows == 4


def test_a_padding_token_without_an_embedding_is_not_used(workspace: Path) -> None:
    known = len(tiny.tokenizer())
    tiny.model(workspace / "model", vocab_size=known)
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    tokenizer.add_special_tokens({"pad_token": "<added>"})
    tokenizer.save_pretrained(workspace / "model")
    assert tokenizer.pad_token_id == known
    assert len(train(config(workspace)).train_losses) == 4
