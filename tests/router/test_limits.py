"""Keys, sizes, and clients that are slow (cases B68 and B69 as far as a router goes)."""

import asyncio
import json
import logging

import pytest
from router.rig import Rig, rigged
from router.stub import Reply, Seen, until

KEY = {"Authorization": "Bearer right"}


async def test_clients_need_a_key_where_keys_are_set_and_engines_never_see_it() -> None:
    async with rigged(api_keys=frozenset({"right", "other"}), engine_api_key="engines-own") as rig:
        assert (await rig.post()).status == 401
        assert (await rig.post(headers={"Authorization": "Bearer wrong"})).status == 401
        assert (await rig.post(headers=KEY)).status == 200
        assert (await rig.get("/v1/models")).status == 401
        assert (await rig.get("/health")).status == 200
    assert rig.decode.seen[0].headers["authorization"] == "Bearer engines-own"
    assert rig.prefill.seen[0].headers["authorization"] == "Bearer engines-own"


async def test_key_is_passed_on_when_the_router_has_none_of_its_own() -> None:
    async with rigged() as rig:
        await rig.post(headers=KEY)
    assert rig.decode.seen[0].headers["authorization"] == "Bearer right"


async def test_headers_over_the_limit_are_refused() -> None:
    async with rigged(max_header_bytes=2000) as rig:
        answer = await rig.post(headers={"x-long": "y" * 4000})
    assert answer.status == 400
    assert not rig.decode.seen


async def raw_client(rig: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = rig.url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_client_that_sends_its_body_too_slowly_is_refused() -> None:
    async with rigged(body_timeout_s=0.2) as rig:
        reader, writer = await raw_client(rig)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        status = await asyncio.wait_for(reader.readline(), 5.0)
        writer.close()
    assert b"408" in status
    assert not rig.prefill.seen


async def send_streaming(writer: asyncio.StreamWriter) -> None:
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    writer.write(head + body)


CHUNK = b"data: " + b"x" * 65_528 + b"\n\n"
CHUNKS = 2000


async def test_client_that_does_not_read_stops_the_engine_instead_of_filling_memory() -> None:
    written = 0

    def counted() -> tuple[bytes, ...]:
        return (CHUNK,) * CHUNKS

    def decode(seen: Seen) -> Reply:
        return Reply(chunks=counted(), content_type="text/event-stream")

    async with rigged(decode=[decode], client_stall_timeout_s=60.0) as rig:
        _, writer = await raw_client(rig)
        await send_streaming(writer)
        await until(lambda: len(rig.decode.live) == 1)
        previous = -1
        while written != previous:
            previous = written
            await asyncio.sleep(0.3)
            written = rig.decode.written_bytes
        writer.close()
    # not what the kernel's own buffers take, which may be 32 MiB for each of two connections
    assert 0 < written < 0.6 * len(CHUNK) * CHUNKS


async def test_client_that_stalls_too_long_is_dropped_and_the_engine_told() -> None:
    def decode(seen: Seen) -> Reply:
        return Reply(chunks=(CHUNK,) * CHUNKS, content_type="text/event-stream")

    async with rigged(decode=[decode], client_stall_timeout_s=0.3) as rig:
        _, writer = await raw_client(rig)
        await send_streaming(writer)
        await until(lambda: len(rig.decode.aborted) == 1)
        assert 'ending="client_stalled"' in (await rig.get("/metrics")).body.decode()
        writer.close()


async def test_each_request_is_one_log_line_with_its_transfer_id_and_stages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvpush.router.request")
    async with rigged() as rig:
        answer = await rig.post()
    lines = [json.loads(record.message) for record in caplog.records if record.name == "kvpush.router.request"]
    assert len(lines) == 1
    assert lines[0]["transfer_id"] == answer.headers["x-kvpush-transfer-id"]
    assert {"read", "prefill_sent", "decode_sent", "first_byte", "end"} <= lines[0]["ms"].keys()
    assert lines[0]["path"] == "pd"
