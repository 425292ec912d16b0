from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import tiny

from overspill.trainer.config import DataConfig
from overspill.trainer.data import Batches, DataError, Dataset, Row, collate, load_dataset
from overspill.trainer.loss import IGNORED


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


def config(path: Path, **changes: object) -> DataConfig:
    return DataConfig.model_validate({"train": path, **changes})


def load(path: Path, tokenizer, **changes: object) -> Dataset:
    return load_dataset(path, config(path, **changes), tokenizer)


def test_every_text_ends_with_a_trained_end_token(tmp_path: Path, tokenizer) -> None:
    data = load(tiny.texts(tmp_path / "t.jsonl", 5), tokenizer)
    assert len(data.rows) == 5
    for row in data.rows:
        assert row.input_ids[-1] == row.labels[-1] == tokenizer.eos_token_id
        assert row.input_ids.count(tokenizer.eos_token_id) == 1


def test_only_the_response_is_trained(tmp_path: Path, tokenizer) -> None:
    path = tiny.jsonl(tmp_path / "t.jsonl", [{"prompt": "red stone river", "response": " rain"}])
    (row,) = load(path, tokenizer).rows
    prompt = len(tokenizer("red stone river")["input_ids"])
    assert set(row.labels[:prompt]) == {IGNORED}
    assert row.labels[prompt:] == row.input_ids[prompt:]
    assert row.labels[-1] == tokenizer.eos_token_id


def test_padding_is_masked_by_position_not_by_token(tokenizer) -> None:
    end = tokenizer.eos_token_id
    batch = collate([Row((5, 6, end), (5, 6, end)), Row((7, end), (7, end))], pad_id=end)
    assert batch["input_ids"].tolist() == [[5, 6, end], [7, end, end]]
    assert batch["labels"].tolist() == [[5, 6, end], [7, end, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("policy, rows, truncated, dropped", [("truncate", 3, 2, 0), ("drop", 1, 0, 2)])
def test_long_rows_follow_the_policy(policy, rows, truncated, dropped, tmp_path: Path, tokenizer) -> None:
    path = tiny.jsonl(tmp_path / "t.jsonl", [{"text": "red " * n} for n in (5, 400, 20_000)])
    data = load(path, tokenizer, max_length=32, overlength=policy)
    assert (len(data.rows), data.truncated, data.dropped) == (rows, truncated, dropped)
    assert max(len(row.input_ids) for row in data.rows) <= 32
    cut = [row for row in data.rows if len(row.input_ids) == 32]
    assert all(row.input_ids[-1] != tokenizer.eos_token_id for row in cut)


def test_long_rows_can_be_an_error(tmp_path: Path, tokenizer) -> None:
    path = tiny.jsonl(tmp_path / "t.jsonl", [{"text": "red"}, {"text": "red " * 100}])
    with pytest.raises(DataError, match=r"row 2 has \d+ tokens and data.max_length is 32"):
        load(path, tokenizer, max_length=32, overlength="error")


def test_rows_without_a_trained_token_are_counted_and_named(tmp_path: Path, tokenizer) -> None:
    long = {"prompt": "red stone " * 40, "response": "rain"}
    path = tiny.jsonl(tmp_path / "t.jsonl", [long, {"prompt": "red", "response": " rain"}, long])
    data = load(path, tokenizer, max_length=32)
    assert data.untrained == (1, 3)
    assert len(data.rows) == 1
    assert "2 without a trained token and skipped (rows 1, 3)" in str(data)
    with pytest.raises(DataError, match="none of its 2 rows can be trained on"):
        load(tiny.jsonl(tmp_path / "u.jsonl", [long, long]), tokenizer, max_length=32)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", "", "the file has no rows"),
        ("a.txt", "\n  \n", "the file has no rows"),
        ("a.jsonl", '{"text": "x"}\n{"text": \n', r"a.jsonl:2: not JSON: .* at column"),
        ("a.jsonl", '{"body": "x"}\n', r"a.jsonl:1: no column 'text' .* it has 'body'"),
        ("a.jsonl", '{"text": 3}\n', "column text holds int, not text"),
        ("a.jsonl", "[1]\n", "a row is a JSON object with columns, not list"),
        ("a.csv", "x\n", "only .txt and .jsonl"),
    ],
)
def test_files_that_cannot_be_read_say_why(name, content, message, tmp_path: Path, tokenizer) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message) as error:
        load(path, tokenizer)
    assert "\n" not in str(error.value)


def test_missing_and_binary_files(tmp_path: Path, tokenizer) -> None:
    with pytest.raises(DataError, match="No such file"):
        load(tmp_path / "nowhere.txt", tokenizer)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8 text"):
        load(tmp_path / "b.txt", tokenizer)


def test_packing_uses_every_token_once(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "t.txt"
    path.write_text("\n".join(tiny.lines(20)) + "\n")
    packed, plain = load(path, tokenizer, max_length=50, packing=True), load(path, tokenizer)
    assert {len(row.input_ids) for row in packed.rows[:-1]} == {50}
    tokens = [t for row in packed.rows for t in row.input_ids]
    assert tokens == [t for row in plain.rows for t in row.input_ids][: len(tokens)]


def batches(rows: int, size: int, accumulation: int) -> Batches:
    dataset = Dataset(
        path=Path("x"), rows=tuple(Row((n, n), (n, n)) for n in range(rows)), truncated=0, dropped=0, untrained=()
    )
    return Batches(dataset=dataset, batch_size=size, accumulation=accumulation, seed=3, pad_id=0)


@pytest.mark.parametrize(
    "rows, size, accumulation, windows", [(10, 2, 3, [3, 2]), (9, 4, 4, [3]), (3, 4, 1, [1]), (1, 1, 100, [1])]
)
def test_every_row_is_used_every_epoch(rows, size, accumulation, windows) -> None:
    plan = batches(rows, size, accumulation)
    orders = []
    for epoch in range(3):
        made = list(plan.epoch(epoch))
        assert [len(window) for window in made] == windows
        seen = [int(i) for window in made for batch in window for i in batch["input_ids"][:, 0]]
        assert sorted(seen) == list(range(rows))
        orders.append(seen)
    assert plan.steps_per_epoch == len(windows)
    assert rows < 3 or orders[0] != orders[1]
    again = [int(i) for w in plan.epoch(1) for b in w for i in b["input_ids"][:, 0]]
    assert again == orders[1]


def test_text_survives(tmp_path: Path, tokenizer) -> None:
    text = "Grüße, 世界 🌍 and a tab\there"
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"text": text}) + "\r\n", encoding="utf-8")
    (row,) = load(path, tokenizer).rows
    assert tokenizer.decode(torch.tensor(row.input_ids[:-1])) == text
