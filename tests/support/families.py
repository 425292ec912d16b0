"""Tiny random models of the families that are tested, and microbatches for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 96
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 128, **_IDS,
}  # fmt: skip
_NEOX = {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_LLAMA)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**_LLAMA, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_LLAMA, sliding_window=16)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_LLAMA, num_local_experts=4)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_LLAMA)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_LLAMA, head_dim=16, tie_word_embeddings=True)),
    "qwen3-untied": lambda: Qwen3ForCausalLM(Qwen3Config(**_LLAMA, head_dim=16)),
    "gemma3": lambda: Gemma3ForCausalLM(_gemma3(True)),
    "gemma3-untied": lambda: Gemma3ForCausalLM(_gemma3(False)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**_NEOX, resid_pdrop=0.0, embd_pdrop=0.0)),
    "gpt2": lambda: GPT2LMHeadModel(_gpt2(True)),
    "gpt2-untied": lambda: GPT2LMHeadModel(_gpt2(False)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_NEOX)),
    "opt": lambda: OPTForCausalLM(_opt(True)),
    "opt-untied": lambda: OPTForCausalLM(_opt(False)),
    "falcon": lambda: FalconForCausalLM(_falcon(True)),
    "falcon-untied": lambda: FalconForCausalLM(_falcon(False)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            d_model=64, d_ff=128, num_layers=3, num_heads=4, d_kv=16, vocab_size=VOCAB, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        )
    ),
}  # fmt: skip

BIT_IDENTICAL = (
    "llama", "mistral", "mixtral", "qwen2", "phi", "gpt2-untied", "gpt-neox", "opt-untied", "falcon-untied",
    "qwen3-untied", "gemma3-untied",
)  # fmt: skip
"""No tied weight and no encoder: the same sums in the same order as plain training."""


def _opt(tied: bool) -> OPTConfig:
    return OPTConfig(
        hidden_size=64, ffn_dim=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=VOCAB,
        word_embed_proj_dim=64, max_position_embeddings=128, dropout=0.0, tie_word_embeddings=tied, **_IDS,
    )  # fmt: skip


def _falcon(tied: bool) -> FalconConfig:
    return FalconConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=VOCAB, tie_word_embeddings=tied, **_IDS
    )


def _gemma3(tied: bool) -> Gemma3TextConfig:
    return Gemma3TextConfig(**_LLAMA, head_dim=16, sliding_window=8, tie_word_embeddings=tied)


def _gpt2(tied: bool) -> GPT2Config:
    return GPT2Config(
        n_embd=64, n_layer=4, n_head=4, vocab_size=VOCAB, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def make(family: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return FAMILIES[family]().train()


def batches(count: int, seed: int = 0, lengths: tuple[int, ...] = (17, 33, 25, 9)) -> list[dict[str, torch.Tensor]]:
    """`count` microbatches of two rows each and of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for index in range(count):
        ids = torch.randint(3, VOCAB, (2, lengths[index % len(lengths)]), generator=generator)
        result.append({"input_ids": ids, "labels": ids})
    return result


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, as it is."""
    return model(**batch).loss
