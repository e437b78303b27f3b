"""`kvpush up` with real engines: how it starts, serves, and ends, in whatever way it ends."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from cli.processes import marked, wait_until
from runtime.rig import LOCAL, Party, pump_until

from kvpush.cli.ask import AskError, ask
from kvpush.cli.child import PartDied
from kvpush.cli.cluster import Cluster, PartStatus
from kvpush.cli.timeline import moments, records_of
from kvpush.cli.up import make_spec
from kvpush.core.errors import ConfigError
from kvpush.core.events import Outcome, Role
from kvpush.core.ids import Address, EngineId, Key, LinkId, Target, TransferId
from kvpush.core.params import receive_params
from kvpush.router.scrape import Sample, parse_metrics
from kvpush.runtime.control import ControlChannel
from kvpush.runtime.recordfile import VARIABLE
from kvpush.runtime.sockets import ControlConfig

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
pytest.importorskip("vllm")

SMALL = ("--max-model-len", "2048")
_UNDER_LOAD = 24
_HALF_A_LEASE_S = 15.0
BODY: dict[str, object] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "The five boxing wizards jump quickly; pack my box. " * 6}],
    "max_tokens": 12,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def marker() -> Iterator[str]:
    """In the environment of every process that these tests start."""
    name = f"kvpush-test-{uuid4().hex}"
    os.environ["KVPUSH_TEST_MARKER"] = name
    yield name
    del os.environ["KVPUSH_TEST_MARKER"]
    for process in marked(name):
        process.kill()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture
def command(marker: str, tmp_path: Path) -> list[str]:
    up = [sys.executable, "-m", "kvpush.cli", "up", "--model", "tiny", "--port", "0"]
    return [*up, "--log-dir", str(tmp_path)]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def engines_started(marker: str) -> bool:
    """Both engines have begun to run vLLM (two guardians, two API servers)."""
    return len(marked(marker)) >= 5


def test_prompt_goes_through_prefill_and_decode_and_nothing_is_left(marker: str, logs: Path) -> None:
    seen: list[tuple[PartStatus, ...]] = []
    spec = replace(make_spec("tiny", log_dir=logs, vllm_args=SMALL), env={VARIABLE: str(logs)})
    with Cluster(spec, seen.append) as cluster:
        cluster.check()
        pieces: list[str] = []
        through = ask(cluster.url, BODY, pieces.append)
        alone = ask(cluster.decode[0].url, {**BODY, "cache_salt": "alone"})
        assert through.text == alone.text == "".join(pieces)
        assert (through.prompt_tokens, through.completion_tokens) == (alone.prompt_tokens, 12)
        assert through.prompt_tokens > 300
        assert through.headers["x-kvpush-path"] == "pd"
        transfer_id = through.headers["x-kvpush-transfer-id"]
        wait_until(lambda: len(records_of(logs, transfer_id)) == 2)
        _check_story(logs, transfer_id)
        _check_refusal(cluster)
        _check_strangers(cluster)
        _check_counters_and_log(cluster, logs)
        _check_death(cluster)
    assert not marked(marker)
    assert [status.name for status in seen[-1]] == ["prefill-0", "decode-0", "router"]
    assert all(status.is_ready for status in seen[-1])


def _check_story(logs: Path, transfer_id: str) -> None:
    records = records_of(logs, transfer_id)
    assert {record.role for record in records} == {Role.SENDER, Role.RECEIVER}
    assert all(record.outcome is Outcome.DELIVERED and record.blocks > 0 for record in records)
    told = [moment.what for moment in moments(records)]
    assert told.index("prefill: write posted") < told.index("decode: delivered, the request can run")


def _check_refusal(cluster: Cluster) -> None:
    with pytest.raises(AskError, match="status 40"):
        ask(cluster.url, {**BODY, "model": "no-such-model"})


def _check_strangers(cluster: Cluster) -> None:
    """The control ports let in none but the cluster's own, and nobody learns from `ps` how."""
    stranger = Party(ControlChannel(LOCAL, config=ControlConfig(linger_s=0.01)))
    links = {LinkId(number + 1): engine for number, engine in enumerate(cluster.engines)}
    for link, engine in links.items():
        stranger.channel.open_link(link, Address(engine.host, engine.kv_port))
    pump_until(lambda: sorted(stranger.refused) == sorted(links), stranger)
    stranger.channel.close()
    engines = [pid for name, pid in cluster.pids().items() if name != "router"]
    commands = [psutil.Process(pid).children()[0].cmdline() for pid in engines]
    configs = [json.loads(command[command.index("--kv-transfer-config") + 1]) for command in commands]
    (path,) = {config["kv_connector_extra_config"]["secret_file"] for config in configs}
    secret = Path(path).read_text()
    assert not [word for command in commands for word in command if secret in word]


