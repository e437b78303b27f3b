"""`kvpush up`: engines and a router on this machine, until Ctrl-C or until one of them dies."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpush.cli.parts import FIRST_TOKEN_ARGS, FORWARD_ARGS, ClusterSpec, LoadFailurePolicy
from kvpush.core.errors import ConfigError
from kvpush.core.mode import ModeSetting
from kvpush.router.config import Connector, ConversationMode

if TYPE_CHECKING:
    from kvpush.cli.cluster import Cluster

_WATCH_S = 0.5


class StopRequested(BaseException):
    """SIGTERM or SIGINT arrived: unwind, and stop everything on the way. Not an error."""


def up_command(
    model: Annotated[str, typer.Option(help="tiny, smollm2-135m, or the folder of a checkpoint.")] = "smollm2-135m",
    prefill: Annotated[int | None, typer.Option(help="Prefill engines. [default: 1; 0 with --connector none]")] = None,
    decode: Annotated[int, typer.Option(help="Decode engines.")] = 1,
    connector: Annotated[
        Connector, typer.Option(help="KV connector: kvpush, vLLM's own two, or none (plain engines).")
    ] = Connector.KVPUSH,
    mode: Annotated[
        ModeSetting, typer.Option(help="kvpush only: who moves the bytes; auto measures both and takes the faster.")
    ] = ModeSetting.PUSH,
    device: Annotated[
        str, typer.Option(help="cpu (float32, eager), vllm (vLLM's own choice and defaults) or sim:PROFILE.")
    ] = "cpu",
    host: Annotated[str, typer.Option(help="Address that engines and router listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The router's port; 0 picks a free one.")] = 8000,
    block_size: Annotated[int | None, typer.Option(help="KV cache block size in tokens. [default: vLLM's]")] = None,
    conversations: Annotated[
        ConversationMode,
        typer.Option(help="Whether the next turn of a conversation is computed from where it went on."),
    ] = ConversationMode.OFF,
    policy: Annotated[
        LoadFailurePolicy, typer.Option(help="What decode engines do with a request whose transfer fails.")
    ] = LoadFailurePolicy.FAIL,
    first_token: Annotated[
        bool,
        typer.Option("--first-token", help="Answers begin with the token that prefill has sampled, at once."),
    ] = False,
    secret_file: Annotated[
        Path | None,
        typer.Option(help="kvpush only: file with the secret of the control channel. [default: a new secret]"),
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for logs. [default: a new one in the cache]")] = None,
    vllm_args: Annotated[list[str] | None, typer.Argument(help="After --: more arguments for every engine.")] = None,
) -> None:
    """Start prefill engines, decode engines and a router; stop all of them on Ctrl-C or when one dies.

    Example: kvpush up --prefill 1 --decode 2 --model tiny -- --max-model-len 4096
    """
    spec = make_spec(
        model,
        prefill=prefill,
        decode=decode,
        connector=connector,
        mode=mode,
        device=device,
        host=host,
        port=port,
        block_size=block_size,
        load_failure_policy=policy,
        conversations=conversations,
        secret_file=secret_file,
        log_dir=log_dir,
        vllm_args=tuple(vllm_args or ()),
        decode_args=FIRST_TOKEN_ARGS if first_token else (),
        router_args=FORWARD_ARGS if first_token else (),
    )
    try:
        with stop_signals(), running(spec) as cluster:
            _watch(cluster)
    except StopRequested:
        from kvpush.cli.output import console

        console.print("stopped")


def make_spec(
    model: str,
    *,
    prefill: int | None = None,
    decode: int = 1,
    connector: Connector = Connector.KVPUSH,
    mode: ModeSetting = ModeSetting.PUSH,
    device: str = "cpu",
    host: str = "127.0.0.1",
    port: int = 0,
    block_size: int | None = None,
    load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.FAIL,
    conversations: ConversationMode = ConversationMode.OFF,
    secret_file: Path | None = None,
    log_dir: Path | None = None,
    vllm_args: tuple[str, ...] = (),
    decode_args: tuple[str, ...] = (),
    router_args: tuple[str, ...] = (),
) -> ClusterSpec:
    """A spec from what a user writes: finds or makes the model. Raises `ConfigError`."""
    from kvpush.cli.device import plan_device
    from kvpush.cli.models import model_path

    config = _connector_config(connector, mode, secret_file)
    plan = plan_device(device)
    return ClusterSpec(
        model=plan.model or model_path(model),
        served_name=Path(model).name if plan.model is None else plan.model.name,
        log_dir=log_dir or new_log_dir(),
        prefill=(0 if connector is Connector.NONE else 1) if prefill is None else prefill,
        decode=decode,
        connector=connector,
        device=plan,
        host=host,
        port=port,
        block_size=block_size,
        connector_config=config,
        load_failure_policy=load_failure_policy,
        conversations=conversations,
        vllm_args=vllm_args,
        decode_args=decode_args,
        router_args=router_args,
    )


def _connector_config(connector: Connector, mode: ModeSetting, secret_file: Path | None) -> dict[str, str]:
    config = {} if mode is ModeSetting.PUSH else {"mode": str(mode)}
    if secret_file is not None:
        config["secret_file"] = str(secret_file.resolve())
    if config and connector is not Connector.KVPUSH:
        name, value = next(iter(config.items()))
        raise ConfigError(
            name, f"{value} with --connector {connector}", f"Leave --{name.replace('_', '-')} out, or use kvpush."
        )
    if secret_file is not None:
        from kvpush.runtime.auth import read_secret

        read_secret(config["secret_file"])  # what is wrong with it is better said now than by engines
    return config


def new_log_dir() -> Path:
    """A folder of its own for the logs of one run. Not created here."""
    from kvpush.cli.models import cache_dir

    return cache_dir() / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


@contextmanager
def stop_signals() -> Iterator[None]:
    """Let SIGTERM, SIGHUP and Ctrl-C raise `StopRequested`, the first time; later ones do not disturb the stop."""

    def stop(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise StopRequested

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def running(spec: ClusterSpec) -> Iterator["Cluster"]:
    """A cluster that shows on the console how it starts, where it is and that it stops."""
    from kvpush.cli.cluster import Cluster
    from kvpush.cli.output import console, starting

    console.print(f"logs in {spec.log_dir}", markup=False)
    with ExitStack() as stack:
        with starting() as observer:
            cluster = stack.enter_context(Cluster(spec, observer))
        stack.callback(console.print, "stopping ...")
        for engine in cluster.engines:
            console.print(f"{engine.name:12} {engine.url}", markup=False)
        console.print(f"ready        {cluster.url}/v1  (model {spec.served_name})", markup=False)
        yield cluster


def _watch(cluster: "Cluster") -> None:
    """Never return: only `PartDied` or a signal ends it."""
    never = threading.Event()
    while not never.wait(_WATCH_S):
        cluster.check()
