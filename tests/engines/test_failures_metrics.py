"""I5: each abnormal end shows on `/metrics` with its reason, and in one line of the log with its key."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines.harness import eventually, new_key, prompt_of

from kvpush.bench.soak_fleet import Fleet, Part, fleet
from kvpush.cli.ports import free_ports
from kvpush.core.ids import Address, EngineId, Key, Target
from kvpush.core.params import receive_params, send_params
from kvpush.sim.orders import EngineConfig, Expose, Exposed, Finished, Report, Submit

pytestmark = pytest.mark.engine

_PROTOCOL = {"heartbeat_s": 0.5, "lease_s": 4.0, "peer_timeout_s": 4.0, "quarantine_s": 2.0, "unannounced_s": 2.0}
_PROMPT = prompt_of(100, seed=1)
_TURNS = 1200  # of a tenth of a second


@pytest.fixture(scope="module")
def engines(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("engines")
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    whats = [
        EngineConfig(name=name, model=tiny, role=role, num_blocks=256, extra={**_PROTOCOL, "port": port})
        for (name, role), port in zip(roles.items(), free_ports(2), strict=True)
    ]
    with fleet(whats, folder) as started:
        started.wait_until_ready()
        yield started


def test_each_abnormal_end_is_on_metrics_and_in_the_log_once(engines: Fleet) -> None:
    prefill, decode = engines.parts
    lonely, orphan = new_key(), new_key()

    _push(engines, "good", new_key())
    decode.say(_receiving("astray", new_key(), prefill, engine="another"))
    _finished(engines, decode, "astray")
    prefill.say(_sending("lonely", lonely))
    eventually(lambda: _counted(engines, prefill, "lease_expired", "lease_expired") > 0)
    assert _counted(engines, prefill, "lease_expired", "lease_expired") == 1
    assert _counted(engines, prefill, "refused", "wrong_engine") == 1

    decode.say(_receiving("orphaned", orphan, prefill))
    _heard(engines, decode, Exposed, Expose())  # the answer comes after the request has been taken
    prefill.kill()
    _finished(engines, decode, "orphaned")
    eventually(lambda: _counted(engines, decode, "recv_abandoned", "peer_lost") > 0)

    assert _counted(engines, decode, "recv_abandoned", "peer_lost") == 1
    assert _counted(engines, decode, "peer_lost", "peer_lost") == 1
    assert _failed(engines, decode, "wrong_engine") == 1
    eventually(lambda: _failed(engines, decode, "peer_lost") > 0)  # its blocks have left the quarantine
    assert _failed(engines, decode, "peer_lost") == 1
    assert len(_lines(prefill.log, lonely, "reason=lease_expired")) == 1
    assert len(_lines(decode.log, orphan, "reason=peer_lost")) == 1


def _push(engines: Fleet, name: str, key: Key) -> None:
    prefill, decode = engines.parts
    decode.say(_receiving(name, key, prefill))
    prefill.say(_sending(name, key))
    _finished(engines, decode, name)


def _sending(name: str, key: Key) -> Submit:
    return Submit(name=name, prompt=_PROMPT, max_tokens=1, params=send_params(key))


def _receiving(name: str, key: Key, prefill: Part, engine: str = "") -> Submit:
    target = Target(Address("127.0.0.1", int(prefill.what.extra["port"])), EngineId(engine or prefill.name))
    # a prompt of its own, which is in no prefix cache
    prompt = prompt_of(100, seed=len(name)) if name != "good" else _PROMPT
    return Submit(name=name, prompt=prompt, max_tokens=4, params=receive_params(key, target))


def _finished(engines: Fleet, part: Part, name: str) -> None:
    report = _heard(engines, part, Finished)
    assert isinstance(report, Finished)
    assert report.name == name


def _heard(engines: Fleet, part: Part, kind: type[Report], order: Expose | None = None) -> Report:
    if order is not None:
        part.say(order)
    for _ in range(_TURNS):
        for heard in engines.hear(0.1):
            if heard.engine is part and isinstance(heard.report, kind):
                return heard.report
        assert not engines.died
    raise AssertionError(f"{part.name} does not send a {kind.__name__}")


def _value(engines: Fleet, part: Part, metric: str, **labels: str) -> int:
    """The value of `kvpush_<metric>_total` with these labels among its own, 0 when it is not shown."""
    report = _heard(engines, part, Exposed, Expose())
    assert isinstance(report, Exposed)
    wanted = {f'{name}="{value}"' for name, value in labels.items()}
    found = re.findall(rf"^kvpush_{metric}_total\{{(.*)\}} ([\d.]+)$", report.text, re.MULTILINE)
    return int(sum(float(value) for names, value in found if wanted <= set(names.split(","))))


def _counted(engines: Fleet, part: Part, event: str, reason: str) -> int:
    return _value(engines, part, "events", event=event, reason=reason)


def _failed(engines: Fleet, part: Part, reason: str) -> int:
    return _value(engines, part, "transfers", role="receiver", outcome="failed", reason=reason)


def _lines(log: Path, key: Key, part: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if f"transfer ended key={key} " in line and part in line]
