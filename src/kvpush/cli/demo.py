"""`kvpush demo`: one question through prefill and decode, the same to one engine, and what was transferred."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpush.core.errors import KVPushError

if TYPE_CHECKING:
    from kvpush.cli.ask import Answer
    from kvpush.cli.cluster import Cluster
    from kvpush.core.events import TransferRecord

MODEL = "smollm2-135m"
QUESTION = (
    "Read this. The river Rhine begins in the Alps of Switzerland, where the snow melts. It passes through Lake "
    "Constance, runs along the border of France and Germany, and reaches the North Sea in the Netherlands. It is about "
    "1230 kilometres long. Barges carry coal, ore, grain and containers on it all year round, and the city of Cologne "
    "with its two towers stands on its left bank. In the Middle Ages, castles along its banks collected tolls from "
    "passing ships. Now answer: in which country does the Rhine begin, which sea does it reach, and how long is it?"
)
_RECORDS_WAIT_S = 5.0


class DemoFailed(KVPushError):
    """The demo has not shown what it is there to show."""


def demo_command(
    model: Annotated[str, typer.Option(help="tiny, smollm2-135m, or the folder of a chat model.")] = MODEL,
    question: Annotated[str, typer.Option(help="What to ask.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for logs. [default: a new one in the cache]")] = None,
) -> None:
    """Ask one prefill and one decode engine a question, and the decode engine alone; compare, show the transfer.

    Status 1 when the two answers differ or no block was transferred.
    """
    from kvpush.cli.models_command import make_model
    from kvpush.cli.up import StopRequested, make_spec, running, stop_signals
    from kvpush.runtime.recordfile import VARIABLE

    make_model(model)
    spec = make_spec(model, log_dir=log_dir)
    spec = replace(spec, env={VARIABLE: str(spec.log_dir)})
    body: dict[str, object] = {
        "model": spec.served_name,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    try:
        with stop_signals(), running(spec) as cluster:
            _show(cluster, question, body)
    except StopRequested:
        raise typer.Exit(1) from None


def _show(cluster: "Cluster", question: str, body: dict[str, object]) -> None:
    """Raises `DemoFailed` or `AskError`."""
    from kvpush.cli.ask import ask
    from kvpush.cli.output import console

    console.print(f"\nquestion     {question}\n", markup=False)
    console.print("through P/D  ", end="")
    through = ask(cluster.url, body, lambda piece: console.print(piece, end="", markup=False))
    console.print("\n\ndecode alone ", end="")
    # the salt keeps the engine from taking the transferred blocks from its prefix cache
    alone = ask(cluster.decode[0].url, {**body, "cache_salt": "alone"})
    console.print(alone.text, markup=False)
    records = _records(cluster, through.headers.get("x-kvpush-transfer-id", ""))
    _print_records(through, records)
    judge(through, alone, records)
    console.print(f"\nThe two answers are identical, and {blocks_of(records)} blocks were pushed.", style="green")


def _records(cluster: "Cluster", transfer_id: str) -> "list[TransferRecord]":
    """Both sides' records; the sender's may be written a moment after the answer has begun."""
    from kvpush.cli.timeline import records_of

    deadline = time.monotonic() + _RECORDS_WAIT_S
    while True:
        records = records_of(cluster.spec.log_dir, transfer_id)
        if len(records) >= 2 or time.monotonic() > deadline:
            return records
        time.sleep(0.1)


def _print_records(through: "Answer", records: "list[TransferRecord]") -> None:
    from kvpush.cli.output import console
    from kvpush.cli.timeline import Moment, moments
    from kvpush.core.events import Role

    for record in records:
        told = f"{record.tokens} tokens, {record.blocks} blocks, {record.nbytes} bytes"
        if record.role is Role.SENDER:
            told += f" in {record.descriptors} descriptors"
        console.print(f"\n{record.role:12} transfer {record.key}: {record.outcome} ({record.reason})", markup=False)
        console.print(f"{'':12} {told}", markup=False)
    ours = [Moment(through.first_at, "client: first token"), Moment(through.ended_at, "client: last token")]
    console.print(f"\n{'ms':>8}  what\n{0:8.1f}  client: question sent")
    for moment in sorted([*moments(records), *ours], key=lambda moment: moment.at):
        console.print(f"{(moment.at - through.asked_at) * 1000:8.1f}  {moment.what}", markup=False)


def judge(through: "Answer", alone: "Answer", records: "list[TransferRecord]") -> None:
    """Raises `DemoFailed` unless both texts are the same and blocks were delivered for the first."""
    path = through.headers.get("x-kvpush-path", "none")
    if through.text != alone.text:
        raise DemoFailed("the two answers differ")
    if not through.text:
        raise DemoFailed("the answer is empty")
    if path != "pd" or not blocks_of(records):
        raise DemoFailed(f"no block was transferred (path '{path}', {len(records)} transfer records)")


def blocks_of(records: "list[TransferRecord]") -> int:
    """Blocks that the receiving side has confirmed."""
    from kvpush.core.events import Outcome, Role

    return sum(r.blocks for r in records if r.role is Role.RECEIVER and r.outcome is Outcome.DELIVERED)
