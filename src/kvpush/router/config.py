"""What the router is told at start: one frozen value, checked when it is made."""

from enum import StrEnum
from urllib.parse import urlsplit

import msgspec

from kvpush.core.errors import ConfigError
from kvpush.core.ids import Address, EngineId
from kvpush.router.place import Place


class Connector(StrEnum):
    """How the two legs of a request find each other."""

    KVPUSH = "kvpush"  # both legs at once, kvpush's own fields
    VLLM_PUSH = "vllm-push"  # both legs at once, for vLLM's NixlPushConnector
    VLLM_PULL = "vllm-pull"  # prefill first, its kv_transfer_params relayed, for vLLM's NixlConnector
    NONE = "none"  # no prefill leg: every engine answers alone


class EngineRole(StrEnum):
    """Which leg an engine serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class PrefillLoss(StrEnum):
    """What a request gets when its prompt cannot be computed by a prefill engine."""

    FAIL = "fail"  # the error
    RECOMPUTE = "recompute"  # the decode engine alone; header and counter say so


class SelfCheckMode(StrEnum):
    """Whether a request is sent through each pair of engines before the router is called ready."""

    ON = "on"
    OFF = "off"


class ConversationMode(StrEnum):
    """Whether decode engines keep what they have answered for the next turn."""

    ON = "on"
    OFF = "off"


class FirstTokenMode(StrEnum):
    """Whose first token a client is sent: both engines' are the same."""

    DECODE = "decode"  # the decode engine's, once it has the prompt's KV
    FORWARD = "forward"  # the prefill engine's, when it has been sampled, where the decode engine begins with it


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as configured. What is None is read from the engine's own `/metrics`."""

    url: str
    control: Address | None = None
    engine_id: EngineId | None = None
    tp_size: int = 1


def parse_engine(text: str) -> EngineSpec:
    """Read `URL[,kv=HOST:PORT][,engine_id=ID][,tp=N]`. Raises `ConfigError`."""
    url, *settings = text.strip().split(",")
    known = {"kv": "", "engine_id": "", "tp": "1"}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known or not value:
            raise ConfigError("engine", f"'{setting}' in '{text}' is unknown", "Use kv=HOST:PORT, engine_id=ID, tp=N.")
        known[name] = value
    if not known["tp"].isdecimal() or int(known["tp"]) < 1:
        raise ConfigError("engine", f"tp='{known['tp']}' in '{text}' is no number of ranks", "Use tp=1 or more.")
    return EngineSpec(
        url=parse_url(url),
        control=parse_address(known["kv"]) if known["kv"] else None,
        engine_id=EngineId(known["engine_id"]) if known["engine_id"] else None,
        tp_size=int(known["tp"]),
    )


