"""`kvpush router`: the OpenAI-compatible router over prefill and decode engines."""

import logging
from typing import Annotated

import typer

from kvpush.router.config import Connector, RouterConfig, parse_engine

_ENGINE = "URL[,kv=HOST:PORT][,engine_id=ID][,tp=N]"


def router_command(
    prefill: Annotated[
        list[str] | None, typer.Option(help="A prefill engine; repeat for more.", metavar=_ENGINE)
    ] = None,
    decode: Annotated[list[str] | None, typer.Option(help="A decode engine; repeat for more.", metavar=_ENGINE)] = None,
    connector: Annotated[
        Connector, typer.Option(help="The engines' KV connector: kvpush, vLLM's own two, or none (no prefill leg).")
    ] = Connector.KVPUSH,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
    engine_api_key: Annotated[
        str, typer.Option(help="Key sent to the engines.", envvar="KVPUSH_ENGINE_API_KEY", show_envvar=True)
    ] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Route OpenAI requests to prefill and decode engines, both legs at once.

    Example: kvpush router --prefill http://p0:8100 --decode http://d0:8200

    A prefill engine's kvpush address and id are read from its /metrics; kv= and engine_id= set them by hand, which
    vLLM's NixlPushConnector needs.
    """
    from kvpush.router.app import run

    config = RouterConfig(
        prefill=tuple(parse_engine(text) for text in prefill or ()),
        decode=tuple(parse_engine(text) for text in decode or ()),
        connector=connector,
        host=host,
        port=port,
        engine_api_key=engine_api_key,
    )
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run(config)
