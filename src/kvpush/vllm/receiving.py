"""A request whose prompt, or an earlier turn of it, another engine has: its record in the scheduler's process."""

from enum import Enum, auto

from vllm.v1.request import Request

from kvpush.core.events import Purpose
from kvpush.core.ids import Key, Target
from kvpush.core.layout import Blocks
from kvpush.core.mode import Mode
from kvpush.vllm.first_token import FirstTokens


class Stage(Enum):
    """How far a request has come."""

    ASKING = auto()  # how much of an earlier turn can be had
    KNOWN = auto()  # announced or expected
    MOVING = auto()  # blocks are handed over until the worker reports the request
    OVER = auto()  # nothing to transfer any more, the request goes on


class Receiving:
    """All of one request. Owned by vLLM's engine thread."""

    __slots__ = (
        "answers",
        "begun",
        "blocks",
        "computed",
        "early_answers",
        "end",
        "key",
        "lost",
        "mode",
        "purpose",
        "ranks_heard",
        "released",
        "request",
        "stage",
        "target",
        "token",
        "wants_token",
    )

    def __init__(self, request: Request, key: Key, target: Target, purpose: Purpose, mode: Mode | None = None) -> None:
        self.request = request
        self.key = key
        self.target = target
        self.purpose = purpose
        self.mode = mode  # that was asked for, if any
        self.stage = Stage.KNOWN if purpose is Purpose.PROMPT else Stage.ASKING
        self.begun = purpose is Purpose.CONVERSATION  # it is time for blocks, wherever they come from
        self.computed = 0  # tokens that the engine had of its own when it was last asked
        self.end = int(request.num_prompt_tokens)  # where what can be had ends
        self.blocks: Blocks = ()  # that are being received into
        self.token: int | None = None
        self.ranks_heard = 0  # that have said directly that they have received it
        self.answers = self.early_answers = 0  # of ranks about an earlier turn: with a step, and directly
        self.lost = False  # an earlier turn was found, but has not come
        self.wants_token = False  # the first token of its answer is to come with the prompt
        self.released = False  # vLLM has finished the request and waits for its blocks only

    @property
    def waits(self) -> bool:
        """Whether vLLM can do nothing with the request before a transfer thread has said something of it."""
        waits = self.stage in (Stage.ASKING, Stage.MOVING) or (self.stage is Stage.KNOWN and not self.begun)
        return waits and not self.released

    @property
    def reused(self) -> int:
        """How many tokens of an earlier turn have come."""
        came = self.stage is Stage.OVER and bool(self.blocks) and not self.lost
        return self.end - self.computed if came and self.purpose is Purpose.CONVERSATION else 0


def computes_itself(request: Request) -> bool:
    """Requests whose prompt this engine has to compute, whoever else has: it needs logits for all of it, it has
    been there before, or the prompt is not complete yet."""
    return bool(request.skip_reading_prefix_cache or request.num_preemptions or request.resumable)


def least_tokens(record: Receiving, block_size: int, first_tokens: FirstTokens) -> int:
    """How many tokens are worth to be sent: a block of an earlier turn. Of a prompt vLLM computes the last token in any
    case, to sample from it, unless it begins with a first token that comes with that one."""
    if record.purpose is Purpose.CONVERSATION:
        return block_size
    return 1 if first_tokens.may_use(record.request) else 2
