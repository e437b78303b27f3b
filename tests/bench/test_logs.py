from pathlib import Path

import msgspec
from bench.samples import ID, record, step

from kvpush.bench.logs import DECODE, PREFILL, RoundLogs, read_round, transfer_of
from kvpush.core.events import Role
from kvpush.sim.hooktimes import Arrival, arrivals_file
from kvpush.sim.settings import ALONE, steps_file


def lines(path: Path, *values: object) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(value) + b"\n" for value in values))


def test_round_is_read_from_all_files_of_its_folder(tmp_path: Path) -> None:
    lines(arrivals_file(tmp_path, PREFILL), Arrival(f"cmpl-{ID}-0-x", 9.0))
    lines(steps_file(tmp_path, PREFILL), step(9.1, 9.1, 9.2, samples=False), step(9.2, 9.2, 9.3))
    lines(steps_file(tmp_path, DECODE), step(9.5, 9.5, 9.6), step(9.6, 9.6, 9.7))
    lines(tmp_path / "records-1.jsonl", record(Role.SENDER, posted=9.3))
    lines(tmp_path / "records-2.jsonl", record(Role.RECEIVER, noticed=9.4))
    logs = read_round(tmp_path, alone=False)
    assert logs.prefill[ID].arrived == 9.0
    assert [s.end for s in logs.prefill[ID].steps] == [9.2, 9.3]
    assert [s.end for s in logs.decode[ID].steps] == [9.6]  # up to the first token
    assert logs.sent[ID].at == {"posted": 9.3}
    assert logs.received[ID].at == {"noticed": 9.4}
    assert len(logs.steps[DECODE]) == 2


def test_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    path = steps_file(tmp_path, ALONE)
    lines(path, step(1.0, 1.0, 1.1))
    path.write_bytes(path.read_bytes() + b'{"launched":2.0,"st')
    assert len(read_round(tmp_path, alone=True).steps[ALONE]) == 1


def test_empty_folder_gives_empty_logs(tmp_path: Path) -> None:
    logs = read_round(tmp_path, alone=False)
    assert logs == RoundLogs()


def test_transfer_id_is_found_in_the_engines_request_id() -> None:
    assert transfer_of(f"cmpl-{ID}-0-12ab34cd") == ID
    assert transfer_of("cmpl-warm-up-0") == ""
