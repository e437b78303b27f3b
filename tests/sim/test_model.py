import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sim.caches import layers_apart

from kvpush.sim import kvfunc, profile
from kvpush.sim.device import Part, Row, TokenStore
from kvpush.sim.memory import KVMemory
from kvpush.sim.model import SimModel, word, write_folder

VOCABULARY = 300
PROMPT = [40, 41, 99, 17, 250, 33, 4, 8, 120]
BLOCKS = [4, 11, 6, 2]
LOADED = range(8)


class Bench:
    """Two engines' memories: one computes the prompt, the other gets its bytes by some means."""

    def __init__(self) -> None:
        self.buffer, tensors = layers_apart()
        self.memory = KVMemory(self.buffer, tensors)

    def row(self, start: int = 0, unchecked: range = range(0)) -> Row:
        tokens = TokenStore(np.array(PROMPT, dtype=np.int64))
        return Row("r", tokens, np.array(BLOCKS, dtype=np.int64), start, len(PROMPT), True, unchecked)

    def words(self) -> NDArray[np.int64]:
        return self.buffer.view(np.int64)


def computed(verify: bool = False) -> tuple[Bench, SimModel]:
    bench = Bench()
    model = SimModel(bench.memory, VOCABULARY, verify)
    for index in range(2):
        model.write(bench.row(), 0, len(PROMPT), Part(index, 2))
    return bench, model


def test_model_samples_the_expected_token_from_its_own_kv() -> None:
    bench, model = computed()
    expected = kvfunc.expected_tokens(PROMPT, 1, bench.memory.planes, VOCABULARY)
    assert model.sample([bench.row()]) == expected
    assert model.sample([]) == []


def sampled(model: SimModel, row: Row) -> int:
    """What a step with this row alone gives."""
    model.check(row)
    [token] = model.sample([row])
    return token


def test_verifying_model_accepts_loaded_kv_that_is_right() -> None:
    bench, model = computed(verify=True)
    expected = kvfunc.expected_tokens(PROMPT, 1, bench.memory.planes, VOCABULARY)
    assert sampled(model, bench.row(8, LOADED)) == expected[0]


def test_verifying_model_gives_another_token_for_any_wrong_loaded_word(caplog: pytest.LogCaptureFixture) -> None:
    bench, model = computed(verify=True)
    row = bench.row(8, LOADED)
    right = sampled(model, row)
    words = np.flatnonzero(bench.words())
    assert len(words) == len(PROMPT) * bench.memory.planes
    noticed = 0
    for index in words:
        before = bench.words()[index]
        bench.words()[index] = 12345
        noticed += sampled(model, row) != right
        bench.words()[index] = before
    assert noticed >= len(LOADED) * bench.memory.planes
    assert "is wrong, first at" in caplog.text
    assert sampled(model, row) == right  # one bad step does not spoil the next


def test_model_that_does_not_verify_still_depends_on_the_kv_at_its_spots() -> None:
    bench, model = computed()
    [right] = model.sample([bench.row()])
    bench.words()[:] += 1
    assert model.sample([bench.row()]) != [right]


def test_folder_speaks_the_profiles_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    chosen = profile.load("ci")
    write_folder(tmp_path, chosen)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == chosen.layers
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = [kvfunc.FIRST_TOKEN, 5, chosen.vocabulary - 1]
    assert tokenizer.encode(" ".join(word(token) for token in tokens)).ids == tokens
    assert tokenizer.decode(tokens) == " ".join(word(token) for token in tokens)
