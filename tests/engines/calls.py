"""What a test says to an engine process, and what it answers: plain values, pickled over a socket."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. `params` are its `kv_transfer_params`, None for a plain one."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int = 16
    params: dict[str, Any] | None = None
    n: int = 1
    seed: int | None = None
    temperature: float = 0.0
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    skip_prefix_cache: bool | None = None


@dataclass(frozen=True)
class Choice:
    """One of a request's `n` answers. `logprobs`: that of each token chosen, when asked for."""

    tokens: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A finished request. `cached_tokens` is what vLLM reports as not computed here."""

    request_id: str
    choices: tuple[Choice, ...]
    cached_tokens: int
    params: dict[str, Any] | None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the only choice."""
        (choice,) = self.choices
        return choice.tokens


@dataclass(frozen=True)
class Ready:
    """The engine is up: where its transfer thread listens, and the blocks that are free when nothing runs."""

    pid: int
    host: str
    port: int
    engine_id: str
    free_blocks: int


@dataclass(frozen=True)
class Add:
    """Add requests; answered by None."""

    asks: tuple[Ask, ...]


@dataclass(frozen=True)
class Abort:
    """Abort requests; answered by None."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Collect:
    """Answered by the `Answer`s of these requests (those that were aborted are left out) once all have ended."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Settle:
    """Answered by `State` once vLLM's scheduler has nothing left to do."""


@dataclass(frozen=True)
class Look:
    """Answered by `State` at once."""


@dataclass(frozen=True)
class Hold:
    """Take no step until `Go`; answered by None."""


@dataclass(frozen=True)
class Go:
    """Take steps again; answered by None."""


@dataclass(frozen=True)
class Reset:
    """Empty the prefix cache, and let go of what is kept for other turns, once the engine has settled; answered by
    whether it worked."""


@dataclass(frozen=True)
class Quit:
    """Shut the engine down; answered by `Remains`."""


@dataclass(frozen=True)
class State:
    """What a test may want to know of an engine. `counted`, `reused`: kvpush's counters since the start.

    `writes`: NIXL transfer handles that are open. `sockets`: open sockets of the whole process. `kept`: finished
    requests that are kept for another turn. `delivered`: transfers by role and mode; `chosen`: the modes that were
    chosen by measurement, by peer. `steps`: taken by vLLM since the start.
    """

    steps: int
    free_blocks: int
    requests: int
    open_transfers: int
    writes: int
    sockets: int
    counted: dict[str, int]
    transfers: dict[str, int]
    nbytes: dict[str, int]
    delivered: dict[str, int]
    chosen: dict[str, str]
    reused: int
    kept: int


@dataclass(frozen=True)
class Remains:
    """What is left of kvpush after a shutdown: names of threads, and whether the NIXL agent is still open.

    `listening`: sockets that still listen on the transfer thread's port.
    """

    threads: tuple[str, ...] = ()
    agents: int = 0
    listening: int = 0


Call = Add | Abort | Collect | Settle | Look | Hold | Go | Reset | Quit
