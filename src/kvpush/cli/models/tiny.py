"""`tiny`: a Llama made from a seed, which runs in milliseconds and whose every output depends on all of its KV.

Its tokens are the 256 bytes and three specials. Output rows of bytes that are no printable ASCII are zero,
so that greedy text is printable and two different tokens never look the same in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpush.cli.models.packages import quieten, require
from kvpush.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

VERSION = 1
POSITIONS = 8192
_SEED = 20260711
_BOS, _EOS, _PAD = "<s>", "</s>", "<pad>"
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def build(folder: Path, progress: Callable[[str], None]) -> None:
    """Write the checkpoint and its tokenizer into `folder`. Raises `ConfigError` without transformers."""
    progress("importing transformers")
    require("torch", "transformers", "tokenizers", "safetensors")
    quieten()
    progress("making the tokenizer")
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    progress("making the weights")
    _model(tokenizer).save_pretrained(folder)
    _allow_no_download(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # sorted, because the alphabet comes in no fixed order and ids must be the same on every machine
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=_BOS,
        eos_token=_EOS,
        pad_token=_PAD,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,  # ten times the usual: greedy output is then not one repeated token
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(config)
    _silence_unprintable(model, tokenizer)
    return model


def _silence_unprintable(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    import torch

    printable = {tokenizer.convert_tokens_to_ids(chr(code)) for code in range(0x21, 0x7F)}
    printable.add(tokenizer.convert_tokens_to_ids("\u0120"))  # how byte-level tokenizers write a space
    silent = [i for i in range(len(tokenizer)) if i not in printable]
    with torch.no_grad():
        model.lm_head.weight[silent] = 0.0


def _allow_no_download(folder: Path) -> None:
    """Check what was written: a checkpoint without one of these makes vLLM look for a hub."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if config.get("architectures") != ["LlamaForCausalLM"] or not (folder / "tokenizer.json").is_file():
        raise ConfigError("model", "transformers wrote an incomplete checkpoint", "Check the version of transformers.")
