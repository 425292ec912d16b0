"""Begin and end tokens, and rows that are valid JSON but no text."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from overspill.trainer.config import DataConfig
from overspill.trainer.data import DataError, Row, load_dataset
from overspill.trainer.loss import IGNORED

PAD, BEGIN, END = 0, 1, 2


def load(path: Path, tokenizer: PreTrainedTokenizerFast) -> tuple[Row, ...]:
    return load_dataset(path, DataConfig(train=path), tokenizer).rows


def adding(template: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer, which puts `template` around every text."""
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", BEGIN), ("</s>", END)]
    )
    return tokenizer


@pytest.mark.parametrize("text", ["red stone", "<s>red stone", "<s>red stone</s>"])
@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_one_begin_and_one_end_token_whoever_adds_them(text: str, template: str, tmp_path: Path) -> None:
    (row,) = load(tiny.jsonl(tmp_path / "t.jsonl", [{"text": text}]), adding(template))
    assert row.input_ids.count(BEGIN) == row.input_ids.count(END) == 1
    assert row.input_ids[0] == BEGIN
    assert row.labels[-1] == END


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("prompt, ends", [("red stone", 0), ("red stone</s>", 1), ("<s>red</s>", 1), ("", 0)])
def test_a_prompt_keeps_its_own_end_tokens_and_gets_no_others(
    template: str, prompt: str, ends: int, tmp_path: Path
) -> None:
    path = tiny.jsonl(tmp_path / "t.jsonl", [{"prompt": prompt, "response": " rain river"}])
    (row,) = load(path, adding(template))
    masked = [token for token, label in zip(row.input_ids, row.labels, strict=True) if label == IGNORED]
    assert masked.count(END) == ends
    assert masked.count(BEGIN) == int("<s>" in template or "<s>" in prompt)
    assert row.labels[len(masked) :] == row.input_ids[len(masked) :]
    assert row.input_ids[-1] == END
    assert row.input_ids[-2] != END


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    for name, text in (("t.txt", "red stone\n"), ("t.jsonl", '{"text": "red stone"}\n')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        (row,) = load(tmp_path / name, tokenizer)
        assert tokenizer.decode(row.input_ids[:-1]) == "red stone"


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "a \\ud800 b"}', "column text holds half a surrogate pair"),
        ('{"text": ' + "9" * 5000 + "}", "not JSON that can be read"),
        ('{"text": ' + "[" * 100_000, "not JSON that can be read"),
    ],
)
def test_json_that_no_tokenizer_takes_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "red"}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"t\.jsonl:2: {message}") as error:
        load(path, tiny.tokenizer())
    assert "\n" not in str(error.value)
