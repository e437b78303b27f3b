import subprocess
import sys
from pathlib import Path

import pytest

from kvpush.cli.models import CATALOG, cache_dir, ensure_model, model_path
from kvpush.cli.models.cache import ensure_folder
from kvpush.core.errors import ConfigError

transformers = pytest.importorskip("transformers")

MAKER = """
import sys
from pathlib import Path
from kvpush.cli.models.cache import ensure_folder

print(ensure_folder(Path(sys.argv[1]), lambda folder: (folder / "file").touch()))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPUSH_CACHE", str(tmp_path))
    return tmp_path


def write_slowly(folder: Path) -> None:
    (folder / "first").write_text("1")
    (folder / "second").write_text("2")


def test_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write_slowly(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ensure_folder(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    assert ensure_folder(tmp_path / "model", write_slowly)
    assert not ensure_folder(tmp_path / "model", fail), "it is there, nothing is made"


def test_one_of_many_processes_makes_the_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKER, str(tmp_path / "model")]
    makers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sorted(maker.communicate(timeout=60)[0] for maker in makers) == ["False\n"] * 3 + ["True\n"]


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPUSH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "kvpush"
    monkeypatch.setenv("KVPUSH_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_tiny_is_the_same_every_time(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure_model("tiny")
    monkeypatch.setenv("KVPUSH_CACHE", str(tmp_path / "again"))
    second = ensure_model("tiny")
    assert first != second
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_tiny_has_a_token_per_byte_and_a_chat_template(cache: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(ensure_model("tiny"))
    text = "Grüße, 世界!\n\x00 \x7f"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "user: hi\nassistant:"


def test_tiny_writes_printable_text_that_depends_on_the_whole_prompt(cache: Path) -> None:
    folder = ensure_model("tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.max_position_embeddings >= 4096

    def answer(prompt: str) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0][inputs["input_ids"].shape[1] :]
        return str(tokenizer.decode(tokens))

    rest = "".join(chr(33 + i * i % 94) for i in range(300))
    one, other = answer("a" + rest), answer("b" + rest)
    assert one != other, "the first token's KV matters after 300 others"
    assert one.isascii()
    assert one.isprintable()
    assert len(set(one)) > 4


def test_name_that_is_no_model_is_refused_with_the_known_ones(cache: Path) -> None:
    for wanted in (ensure_model, model_path):
        with pytest.raises(ConfigError, match="tiny, smollm2-135m"):
            wanted("no-such-model")


def test_folder_of_a_checkpoint_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_path(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.timeout(300)
def test_smollm2_is_converted_without_quantization_or_a_copied_output_matrix(cache: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    config = transformers.AutoConfig.from_pretrained(ensure_model("smollm2-135m"))
    assert not hasattr(config, "quantization_config")
    assert config.tie_word_embeddings
    with safetensors.safe_open(CATALOG["smollm2-135m"].folder / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert str(weights.get_tensor("model.embed_tokens.weight").dtype) == "torch.float32"
    assert not [name for name in names if name.startswith("lm_head")]
    assert len(names) == 272
