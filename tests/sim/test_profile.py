from pathlib import Path

import pytest

from kvpush.core.errors import ConfigError
from kvpush.sim import profile


@pytest.mark.parametrize("name", profile.names())
def test_each_profile_that_comes_with_kvpush_loads_and_names_its_source(name: str) -> None:
    loaded = profile.load(name)
    assert loaded.name == name
    assert len(loaded.source) > 20


def test_70b_profile_has_the_published_times_and_bytes() -> None:
    loaded = profile.load("llama-3.3-70b-h200-tp4")
    assert loaded.step_s(2048, 0) == pytest.approx(0.0125 + 2048 * 87e-6)
    assert loaded.token_bytes * 16 == 80 * 4096


def test_profile_of_ones_own_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('source="me"\nlayers=2\nkv_heads=1\nhead_dim=64\nprefill_us=1.0\nstep_us=2.0\n')
    assert profile.load(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("layers = 'many'", "layers"),
        ('source="x"\nlayers=2\nkv_heads=1\nhead_dim=64\nprefill_us=1.0', "step_us"),
        ('source="x"\nlayers=0\nkv_heads=1\nhead_dim=64\nprefill_us=1.0\nstep_us=1.0', "layers"),
        ('source="x"\nlayers=2\nkv_heads=1\nhead_dim=64\nprefill_us=1.0\nstep_us=1.0\nspeed=9', "speed"),
        ("layers = ", "profile broken"),
    ],
)
def test_bad_profile_is_refused_by_the_name_of_its_field(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        profile.load(str(path))


def test_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"llama-3\.3-70b-h200-tp4"):
        profile.load("gpu-of-the-future")


def test_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="no profile file"):
        profile.load("/nowhere/x.toml")
