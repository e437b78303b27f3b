"""Bad settings are refused when the configuration is made, with the field and the remedy."""

import pytest

from kvpush.core.errors import ConfigError
from kvpush.core.ids import Address
from kvpush.router.config import Connector, EngineSpec, RouterConfig, parse_engine

P = EngineSpec(url="http://p:1")
D = EngineSpec(url="http://d:1")


def test_engine_is_read_with_all_its_settings() -> None:
    spec = parse_engine("http://p0:8100/,kv=[::1]:5600,engine_id=e,tp=4")
    assert spec == EngineSpec(url="http://p0:8100", control=Address("::1", 5600), engine_id="e", tp_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("http://p0", "http://HOST:PORT"),
        ("ftp://p0:1", "http://HOST:PORT"),
        ("http://p0:99999", "http://HOST:PORT"),
        ("http://u:p@p0:1", "http://HOST:PORT"),
        ("http://p0:1,kv=p0", "HOST:PORT"),
        ("http://p0:1,port=3", "kv="),
        ("http://p0:1,tp=0", "tp="),
    ],
)
def test_engine_that_makes_no_sense_is_refused_with_the_remedy(text: str, word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_engine(text)
    assert word in refused.value.remedy


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"decode": ()}, "decode"),
        ({"prefill": ()}, "prefill"),
        ({"prefill": (P, P)}, "engine"),
        ({"prefill": (D,)}, "engine"),
        ({"connector": Connector.NONE}, "prefill"),
        ({"connector": Connector.VLLM_PUSH}, "prefill"),
        ({"port": 70000}, "port"),
        ({"poll_s": 0.0}, "poll_s"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_field(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RouterConfig(**({"prefill": (P,), "decode": (D,)} | settings))  # type: ignore[arg-type]
    assert refused.value.field == field
