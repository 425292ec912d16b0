"""A tiny Llama and its tokenizer as a Hugging Face folder, and texts for them: seconds, no downloads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = (
    *("red", "stone", "river", "slow", "bird", "market", "seven", "rain"),
    *("paper", "green", "door", "salt", "light", "road", "music", "winter"),
)


def lines(count: int, seed: int = 0, shortest: int = 4, longest: int = 24) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(shortest, longest))) + "." for _ in range(count)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 384 tokens with pad, begin and end tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(lines(500, 9), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save model and tokenizer in `folder`."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**(shape | changes))).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(path: Path, count: int = 64, seed: int = 0) -> Path:
    return jsonl(path, [{"text": text} for text in lines(count, seed)])
