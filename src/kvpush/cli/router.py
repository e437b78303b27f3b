"""`kvpush router`: the OpenAI-compatible router over prefill and decode engines."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from kvpush.core.errors import ConfigError
from kvpush.router.config import (
    Connector,
    ConversationMode,
    FirstTokenMode,
    PrefillLoss,
    RouterConfig,
    SelfCheckMode,
    parse_engine,
)

_ENGINE = "URL[,kv=HOST:PORT][,engine_id=ID][,tp=N]"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_DEFAULT = RouterConfig(connector=Connector.NONE, decode=(parse_engine("http://unused:1"),))


def router_command(
    prefill: Annotated[
        list[str] | None, typer.Option(help="A prefill engine; repeat for more.", metavar=_ENGINE)
    ] = None,
    decode: Annotated[list[str] | None, typer.Option(help="A decode engine; repeat for more.", metavar=_ENGINE)] = None,
    connector: Annotated[
        Connector, typer.Option(help="The engines' KV connector: kvpush, vLLM's own two, or none (no prefill leg).")
    ] = Connector.KVPUSH,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULT.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = _DEFAULT.port,
    workers: Annotated[int, typer.Option(help="Processes that share the port.")] = _DEFAULT.workers,
    engines_file: Annotated[
        Path | None, typer.Option(help='More engines, re-read on change: {"prefill": [...], "decode": [...]}.')
    ] = None,
    local_below_tokens: Annotated[
        int, typer.Option(help="Prompts shorter than this get no prefill leg.")
    ] = _DEFAULT.local_below_tokens,
    late_decode: Annotated[
        bool, typer.Option("--late-decode", help="Choose the decode engine when the prompt is nearly done.")
    ] = False,
    unwritten_fraction: Annotated[
        float, typer.Option(help="Part of a decode engine's KV pool that may be set aside for KV on its way.")
    ] = _DEFAULT.unwritten_fraction,
    prefill_loss: Annotated[
        PrefillLoss, typer.Option(help="When prefill fails, also on another engine: fail, or recompute on decode.")
    ] = PrefillLoss.FAIL,
    first_token: Annotated[
        FirstTokenMode,
        typer.Option(help="Whose first token a stream begins with: decode, or forward the one of prefill at once."),
    ] = FirstTokenMode.DECODE,
    conversations: Annotated[
        ConversationMode,
        typer.Option(
            help="Whether decode engines keep answers, so that the next turn is not computed again (kv_both)."
        ),
    ] = ConversationMode.ON,
    self_check: Annotated[
        SelfCheckMode, typer.Option(help="Whether to be ready only after KV was seen to move in each pair.")
    ] = SelfCheckMode.ON,
    poll_s: Annotated[float, typer.Option(help="Seconds between looks at an engine's /metrics.")] = _DEFAULT.poll_s,
    connect_timeout_s: Annotated[
        float, typer.Option(help="Seconds until an engine must have taken a connection.")
    ] = _DEFAULT.connect_timeout_s,
    first_byte_timeout_s: Annotated[
        float, typer.Option(help="Seconds until an answer must begin.")
    ] = _DEFAULT.first_byte_timeout_s,
    max_body_bytes: Annotated[int, typer.Option(help="Longest request body.")] = _DEFAULT.max_body_bytes,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key clients may use; repeat for more.", envvar="KVPUSH_API_KEYS")
    ] = None,
    engine_api_key: Annotated[
        str, typer.Option(help="The key sent to the engines.", envvar="KVPUSH_ENGINE_API_KEY")
    ] = "",
    admin_key: Annotated[
        str,
        typer.Option(
            help="The key for /admin/engines and /drain; without one they are off.", envvar="KVPUSH_ADMIN_KEY"
        ),
    ] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Route OpenAI requests to prefill and decode engines, both legs at once.

    Example: kvpush router --prefill http://p0:8100 --decode http://d0:8200

    A prefill engine's kvpush address and id are read from its /metrics; kv= and engine_id= set them by hand, which
    vLLM's NixlPushConnector needs.
    """
    if log_level not in _LEVELS:
        raise ConfigError("log_level", f"'{log_level}' is unknown", f"Use one of {', '.join(_LEVELS)}.")
    config = RouterConfig(
        prefill=tuple(parse_engine(text) for text in prefill or ()),
        decode=tuple(parse_engine(text) for text in decode or ()),
        connector=connector,
        host=host,
        port=port,
        workers=workers,
        engines_file=str(engines_file or ""),
        local_below_tokens=local_below_tokens,
        late_decode=late_decode,
        unwritten_fraction=unwritten_fraction,
        prefill_loss=prefill_loss,
        first_token=first_token,
        conversations=conversations,
        self_check=self_check,
        poll_s=poll_s,
        connect_timeout_s=connect_timeout_s,
        first_byte_timeout_s=first_byte_timeout_s,
        max_body_bytes=max_body_bytes,
        api_keys=frozenset(api_key or ()),
        engine_api_key=engine_api_key,
        admin_key=admin_key,
    )
    _serve(config, _LEVELS[log_level])


def _serve(config: RouterConfig, log_level: int) -> None:
    if config.workers > 1:
        from kvpush.router.workers import run_workers

        run_workers(config, log_level)
        return
    from kvpush.router.app import run

    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run(config)
