"""Every error kvpush raises, and the reasons a transfer can end with.

    KVPushError
    ├── LocalProtocolError      we broke the rules: a bug on this side, raised where it happened
    ├── RemoteProtocolError     the peer did: its message is refused, counted, and answered
    ├── TransportError          the data plane failed: the transfer it belongs to fails, nothing else
    ├── ControlError            the control channel cannot be opened (address in use, bad key)
    └── ConfigError             a setting is missing or wrong; names the field and what to do

Foreign exceptions (nixl, zmq, msgspec) are mapped to these at one seam per library.
"""

from enum import StrEnum


class Reason(StrEnum):
    """Why a transfer ended, or a message was refused: the `reason` label of counters and log lines."""

    OK = "ok"
    NOT_NEEDED = "not_needed"  # the receiver already had every token
    # the receiving request went away
    ABORTED = "aborted"
    # the sending request went away
    PREFILL_ABORTED = "prefill_aborted"
    PREFILL_PREEMPTED = "prefill_preempted"
    PREFILL_FAILED = "prefill_failed"
    NEVER_ANNOUNCED = "never_announced"  # no prefill request with this key ever came
    SPAN_NOT_COVERED = "span_not_covered"  # the sender holds fewer tokens than the receiver asked for
    NOT_ASKED_FOR = "not_asked_for"  # kept for a next turn that did not come
    EVICTED = "evicted"  # kept, and its blocks were needed
    # time
    LEASE_EXPIRED = "lease_expired"
    DEADLINE = "deadline"
    NOTICE_LOST = "notice_lost"
    # peers
    PEER_HANDSHAKE = "peer_handshake"
    PEER_SILENT = "peer_silent"
    PEER_LOST = "peer_lost"
    PEER_RESTARTED = "peer_restarted"
    WRONG_ENGINE = "wrong_engine"
    INCOMPATIBLE = "incompatible"
    UNKNOWN_TRANSFER = "unknown_transfer"
    RETIRED_TRANSFER = "retired_transfer"
    # data plane
    POST_FAILED = "post_failed"
    TRANSPORT = "transport"
    # bad input from the wire
    BAD_MESSAGE = "bad_message"
    BAD_VERSION = "bad_version"
    BAD_BLOCK = "bad_block"
    BAD_SPAN = "bad_span"
    DUPLICATE_KEY = "duplicate_key"
    # why the sender's first token was not used
    LOGPROBS = "logprobs"
    SEED = "seed"
    STRUCTURED_OUTPUT = "structured_output"
    OUTPUT_HISTORY = "output_history"  # sampling depends on which tokens are answer, and which prompt
    NO_TEXT = "no_text"  # the prompt is not made of tokens only
    NO_TOKEN = "no_token"  # the sender had none
    # the process is stopping
    SHUTDOWN = "shutdown"
    INTERNAL = "internal"  # a bug of ours; its traceback is in the log


class KVPushError(Exception):
    """The root of kvpush's errors."""


class LocalProtocolError(KVPushError):
    """This side was asked for something the protocol does not allow; `reason` is the counter label."""

    def __init__(self, detail: str, reason: Reason = Reason.INTERNAL) -> None:
        super().__init__(detail)
        self.reason = reason


class RemoteProtocolError(KVPushError):
    """A peer's message was refused.

    `reason` is the counter label; `field` names the offending field of the message, "" for the whole.
    """

    def __init__(self, reason: Reason, detail: str, field: str = "") -> None:
        super().__init__(f"{field}: {detail}" if field else detail)
        self.reason = reason
        self.detail = detail
        self.field = field


class TransportError(KVPushError):
    """The data plane refused or failed an operation."""


class ControlError(KVPushError):
    """The control channel could not be set up."""


class ConfigError(KVPushError):
    """A setting is missing or wrong."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}. {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy
