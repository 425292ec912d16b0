from __future__ import annotations

from pathlib import Path

import pytest

from overspill.trainer.config import ConfigError, load_config, make_config, parse_bytes

GOOD = """\
model:
  path: model
  dtype: fp32
data:
  train: train.jsonl
train:
  output_dir: out
  max_steps: 6
  learning_rate: 2e-5
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def faults(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(file, overrides)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml"]
    for fault in error.value.faults:
        assert "\n" not in fault
    return [fault.replace(str(file), "FILE") for fault in error.value.faults]


def test_a_good_config_resolves_and_loads_back(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = load_config(write(tmp_path, GOOD), ["memory.ram=2GiB", "train.lr_scheduler_type=linear"])
    assert config.train.learning_rate == 2e-5
    assert config.memory.ram == 2 << 30
    assert config.train.lr_scheduler_type == "linear"
    assert config.model.path == str(tmp_path / "model")
    assert config.train.output_dir == tmp_path / "out"
    again = tmp_path / "resolved.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config


@pytest.mark.parametrize("text", ["1e-5", "2E-4", "0.001", "1"])
def test_numbers_are_numbers(text: str, tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD.replace("2e-5", text)))
    assert config.train.learning_rate == float(text)


@pytest.mark.parametrize(
    "key, value",
    [
        ("train.learning_rate", '"fast"'), ("train.learning_rate", "-1"), ("train.learning_rate", ".nan"),
        ("train.learning_rate", "true"), ("train.per_device_train_batch_size", "0"),
        ("train.per_device_train_batch_size", "2.5"), ("train.per_device_train_batch_size", "true"),
        ("train.gradient_accumulation_steps", "0"), ("train.max_steps", "1_000"), ("train.seed", "010"),
        ("model.dtype", "bf61"), ("memory.ram", "20 gigs"), ("memory.ram", "-5"), ("data.packing", "no"),
        ("device", "gpu"),
    ],
)  # fmt: skip
def test_wrong_values_name_key_and_value(key: str, value: str, tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, GOOD, f"{key}={value}")
    assert fault.startswith(f"--set: {key}: ")
    assert value.strip('"') in fault or value in ("true", ".nan")


def test_all_faults_at_once_with_lines(tmp_path: Path) -> None:
    text = GOOD.replace("learning_rate", "learning_rte").replace("fp32", "bf61").replace("path: model", "path: 3")
    found = faults(tmp_path, text)
    assert "FILE:9: train.learning_rte: unknown key; did you mean learning_rate?" in found
    assert "FILE:3: model.dtype: 'bf61' is not one of auto, bf16, fp16, fp32; did you mean bf16?" in found
    assert any(fault.startswith("FILE:2: model.path: 3: ") for fault in found)
    assert len(found) == 3


def test_a_key_in_the_wrong_section_is_pointed_to_the_right_one(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, GOOD + "memory:\n  max_length: 4\n")
    assert fault == "FILE:11: memory.max_length: unknown key; did you mean data.max_length?"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n- b\n", "a config is a mapping of sections, not a list"),
        (GOOD + "  max_steps: 7\n", "FILE:10: train.max_steps: given twice, first in line 8"),
        (
            GOOD.replace("  path: model\n  dtype: fp32\n", "  - a\n"),
            "FILE:1: model: a section with keys is wanted, not a list",
        ),
        (GOOD.replace("  path", "\tpath"), "FILE:2: a tab is used for indenting"),
        (GOOD.replace("  max_steps: 6\n", ""), "train: give max_steps or num_train_epochs"),
        (GOOD.replace("  train: train.jsonl\n", "  max_length: 8\n"), "data.train: missing"),
    ],
)
def test_files_that_are_no_config(text: str, message: str, tmp_path: Path) -> None:
    assert any(message in fault for fault in faults(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_sizes() -> None:
    assert parse_bytes("20GiB") == 20 << 30
    assert parse_bytes("512 MiB") == 512 << 20
    assert parse_bytes("20GB") == 20 * 10**9
    assert parse_bytes("1.5KiB") == 1536
    assert parse_bytes(7) == 7
    for wrong in ("20 gigs", "", "GiB", "1e9", "1,5GiB"):
        with pytest.raises(ValueError, match="not a size"):
            parse_bytes(wrong)


def test_from_a_mapping(tmp_path: Path) -> None:
    data = {"model": {"path": "m"}, "data": {"train": "t.txt"}, "train": {"output_dir": "o", "max_steps": 1}}
    assert make_config(data, tmp_path).data.train == tmp_path / "t.txt"
    with pytest.raises(ConfigError, match=r"config: train\.max_step: unknown key; did you mean max_steps"):
        make_config(data | {"train": {"output_dir": "o", "max_step": 1}})


@pytest.mark.parametrize(
    "override, message",
    [
        ("nope.x=1", "--set: nope: unknown key"),
        ("memory.disk={path: swap, size: 20 gigs}", "--set: memory.disk.size: '20 gigs': not a size"),
        ("model.frozen=embed*", "--set: model.frozen: 'embed*': a list is wanted"),
        ("data.train=[a]", "--set: data.train: ['a']: a path is wanted"),
        ("device=cuda:x", "--set: device: 'cuda:x': not a device; it is auto, cpu, cuda"),
        ("train.seed=99999999999999999999999", "--set: train.seed: 99999999999999999999999: "),
        ("max_steps", "--set max_steps: write it as --set dotted.key=value"),
        ("train.max_steps.x=3", "--set train.max_steps.x=3: max_steps is not a section"),
        ("train.seed=[1", "--set train.seed=[1: "),
    ],
)
def test_faults_of_overrides_are_placed_there(override: str, message: str, tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, GOOD + "memory:\n  disk:\n    path: swap\n    size: 1GiB\n", override)
    assert fault.startswith(message)


def test_an_override_can_fill_a_section_that_is_null(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD + "memory: {disk: null}\n"), ["memory.disk.path=swap"])
    assert config.memory.disk is not None
    assert config.memory.disk.path == tmp_path / "swap"


@pytest.mark.parametrize("name", ["1e5", "010", "no", "~", "0o7", "1:30", "2020-01-01", "a: b", " x"])
def test_any_text_survives_the_resolved_config(name: str, tmp_path: Path) -> None:
    data = {"model": {"path": "m"}, "data": {"train": "t.txt", "text_column": name}}
    config = make_config(data | {"train": {"output_dir": "o", "max_steps": 1}}, tmp_path)
    assert load_config(write(tmp_path, config.to_yaml())) == config


@pytest.mark.parametrize("extra", ["x: \x00\n", "? [a]\n: 1\n", "device: !!int abc\n", "x: &x [*x]\n"])
def test_yaml_that_breaks_the_reader_is_one_line(extra: str, tmp_path: Path) -> None:
    assert len(faults(tmp_path, GOOD + extra)) == 1
