"""Complete answers the router gives without an engine's body, and the way a leg fails."""

from enum import StrEnum

import msgspec

from kvpush.core.errors import KVPushError
from kvpush.router.config import EngineRole


class Answer(msgspec.Struct, frozen=True):
    """A whole HTTP answer."""

    status: int
    body: bytes
    content_type: str = "application/json"


def error_answer(status: int, message: str, kind: str, param: str | None = None) -> Answer:
    """An answer in the shape of OpenAI's errors, which clients know how to show."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return Answer(status, msgspec.json.encode({"error": error}))


class RequestRefused(KVPushError):
    """The router itself will not serve this request; `answer` says why."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body.decode(errors="replace"))
        self.answer = answer


class Cause(StrEnum):
    """What went wrong with a leg: the `cause` label of the counter of failed legs."""

    UNREACHABLE = "unreachable"  # no connection: the engine has seen nothing
    BROKEN = "broken"  # the connection or the answer broke: the engine may still be working on it
    TIMEOUT = "timeout"
    REFUSED = "refused"  # a complete answer with a status other than 2xx
    CONTRADICTED = "contradicted"  # the answer does not go on from the first token that the client has been sent


_FAULTY_STATUS = frozenset({500, 502, 503, 504})


class LegFailed(KVPushError):
    """One leg of a request has failed; `answer` is what the client gets if nothing better comes."""

    def __init__(self, role: EngineRole, engine: str, cause: Cause, answer: Answer, detail: str = "") -> None:
        """`detail` says more than the answer's first 200 bytes would."""
        said = detail or answer.body[:200].decode(errors="replace")
        super().__init__(f"{role} leg on {engine} {cause} ({answer.status}): {said}")
        self.role = role
        self.engine = engine
        self.cause = cause
        self.answer = answer

    @property
    def engines_fault(self) -> bool:
        """True when another engine might do better. A client's mistake, a full queue, or another first token is no
        fault."""
        if self.cause is Cause.CONTRADICTED:
            return False
        return self.cause is not Cause.REFUSED or self.answer.status in _FAULTY_STATUS


def broken_leg(role: EngineRole, engine: str, cause: Cause, detail: str) -> LegFailed:
    """A leg that failed without an answer of its own: the client gets 502, or 504 for a time-out."""
    status = 504 if cause is Cause.TIMEOUT else 502
    answer = error_answer(status, f"The {role} engine failed: {detail}", "engine_error")
    return LegFailed(role, engine, cause, answer, detail)
