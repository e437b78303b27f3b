"""Steps in which nothing is computed, while vLLM waits for the network: how long each may wait for news.

vLLM's loop takes such a step about every millisecond, to ask whether something has come, and each costs a tenth of one.
Here the step waits for the transfer threads to say so. Short waits are not affected, and what cannot be heard here,
such as a new request, is late by `LONGEST_MS` at most. Owned by vLLM's engine thread.
"""

from collections import deque

LONGEST_MS = 5
"""No engine thread may be held up for longer."""
_PER_MS = 4


class Lull:
    """Which requests and steps are under way, and how many steps in a row had nothing to compute."""

    def __init__(self, most_steps: int, longest_ms: int = LONGEST_MS) -> None:
        """`most_steps`: so many may be under way at once. `longest_ms` 0 never lets a step wait."""
        self._longest_ms = longest_ms
        self._under_way: deque[int] = deque(maxlen=most_steps)
        self._unfinished: set[str] = set()
        self._empty = 0

    def request_added(self, request_id: str) -> None:
        """vLLM has a request, of whatever kind."""
        self._unfinished.add(request_id)

    def request_finished(self, request_id: str) -> None:
        """vLLM is done with a request."""
        self._unfinished.discard(request_id)

    def step_scheduled(self, tokens: int) -> None:
        """One more step is under way, which computes so many tokens."""
        self._under_way.append(tokens)
        self._empty = 0 if tokens else self._empty + 1

    def step_ended(self) -> None:
        """vLLM has the results of the first of them."""
        if self._under_way:
            self._under_way.popleft()

    def heard(self) -> None:
        """There was news: more may follow soon."""
        self._empty = 0

    def wait_ms(self, waiting: int) -> int:
        """How long the step that was scheduled last may wait when `waiting` requests can do nothing without news. 0
        while vLLM has others, for some are ready when it has asked often enough, and while another step computes, for
        its results must not be late. Else a millisecond more for every few empty steps."""
        if any(self._under_way) or waiting < len(self._unfinished):
            return 0
        return min(self._longest_ms, self._empty // _PER_MS)
