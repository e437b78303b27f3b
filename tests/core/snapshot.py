"""Copies of endpoints, and what tells two of them apart: for the model check.

A copy shares what never changes. A fingerprint holds all that can matter for what an endpoint will do, with times
relative to now, so that states which differ only by when they were reached are one.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache
from types import FunctionType, MethodType, NoneType
from typing import Any

import msgspec

from kvpush.core.endpoint import Endpoint
from kvpush.core.ids import OpId
from kvpush.core.inbound import Caller
from kvpush.core.messages import Frame, Heartbeat, Register, Welcome, decode_frame
from kvpush.core.outbound import Session, SessionState
from kvpush.core.receiving import Receiving
from kvpush.core.retired import Retired
from kvpush.core.sending import Sending

Print = tuple[Any, ...]
"""Hashable; equal for states that behave alike."""

_FOREVER = 16.0
"""No time of a small configuration is longer: what was longer ago cannot be told from this."""

_SHARED = (int, float, str, bytes, bool, NoneType, tuple, frozenset, FunctionType, type, Enum, msgspec.Struct)
Memo = dict[int, Any]
Copier = Callable[[Any, Memo], Any] | None
_copiers: dict[type, Copier] = {}
"""How to copy a value of each type; None for those that are shared, which are most, and cost no call."""


# copies ---------------------------------------------------------------------------------------------------
def copy(endpoint: Endpoint) -> Endpoint:
    """An endpoint that goes its own way from here on."""
    copied: Endpoint = _copy_object(endpoint, {})
    return copied


def _copier_of(value: Any) -> Copier:
    kind = type(value)
    if kind not in _copiers:
        _copiers[kind] = _choose_copier(kind)
    return _copiers[kind]


def _choose_copier(kind: type) -> Copier:
    frozen = getattr(kind, "__dataclass_params__", None)
    if issubclass(kind, _SHARED) or (frozen is not None and frozen.frozen):
        return None
    if issubclass(kind, set):
        return lambda value, memo: value.copy()
    if issubclass(kind, dict):
        return _copy_dict
    if issubclass(kind, list):
        return _copy_list
    return _copy_method if kind is MethodType else _copy_object


def _copy_dict(value: Any, memo: Memo) -> Any:
    first = next(iter(value.values()), None)
    if type(first) is MethodType:  # an object's own methods, by what each is for
        owner = _copy_object(first.__self__, memo)
        return {name: MethodType(method.__func__, owner) for name, method in value.items()}
    copied = value.copy()
    _copy_values(copied, memo)
    return copied


def _copy_list(value: Any, memo: Memo) -> Any:
    return [copier(each, memo) if (copier := _copier_of(each)) else each for each in value]


def _copy_values(copied: dict[Any, Any], memo: Memo) -> None:
    for name, each in copied.items():
        copier = _copier_of(each)
        if copier is not None:
            copied[name] = copier(each, memo)


def _copy_method(value: Any, memo: Memo) -> Any:
    return MethodType(value.__func__, _copy_object(value.__self__, memo))


def _copy_object(value: Any, memo: Memo) -> Any:
    known = memo.get(id(value))
    if known is None:
        known = memo[id(value)] = object.__new__(type(value))
        known.__dict__.update(value.__dict__)
        _copy_values(known.__dict__, memo)
    return known


# fingerprints ---------------------------------------------------------------------------------------------
def fingerprint(endpoint: Endpoint, now: float) -> Print:
    """What an endpoint can be told apart by at `now`."""
    sender, receiver = endpoint._sender, endpoint._receiver
    callers = endpoint._inbound._callers
    ops = {op: i for i, op in enumerate(sorted(sender._in_flight._ops))}
    reads = {op: i for i, op in enumerate(sorted(receiver._reads._keys, reverse=True))}
    return (
        tuple(_sending(t, ops, callers.values(), now) for _, t in sorted(sender._transfers.items())),
        _retired(sender._retired),
        tuple(_record(caller, now, "layout", "name", "engine_id") for _, caller in sorted(callers.items())),
        tuple(_receiving(t, reads, now) for _, t in sorted(receiver._transfers.items())),
        _retired(receiver._retired),
        tuple(_session(session, now) for session in endpoint._outbound._sessions.values()),
        tuple((name, peer.ready, tuple(sorted(peer.uses))) for name, peer in endpoint._peers._peers.items()),
    )


def ago(time: float | None, now: float) -> float | None:
    """A time, relative to now."""
    return None if time is None else max(-_FOREVER, round(time - now, 6))


def _record(record: object, now: float, *skipped: str) -> Print:
    """All fields but those that decide nothing. A number that is no integer is a time."""
    return tuple(_field(each, now) for name, each in vars(record).items() if name not in skipped)


def _field(value: Any, now: float) -> Any:
    kind = type(value)
    if kind is float:
        return ago(value, now)
    return tuple(sorted(value)) if kind is set else value


def _sending(t: Sending, ops: dict[OpId, int], callers: Iterable[Caller], now: float) -> Print:
    known = t.caller is not None and any(caller is t.caller for caller in callers)
    began = None if t.request_id is not None else ago(t.began, now)
    fields = _record(t, now, "caller", "watcher", "ops", "began", "at", "nbytes", "descriptors", "wire_since", "wire_s")
    peers = tuple(peer and (peer.epoch, peer.link) for peer in (t.caller, t.watcher))
    return fields, began, peers, known, tuple(sorted(ops[op] for op in t.ops))


def _session(session: Session, now: float) -> Print:
    decides_nothing = ("welcome_by", "suspicion") if session.state is SessionState.READY else ()
    return _record(session, now, "memory", "rates", *decides_nothing)


def _receiving(t: Receiving, reads: dict[OpId, int], now: float) -> Print:
    times = tuple(ago(t.at.get(stage), now) for stage in ("accepted", "read"))
    return _record(t, now, "at", "ops"), times, "cancelled" in t.at, tuple(sorted(reads[op] for op in t.ops))


def _retired(retired: Retired) -> Print:
    stones: OrderedDict[Any, Any] = retired._stones
    return tuple(sorted((key, stone.outcome, stone.reason) for key, stone in stones.items()))


# frames ---------------------------------------------------------------------------------------------------
@lru_cache(maxsize=100_000)
def _decoded(frame: bytes) -> Frame:
    return decode_frame(frame)


def print_frame(data: bytes, now: float) -> Print:
    """A frame, with its times relative to now."""
    frame = _decoded(data)
    message = frame.message
    clock = getattr(message, "clock", None) if not isinstance(message, Heartbeat | Register) else message.echo
    match message:
        case Heartbeat(_, keys):
            body: Print = keys
        case Register(key, mode=mode):
            body = (key, mode)
        case Welcome(engine):
            body = (engine,)
        case _:
            body = tuple(
                str(getattr(message, name)) for name in message.__struct_fields__ if name not in ("clock", "wire_s")
            )
    return type(message).__name__, frame.source, frame.destination, ago(clock, now), body
