"""Local text and JSONL as rows of token ids with labels, and the microbatches of every optimizer step.

.txt: one text a line, empty lines skipped. .jsonl: one object a line with the text column, or with `prompt` and
`response`, of which only the response is trained. Every text ends with the end-of-text token, which is trained.
With packing, texts are joined and cut into rows of exactly `max_length`; the last, shorter row is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .config import DataConfig
from .loss import IGNORED


class DataError(ValueError):
    """The data cannot be trained on; one line that names the file and the row."""


@dataclass(frozen=True, slots=True)
class Row:
    input_ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def trained_tokens(self) -> int:
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Rows that can be trained on, and what became of the others."""

    path: Path
    rows: tuple[Row, ...]
    truncated: int
    dropped: int
    untrained: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(len(row.input_ids) for row in self.rows)

    @property
    def trained_tokens(self) -> int:
        return sum(row.trained_tokens for row in self.rows)

    def __str__(self) -> str:
        notes = [f"{len(self.rows)} rows", f"{self.trained_tokens} trained tokens", f"longest {self.longest}"]
        if self.truncated:
            notes.append(f"{self.truncated} truncated")
        if self.dropped:
            notes.append(f"{self.dropped} too long and dropped")
        if self.untrained:
            shown = ", ".join(map(str, self.untrained[:5])) + (", ..." if len(self.untrained) > 5 else "")
            notes.append(f"{len(self.untrained)} without a trained token and skipped (rows {shown})")
        return f"{self.path.name}: " + ", ".join(notes)


def load_dataset(path: Path, config: DataConfig, tokenizer: Any) -> Dataset:
    """Read and tokenize one file. Raises DataError for anything that cannot be trained on as it stands."""
    encode = _encoder(tokenizer)
    texts = [(number, encode(text)) for number, text in _texts(path, config)]
    if not texts:
        raise DataError(f"{path}: the file has no rows")
    if config.packing:
        return _pack(path, [row for _, row in texts], config.max_length)
    rows, untrained = [], []
    truncated = dropped = 0
    for number, row in texts:
        if len(row.input_ids) > config.max_length:
            if config.overlength == "error":
                raise DataError(
                    f"{path}: row {number} has {len(row.input_ids)} tokens and data.max_length is {config.max_length}; "
                    "raise it, or set data.overlength to truncate or drop"
                )
            if config.overlength == "drop":
                dropped += 1
                continue
            truncated += 1
            row = Row(row.input_ids[: config.max_length], row.labels[: config.max_length])
        if row.trained_tokens:
            rows.append(row)
        else:
            untrained.append(number)
    if not rows:
        raise DataError(
            f"{path}: none of its {len(texts)} rows can be trained on: {len(untrained)} have no trained token within "
            f"data.max_length {config.max_length}, {dropped} are longer and dropped"
        )
    return Dataset(path=path, rows=tuple(rows), truncated=truncated, dropped=dropped, untrained=tuple(untrained))


def _pack(path: Path, rows: list[Row], max_length: int) -> Dataset:
    ids = [token for row in rows for token in row.input_ids]
    labels = [label for row in rows for label in row.labels]
    packed = [
        Row(tuple(ids[start : start + max_length]), tuple(labels[start : start + max_length]))
        for start in range(0, len(ids), max_length)
    ]
    usable = tuple(row for row in packed if row.trained_tokens)
    if not usable:
        raise DataError(f"{path}: its {len(ids)} tokens are too few to train on")
    untrained = tuple(number for number, row in enumerate(packed, start=1) if not row.trained_tokens)
    return Dataset(path=path, rows=usable, truncated=0, dropped=0, untrained=untrained)


