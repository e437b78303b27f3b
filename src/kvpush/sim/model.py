"""The model that runs on the simulated device, and the folder that makes vLLM believe in it."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from kvpush.sim import kvfunc
from kvpush.sim.device import Part, Row
from kvpush.sim.memory import KVMemory
from kvpush.sim.profile import Profile

VERSION = 1
"""Of the model folder: raise it when what is written changes."""

LAST_FILE = "tokenizer.json"
"""Of those in the model folder: when it is there, all are."""

logger = logging.getLogger("vllm.kvpush.sim")


class SimModel:
    """Writes KV words and samples tokens from what it reads back. Used by the device's thread only."""

    def __init__(self, memory: KVMemory, vocabulary: int, verify: bool) -> None:
        """`verify`: check every word of the KV that a request did not compute here."""
        self._memory = memory
        self._vocabulary = vocabulary
        self._verify = verify
        self._wrong: set[str] = set()

    def write(self, row: Row, first: int, last: int, part: Part) -> None:
        """Write KV of positions [first, last) of a row, in the layers of `part`."""
        positions = np.arange(first, last, dtype=np.int64)
        seeds = kvfunc.line_seeds(row.tokens.between(first, last), positions)
        self._memory.write(
            self._memory.lines(row.blocks, positions), seeds, self._memory.planes_of(part.of(self._memory.layers))
        )

    def sample(self, rows: list[Row]) -> list[int]:
        """The next token of each row, from the KV words at its spots."""
        if not rows:
            return []
        contexts = np.array([row.end for row in rows], dtype=np.int64)
        positions, planes = kvfunc.spots(contexts, self._memory.planes)
        lines = np.stack([self._memory.lines(row.blocks, positions[i]) for i, row in enumerate(rows)])
        tokens = kvfunc.next_tokens(self._memory.read(lines, planes), self._vocabulary)
        return [self._told(row, int(token)) for row, token in zip(rows, tokens, strict=True)]

    def check(self, row: Row) -> None:
        """Compare loaded KV with what it should be; what is wrong changes the row's next token."""
        if not self._verify or not row.unchecked:
            return
        positions = np.array(row.unchecked, dtype=np.int64)
        seeds = kvfunc.line_seeds(row.tokens.between(row.unchecked.start, row.unchecked.stop), positions)
        wrong = self._memory.wrong_tokens(self._memory.lines(row.blocks, positions), seeds)
        if len(wrong):
            self._wrong.add(row.request_id)
            where = positions[wrong[0]]
            logger.error("request %s: KV of %d tokens is wrong, first at %d", row.request_id, len(wrong), where)

    def _told(self, row: Row, token: int) -> int:
        """The token, or another one when the row's KV was found wrong in this step."""
        if row.request_id not in self._wrong:
            return token
        self._wrong.remove(row.request_id)
        return token + 1 if token + 1 < self._vocabulary else kvfunc.FIRST_TOKEN


def word(token: int) -> str:
    """The text of a token. Texts of answers are words joined by spaces."""
    return f"w{token:04d}"


def write_folder(folder: Path, profile: Profile) -> None:
    """Write a config and a tokenizer, and no weights: the worker never loads any."""
    (folder / "config.json").write_text(json.dumps(_config(profile), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(profile), indent=1))
    last = folder / f".{LAST_FILE}"
    last.write_text(json.dumps(_tokenizer(profile), indent=1))
    last.replace(folder / LAST_FILE)


def _config(profile: Profile) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": profile.kv_heads * profile.head_dim,
        "intermediate_size": 64,
        "num_hidden_layers": profile.layers,
        "num_attention_heads": profile.kv_heads,
        "num_key_value_heads": profile.kv_heads,
        "head_dim": profile.head_dim,
        "vocab_size": profile.vocabulary,
        "max_position_embeddings": profile.max_model_len,
        "torch_dtype": profile.dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }


def _tokenizer_config(profile: Profile) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": profile.max_model_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }


def _tokenizer(profile: Profile) -> dict[str, Any]:
    specials = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {text: i for i, text in enumerate(specials)}
    vocabulary |= {word(token): token for token in range(kvfunc.FIRST_TOKEN, profile.vocabulary)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(text, i) for i, text in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }


def _special(text: str, token: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, "special": True, **flags}
