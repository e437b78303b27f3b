import importlib
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from kvpush.cli.cluster import Cluster
from kvpush.cli.device import DevicePlan, nvidia_gpus, plan_device
from kvpush.cli.parts import ClusterSpec, Share, engine_command, plan_engines, router_command, share_machine
from kvpush.cli.secret import secret_file
from kvpush.cli.up import make_spec
from kvpush.core.errors import ConfigError
from kvpush.core.mode import ModeSetting
from kvpush.router.config import Connector, EngineRole, parse_engine
from kvpush.runtime.auth import read_secret

ALL = Share("0")


def spec(**changes: Any) -> ClusterSpec:
    return ClusterSpec(**{"model": Path("/models/tiny-v1"), "log_dir": Path("/logs"), **changes})


def value_after(argv: tuple[str, ...], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_engines_have_distinct_names_and_ports() -> None:
    engines = plan_engines(spec(prefill=2, decode=3))
    assert [engine.name for engine in engines] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    ports = [port for engine in engines for port in (engine.port, engine.kv_port)]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize(
    ("connector", "role", "vllm_name", "kv_role"),
    [
        (Connector.KVPUSH, EngineRole.PREFILL, "KVPushConnector", "kv_producer"),
        (Connector.KVPUSH, EngineRole.DECODE, "KVPushConnector", "kv_consumer"),
        (Connector.VLLM_PUSH, EngineRole.PREFILL, "NixlPushConnector", "kv_producer"),
        (Connector.VLLM_PULL, EngineRole.DECODE, "NixlConnector", "kv_both"),
    ],
)
def test_engine_gets_the_connector_of_its_role(
    connector: Connector, role: EngineRole, vllm_name: str, kv_role: str
) -> None:
    cluster = spec(connector=connector, connector_config={"lease_s": 5})
    engine = next(engine for engine in plan_engines(cluster) if engine.role is role)
    command = engine_command(cluster, engine, ALL)
    config = json.loads(value_after(command.argv, "--kv-transfer-config"))
    assert (config["kv_connector"], config["kv_role"], config["engine_id"]) == (vllm_name, kv_role, engine.name)
    assert config["kv_connector_extra_config"] == {"lease_s": 5}
    assert command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(engine.kv_port)


@pytest.mark.parametrize(
    ("connector", "role", "says"),
    [
        (Connector.KVPUSH, EngineRole.DECODE, True),
        (Connector.KVPUSH, EngineRole.PREFILL, False),
        (Connector.VLLM_PUSH, EngineRole.DECODE, False),
    ],
)
def test_decode_engine_with_kvpush_can_say_that_it_has_computed_a_prompt_itself(
    connector: Connector, role: EngineRole, says: bool
) -> None:
    cluster = spec(connector=connector)
    engine = next(engine for engine in plan_engines(cluster) if engine.role is role)
    argv = engine_command(cluster, engine, ALL).argv
    assert ("--middleware" in argv) is says
    if says:
        module, _, name = value_after(argv, "--middleware").rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_plain_engine_gets_no_connector() -> None:
    cluster = spec(connector=Connector.NONE, prefill=0)
    (engine,) = plan_engines(cluster)
    assert "--kv-transfer-config" not in engine_command(cluster, engine, ALL).argv


def test_later_arguments_of_the_user_come_after_our_own() -> None:
    """vLLM takes the last of two values, so a user can overrule the launcher."""
    cluster = spec(vllm_args=("--dtype", "bfloat16"), decode_args=("--block-size", "32"), block_size=16)
    prefill, decode = plan_engines(cluster)
    assert engine_command(cluster, prefill, ALL).argv[-2:] == ("--dtype", "bfloat16")
    assert engine_command(cluster, decode, ALL).argv[-2:] == ("--block-size", "32")


def test_router_is_told_each_engine_in_words_it_can_parse() -> None:
    cluster = spec(prefill=1, decode=1)
    engines = plan_engines(cluster)
    argv = router_command(cluster, engines, 8000).argv
    told = parse_engine(value_after(argv, "--prefill"))
    assert told.url == engines[0].url
    assert told.control is not None
    assert (told.control.port, told.engine_id) == (engines[0].kv_port, "prefill-0")


def test_environment_of_the_user_wins_over_defaults_but_not_over_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "1")
    cluster = spec()
    engine = plan_engines(cluster)[0]
    env = engine_command(cluster, engine, ALL).env
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(engine.kv_port)


