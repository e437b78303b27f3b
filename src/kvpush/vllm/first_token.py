"""First tokens that come with prompts: which requests may begin with one, and what became of each. Engine thread.

The prefill engine has sampled the first token of the answer already. A decode engine whose scheduler knows how to begin
with it (see first_token_scheduler.py) asks for it with the prompt. Stop conditions look at tokens, so they need no
exception; what follows the first token must come out as if it had been sampled here, and where that takes more than the
token itself, it is sampled here.
"""

from collections.abc import Callable
from typing import NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvpush.core.errors import Reason


class FirstToken(NamedTuple):
    """A token that a request may begin with."""

    request_id: str
    token: int


class FirstTokens:
    """The first tokens of one engine. Until `use` is called nobody wants any."""

    def __init__(self, count: Callable[[Reason], None]) -> None:
        """`count` is told of each prompt whether its token was used (OK), or why not."""
        self._count = count
        self._in_use = False
        self._arrived: list[FirstToken] = []

    def use(self) -> None:
        """The scheduler begins requests with their first tokens."""
        self._in_use = True

    def wanted(self, request: Request) -> bool:
        """Whether a request whose prompt is about to be received wants its first token with it."""
        reason = _obstacle(request) if self._in_use else None
        if reason is not None:
            self.unused(reason)
        return self._in_use and reason is None

    def may_use(self, request: Request) -> bool:
        """As `wanted`, for who only wonders."""
        return self._in_use and _obstacle(request) is None

    def arrived(self, request_id: str, token: int) -> None:
        """A prompt has come with its token."""
        self._arrived.append(FirstToken(request_id, token))

    def take(self) -> list[FirstToken]:
        """Those that have arrived since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def used(self) -> None:
        """A request has begun with its token."""
        self._count(Reason.OK)

    def unused(self, reason: Reason) -> None:
        """A request is computed here from its first token on."""
        if self._in_use:
            self._count(reason)


def _obstacle(request: Request) -> Reason | None:
    """Why a request cannot begin with a token that was sampled elsewhere."""
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None or request.prompt_is_token_ids is not None:
        return Reason.NO_TEXT
    if request.use_structured_output:
        return Reason.STRUCTURED_OUTPUT
    if params.logprobs is not None or params.logprob_token_ids:
        return Reason.LOGPROBS
    if params.seed is not None and params.temperature > 0:
        return Reason.SEED  # the generator's state is on the other engine
    return Reason.OUTPUT_HISTORY if _looks_back(params) else None


def _looks_back(params: SamplingParams) -> bool:
    """Whether sampling depends on which tokens are answer and which are prompt: the worker takes the token for prompt.
    A ban on stop tokens is not even known to the prefill engine."""
    counted = params.presence_penalty or params.frequency_penalty
    return bool(counted or params.min_tokens or params.bad_words or params.thinking_token_budget)
