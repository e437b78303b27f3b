"""What a user may set, and what happens when it is wrong."""

from pathlib import Path
from typing import Any

import pytest

from kvpush.core.errors import ConfigError
from kvpush.core.ids import Address
from kvpush.core.mode import Mode
from kvpush.vllm.settings import read_settings


def test_defaults_are_where_routers_of_the_built_in_connector_look() -> None:
    environ = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7", "VLLM_NIXL_SIDE_CHANNEL_PORT": "6000"}

    settings = read_settings({}, environ)

    assert settings.address(0, 0, 1) == Address("10.0.0.7", 6000)


def test_engine_without_any_setting_listens_on_loopback() -> None:
    assert read_settings({}, {}).address(0, 0, 1) == Address("127.0.0.1", 5600)


def test_ranks_and_data_parallel_engines_of_one_host_never_share_a_port() -> None:
    settings = read_settings({"port": 7000}, {})

    ports = {settings.address(group, rank, 4).port for group in range(3) for rank in range(4)}

    assert ports == set(range(7000, 7012))


def test_protocol_times_are_set_beside_the_rest() -> None:
    settings = read_settings({"lease_s": 60, "backends": ["UCX", "GDS"]}, {})

    assert settings.protocol.lease_s == 60.0
    assert settings.backends == ("UCX", "GDS")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"prot": 7000}, "kv_connector_extra_config.prot"),
        ({"protocol": {}}, "kv_connector_extra_config.protocol"),
        ({"port": 70000}, "kv_connector_extra_config.port"),
        ({"port": "7000"}, "kv_connector_extra_config.port"),
        ({"host": "0.0.0.0"}, "kv_connector_extra_config.host"),
        ({"lease_s": "long"}, "kv_connector_extra_config.lease_s"),
        ({"lease_s": -1}, "lease_s"),
        ({"backends": []}, "kv_connector_extra_config.backends"),
        ({"poll_us": 0}, "kv_connector_extra_config.poll_us"),
        ({"mode": "teleport"}, "kv_connector_extra_config.mode"),
        ({"keep_share": 1.5}, "kv_connector_extra_config.keep_share"),
        ({"keep_s": 0}, "kv_connector_extra_config.keep_s"),
        ({"secret": 7}, "kv_connector_extra_config.secret"),
        ({"secret_file": 7}, "kv_connector_extra_config.secret_file"),
    ],
)
def test_bad_setting_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(given, {})

    assert caught.value.field == named


def test_secret_is_read_from_its_file_without_the_line_end(tmp_path: Path) -> None:
    (path := tmp_path / "secret").write_text("0123456789abcdef\n")

    assert read_settings({"secret_file": str(path)}, {}) == read_settings({"secret": "0123456789abcdef"}, {})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff" * 32, "is not UTF-8 text"),
        (b"too short\n", "has 9 characters"),
    ],
)
def test_file_without_a_secret_does_not_leave_the_channel_open(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=problem):
        read_settings({"secret_file": str(path)}, {})


def test_two_places_for_one_secret_are_refused(tmp_path: Path) -> None:
    (path := tmp_path / "secret").write_text("0123456789abcdef")

    with pytest.raises(ConfigError, match="secret_file: is given beside 'secret'"):
        read_settings({"secret_file": str(path), "secret": "0123456789abcdef"}, {})


@pytest.mark.parametrize(
    ("mode", "modes"), [("push", (Mode.PUSH,)), ("pull", (Mode.PULL,)), ("auto", (Mode.PUSH, Mode.PULL))]
)
def test_mode_says_what_an_engine_takes_part_in(mode: str, modes: tuple[Mode, ...]) -> None:
    assert read_settings({"mode": mode}, {}).mode.modes == modes
    assert read_settings({}, {}).mode.modes == (Mode.PUSH,)


def test_unknown_setting_is_answered_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"lease_s.*poll_us.*port"):
        read_settings({"lease": 3}, {})


def test_unknown_choice_is_answered_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"mode: .*shove.* Use one of push, pull, auto"):
        read_settings({"mode": "shove"}, {})
    with pytest.raises(ConfigError, match=r"push: .*early.* Use one of whole, progressive, layerwise"):
        read_settings({"push": "early"}, {})


def test_bad_port_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="VLLM_NIXL_SIDE_CHANNEL_PORT"):
        read_settings({}, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "high"})


def test_last_rank_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no port for rank 3"):
        read_settings({"port": 65533}, {}).address(0, 3, 4)