def test_simulated_device_brings_its_own_model() -> None:
    cluster = spec(device=DevicePlan(("--worker-cls", "x.Y"), {"A": "1"}, Path("/sim/model")))
    command = engine_command(cluster, plan_engines(cluster)[0], ALL)
    assert value_after(command.argv, "--model") == "/sim/model"
    assert command.env["A"] == "1"


@pytest.mark.parametrize("name", ["gpu", "sim:", "sim", "cpu:1", ""])
def test_unknown_device_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="cpu, vllm or sim:PROFILE"):
        plan_device(name)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prefill": 0}, "prefill"),
        ({"decode": 0}, "decode"),
        ({"connector": Connector.NONE, "prefill": 1}, "prefill"),
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_cluster_that_cannot_work_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        spec(**changes)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("items", "engines", "shares"),
    [
        ([0, 1], 2, ["0", "1"]),
        ([0, 1], 3, ["0", "1", "0"]),
        ([2, 3, 5, 7, 8], 2, ["2,3", "5,7"]),
        ([4], 2, ["4", "4"]),
    ],
)
def test_cores_and_gpus_are_shared_out(items: list[int], engines: int, shares: list[str]) -> None:
    assert [share.cores for share in share_machine(items, [], engines)] == shares
    assert [share.gpus for share in share_machine([0], items, engines)] == shares


def test_engine_sees_only_its_own_gpus() -> None:
    cluster = spec(device=DevicePlan(gpus=(0, 1)))
    shares = share_machine([0, 1], cluster.device.gpus, 2)
    commands = [engine_command(cluster, *both) for both in zip(plan_engines(cluster), shares, strict=True)]
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in commands] == ["0", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in engine_command(spec(), plan_engines(spec())[0], ALL).env


def test_gpus_are_those_that_the_machine_has_or_the_user_allows(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert nvidia_gpus(tmp_path, "") == (0, 1, 10)
    assert nvidia_gpus(tmp_path, "3,1") == (3, 1)
    assert nvidia_gpus(tmp_path / "none", "") == ()


def test_mode_goes_to_kvpush_and_to_no_other(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    made = make_spec(str(tmp_path), mode=ModeSetting.PULL, log_dir=tmp_path)
    command = engine_command(made, plan_engines(made)[0], ALL)
    transfer = json.loads(value_after(command.argv, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"] == {"mode": "pull"}
    with pytest.raises(ConfigError, match="mode: pull with --connector vllm-pull"):
        make_spec(str(tmp_path), mode=ModeSetting.PULL, connector=Connector.VLLM_PULL, log_dir=tmp_path)


def test_file_with_a_secret_goes_to_kvpush_and_to_no_other(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (secret := tmp_path / "secret").write_text("0123456789abcdef")
    made = make_spec(str(tmp_path), secret_file=secret, log_dir=tmp_path)
    for engine in plan_engines(made):
        transfer = json.loads(value_after(engine_command(made, engine, ALL).argv, "--kv-transfer-config"))
        assert transfer["kv_connector_extra_config"] == {"secret_file": str(secret)}
    with pytest.raises(ConfigError, match=r"secret_file: .* with --connector vllm-pull. Leave --secret-file out"):
        make_spec(str(tmp_path), secret_file=secret, connector=Connector.VLLM_PULL, log_dir=tmp_path)


def test_file_without_a_secret_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        make_spec(str(tmp_path), secret_file=tmp_path / "none", log_dir=tmp_path)


def test_secret_of_one_run_is_for_this_user_only_strong_enough_and_does_not_stay() -> None:
    with secret_file() as path, secret_file() as other:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_secret(str(path)) != read_secret(str(other))
    assert not path.parent.exists()


def test_log_folder_that_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(ConfigError, match="cannot be made: Not a directory") as refused,
        Cluster(spec(log_dir=tmp_path / "file" / "logs")),
    ):
        pass
    assert refused.value.field == "log_dir"