def parse_url(text: str) -> str:
    """Check and normalise an engine's base URL. Raises `ConfigError`."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port is None
    except ValueError:
        wrong = True
    if wrong or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError("engine", f"'{text}' is no engine URL", "Write it as http://HOST:PORT.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def parse_address(text: str) -> Address:
    """Read `HOST:PORT` or `[V6]:PORT`. Raises `ConfigError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("kv", f"'{text}' is no address", "Write it as HOST:PORT.")
    return Address(host.strip("[]"), int(port))


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The router's settings. Times in seconds, sizes in bytes.

    `first_byte_timeout_s` bounds the wait for the first byte of an answer, and `queue_timeout_s` the wait in the router
    before it; `idle_timeout_s` the wait for each further byte. `body_timeout_s` bounds the time a client may take to
    send its request, `client_stall_timeout_s` how long it may not read its answer. `drain_timeout_s` is what answers
    in progress get when the router is stopped.

    `local_below_tokens`: shorter prompts go to a decode engine alone. `unwritten_fraction` bounds what each decode
    engine sets aside for KV on its way, as a part of its pool. `late_decode` starts the prefill leg at once and chooses
    the decode engine `late_decode_lead_s` before the prompt is expected to be done.

    `first_token`: see docs/router.md; decode engines need kvpush's scheduler class for `forward`.

    `conversations`: see docs/conversations.md; `max_conversations` bounds how many turns are remembered.

    `api_keys`: clients must send one of them, if there are any. `admin_key` "" turns the admin routes off.
    `engine_api_key` is sent to the engines; when it is "", and the router asks for no keys of its own, the client's
    Authorization header is passed on. `engines_file` names more engines (see enginefile.py).

    `place` is set by `run_workers` for each worker.
    """

    prefill: tuple[EngineSpec, ...] = ()
    decode: tuple[EngineSpec, ...] = ()
    connector: Connector = Connector.KVPUSH
    host: str = "127.0.0.1"
    port: int = 8000
    poll_s: float = 0.5
    connect_timeout_s: float = 3.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    keepalive_s: float = 3.0
    queue_timeout_s: float = 60.0
    max_waiting: int = 10_000
    local_below_tokens: int = 0
    bytes_per_token: float = 4.0
    unwritten_fraction: float = 0.5
    late_decode: bool = False
    late_decode_lead_s: float = 0.1
    prefill_loss: PrefillLoss = PrefillLoss.FAIL
    first_token: FirstTokenMode = FirstTokenMode.DECODE
    max_body_bytes: int = 64 * 1024 * 1024
    engine_api_key: str = ""
    api_keys: frozenset[str] = frozenset()
    admin_key: str = ""
    conversations: ConversationMode = ConversationMode.ON
    max_conversations: int = 100_000
    engines_file: str = ""
    self_check: SelfCheckMode = SelfCheckMode.ON
    max_header_bytes: int = 16 * 1024
    body_timeout_s: float = 60.0
    client_stall_timeout_s: float = 120.0
    drain_timeout_s: float = 10.0
    workers: int = 1
    place: Place = Place()

    def __post_init__(self) -> None:
        _check_positive(self)
        if not 0 <= self.port < 65536:
            raise ConfigError("port", f"{self.port} is no TCP port", "Use 1..65535, or 0 for any free one.")
        _check_engines(self)
        if self.first_token is FirstTokenMode.FORWARD and self.connector is not Connector.KVPUSH:
            problem = f"'forward' with connector '{self.connector}', whose decode engines sample it themselves"
            raise ConfigError("first_token", problem, "Use decode, or connector kvpush.")


_ZERO_ALLOWED = frozenset({"port", "local_below_tokens", "late_decode"})


def _check_positive(config: RouterConfig) -> None:
    for field in config.__struct_fields__:
        value = getattr(config, field)
        if isinstance(value, (int, float)) and field not in _ZERO_ALLOWED and not value > 0:
            raise ConfigError(field, f"must be greater than 0, got {value}", "Set a positive number.")


def _check_engines(config: RouterConfig) -> None:
    urls = [spec.url for spec in config.prefill + config.decode]
    if not config.decode and not config.engines_file:
        raise ConfigError("decode", "no decode engine is named", "Give at least one --decode http://HOST:PORT.")
    if twice := {url for url in urls if urls.count(url) > 1}:
        raise ConfigError("engine", f"{min(twice)} is named twice", "Name each engine once, in one role.")
    if config.connector is Connector.NONE and config.prefill:
        raise ConfigError("prefill", "connector 'none' has no prefill leg", "Name the engines with --decode.")
    if config.connector is not Connector.NONE and not config.prefill and not config.engines_file:
        raise ConfigError(
            "prefill",
            f"no prefill engine is named, but connector '{config.connector}' needs one",
            "Give at least one --prefill http://HOST:PORT, or use --connector none.",
        )
    if config.connector is Connector.VLLM_PUSH:
        for spec in config.prefill:
            _check_push_identity(spec)


def _check_push_identity(spec: EngineSpec) -> None:
    if spec.control is None or spec.engine_id is None:
        raise ConfigError(
            "prefill",
            f"{spec.url} has no kv= or no engine_id=, which vLLM does not publish",
            "Write --prefill URL,kv=HOST:SIDE_CHANNEL_PORT,engine_id=ID as in the engine's --kv-transfer-config.",
        )