def _check_counters_and_log(cluster: Cluster, logs: Path) -> None:
    """I5: what was delivered is on `/metrics`; what was not is there with its reason, and in the log with its key."""
    (prefill,), (decode,) = cluster.prefill, cluster.decode
    astray = Key(TransferId(uuid4().hex))
    target = Target(Address(prefill.host, prefill.kv_port), EngineId("another"))
    params = receive_params(astray, target)
    with suppress(AskError):  # what a client sees of it is not the matter here
        ask(decode.url, {**BODY, "cache_salt": "astray", "kv_transfer_params": params})

    delivered = 'outcome="delivered",reason="ok",role="{}"}}'
    wait_until(lambda: _counted(prefill.url, delivered.format("sender")) > 0)
    wait_until(lambda: _counted(decode.url, delivered.format("receiver")) > 0)
    wait_until(lambda: _counted(decode.url, 'outcome="failed",reason="wrong_engine",role="receiver"}') == 1)
    lines = (logs / "decode-0.log").read_text(errors="replace").splitlines()
    (line,) = [line for line in lines if f"transfer ended key={astray} " in line]
    assert "role=receiver" in line
    assert "outcome=failed reason=wrong_engine" in line


def _counted(url: str, labels: str) -> float:
    """The transfers with these labels on the engine's `/metrics`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    ours = (line for line in lines if line.startswith("kvpush_transfers_total{") and labels in line)
    return sum(float(line.rpartition(" ")[2]) for line in ours)


def _check_death(cluster: Cluster) -> None:
    """A part that dies is noticed, whichever it is, and nobody waits for a decode engine that was killed (case B16)."""
    (prefill,), (decode,) = cluster.prefill, cluster.decode
    guardian = psutil.Process(cluster.pids()[decode.name])
    with ThreadPoolExecutor(_UNDER_LOAD) as clients:
        asked = [clients.submit(_refusal, cluster.url, number) for number in range(_UNDER_LOAD)]
        wait_until(lambda: _sample(decode.url).running and _sample(prefill.url).running)
        guardian.children()[0].kill()
        refusals = [one.result(60) for one in asked]
    wait_until(lambda: _is_idle(prefill.url), _HALF_A_LEASE_S)
    assert all(refusals), "I3: whoever was waiting for the decode engine is told"

    def noticed() -> bool:
        try:
            cluster.check()
        except PartDied as error:
            return error.name == decode.name
        return False

    wait_until(noticed)
    assert _routers(cluster, f'failed_legs_total{{cause="broken",engine="{decode.url}",role="decode"}}') > 0
    assert _routers(cluster, f'engine_requests{{engine="{prefill.url}",role="prefill"}}') == 0


def _refusal(url: str, number: int) -> str:
    """What becomes of a request with a long prompt and a long answer, "" if nothing bad."""
    text = f"{number}: {'Jackdaws love my big sphinx of quartz. ' * 30}"
    body = {**BODY, "messages": [{"role": "user", "content": text}], "max_tokens": 600, "ignore_eos": True}
    try:
        ask(url, body)
    except AskError as error:
        return str(error)
    return ""


def _sample(url: str) -> Sample:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        return parse_metrics(response.read().decode())


def _is_idle(url: str) -> bool:
    """It runs nothing and holds no block."""
    sample = _sample(url)
    return (sample.running, sample.waiting, sample.kv_usage) == (0.0, 0.0, 0.0)


def _routers(cluster: Cluster, series: str) -> float:
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"kvpush_router_{series} ")]
    return float(value)


def test_nothing_is_left_when_launcher_is_killed_while_engines_start(command: list[str], marker: str) -> None:
    launcher = start(command)
    wait_until(lambda: engines_started(marker), 60)
    launcher.kill()
    launcher.communicate(timeout=60)
    wait_until(lambda: not marked(marker), 60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_engines_start_stops_everything(command: list[str], marker: str, number: signal.Signals) -> None:
    launcher = start(command)
    wait_until(lambda: engines_started(marker), 60)
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert output.endswith("stopped\n"), output
    assert not marked(marker)


def test_engine_that_cannot_start_ends_the_launcher_with_the_reason(command: list[str], marker: str) -> None:
    launcher = start([*command, "--", "--no-such-option"])
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 1
    assert "ended with status 2" in output
    assert "unrecognized arguments: --no-such-option" in output
    assert not marked(marker)


def test_port_in_use_is_refused_before_anything_starts(marker: str, tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on: Address already in use"):
            Cluster(make_spec("tiny", port=port, log_dir=tmp_path))
    assert not marked(marker)