def _texts(path: Path, config: DataConfig) -> Iterator[tuple[int, str | tuple[str, str]]]:
    """(row number from 1, text or (prompt, response)) of every row."""
    if path.suffix not in (".txt", ".jsonl"):
        raise DataError(f"{path}: only .txt and .jsonl files are read")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.rstrip("\r\n") if path.suffix == ".txt" else _record(path, number, line, config)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _record(path: Path, number: int, line: str, config: DataConfig) -> str | tuple[str, str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not JSON that can be read: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}:{number}: a row is a JSON object with columns, not {type(record).__name__}")
    for columns in ((config.text_column,), ("prompt", "response")):
        if all(column in record for column in columns):
            values = [record[column] for column in columns]
            for column, value in zip(columns, values, strict=True):
                if not isinstance(value, str):
                    raise DataError(f"{path}:{number}: column {column} holds {type(value).__name__}, not text")
                if _has_lone_surrogate(value):
                    raise DataError(f"{path}:{number}: column {column} holds half a surrogate pair, not text")
            return values[0] if len(values) == 1 else (values[0], values[1])
    raise DataError(
        f"{path}:{number}: no column {config.text_column!r} and no columns 'prompt' and 'response'; "
        f"it has {', '.join(map(repr, record)) or 'none'}"
    )


def _has_lone_surrogate(text: str) -> bool:
    """JSON can spell one (`"\\ud800"`); tokenizers fail on it far from the row."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _encoder(tokenizer: Any) -> Callable[[str | tuple[str, str]], Row]:
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError("the tokenizer has no end-of-text token (eos_token), so a model could never learn to stop")

    begin = tokenizer.bos_token
    ends_by_itself = [tokenizer("a", add_special_tokens=special)["input_ids"][-1] == end for special in (True, False)]

    def ids_of(text: str) -> list[int]:
        # A text from a chat template may bring its begin token along; the tokenizer would put a second one before it.
        ids: list[int] = tokenizer(text, add_special_tokens=not (begin and text.startswith(begin)))["input_ids"]
        return ids

    def encode(text: str | tuple[str, str]) -> Row:
        if isinstance(text, str):
            ids = _with_end(ids_of(text), end)
            return Row(tuple(ids), tuple(ids))
        prompt = ids_of(text[0])
        if ends_by_itself == [True, False] and not (begin and text[0].startswith(begin)):
            prompt = prompt[:-1]  # not an end token of the prompt's own, which closes a turn of a chat
        response = _with_end(tokenizer(text[1], add_special_tokens=False)["input_ids"], end)
        return Row((*prompt, *response), (*[IGNORED] * len(prompt), *response))

    return encode


def _with_end(ids: list[int], end: int) -> list[int]:
    return ids if ids and ids[-1] == end else [*ids, end]


def collate(rows: list[Row], pad_id: int) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask, labels, each (B, T), padded on the right to the longest row. Padding is masked by
    position, so a padding token that is also the end-of-text token loses no label.
    """
    length = max(len(row.input_ids) for row in rows)
    shape = (len(rows), length)
    ids = torch.full(shape, pad_id, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORED, dtype=torch.long)
    for index, row in enumerate(rows):
        count = len(row.input_ids)
        ids[index, :count] = torch.tensor(row.input_ids)
        mask[index, :count] = 1
        labels[index, :count] = torch.tensor(row.labels)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


Window = list[dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The optimizer steps of a run: windows of microbatches. Every row of an epoch is used; the last microbatch of an
    epoch may have fewer rows, and its last window fewer microbatches.
    """

    dataset: Dataset
    batch_size: int
    accumulation: int
    seed: int
    pad_id: int

    @property
    def steps_per_epoch(self) -> int:
        microbatches = -(-len(self.dataset.rows) // self.batch_size)
        return -(-microbatches // self.accumulation)

    @property
    def microbatches(self) -> int:
        """Of a full window: accumulation, or fewer where an epoch has fewer."""
        return min(self.accumulation, -(-len(self.dataset.rows) // self.batch_size))

    def epoch(self, number: int) -> Iterator[Window]:
        """The windows of epoch `number`, from 0, in an order that depends on the seed and the number alone."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(len(self.dataset.rows), generator=generator).tolist()
        yield from self._windows([self.dataset.rows[index] for index in order])

    def in_order(self) -> Iterator[Window]:
        yield from self._windows(list(self.dataset.rows))

    def _windows(self, rows: list[Row]) -> Iterator[Window]:
        size = self.batch_size
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        for start in range(0, len(batches), self.accumulation):
            yield [collate(batch, self.pad_id) for batch in batches[start : start + self.accumulation]]
