"""One API request, several engine requests: a key for each, the same on both engines.

vLLM makes one engine request for each prompt in a list and for each of `n` choices, and hands all of them
the same `kv_transfer_params`. What tells them apart is vLLM's own request id:

    [CHOICE_]cmpl-BASE-PROMPT[-RANDOM]        /v1/completions, a list of prompts
    [CHOICE_]BASE[-RANDOM]                    everything else, one prompt

Both legs of a request carry the same prompts and the same `n` (the router's duty), so that PROMPT and CHOICE
are the same on both sides, whatever BASE and RANDOM are.
"""

import re

from kvpush.core.errors import ConfigError
from kvpush.core.ids import Key

_CHOICE = re.compile(r"(\d+)_")
_COMPLETIONS = "cmpl-"
_PROMPT = re.compile(r"-(\d+)$")
_PROMPT_AND_RANDOM = re.compile(r"-(\d+)-[0-9a-f]{8}$")

_CHOICES = 1 << 10
_PROMPTS = 1 << 14
_ATTEMPTS = 1 << 7


def sub_key(key: Key, request_id: str) -> Key:
    """The key of this engine request, when its API request has `key`.

    Raises `ConfigError` when there are more choices, prompts or attempts than keys.
    """
    prompt, choice = _position(request_id)
    for name, value, bound in (
        ("n", choice, _CHOICES),
        ("prompt", prompt, _PROMPTS),
        ("attempt", key.attempt, _ATTEMPTS),
    ):
        if value >= bound:
            raise ConfigError(name, f"{value} is not below {bound}", "Send several smaller requests.")
    return Key(key.transfer_id, (key.attempt * _PROMPTS + prompt) * _CHOICES + choice)


def _position(request_id: str) -> tuple[int, int]:
    """Which prompt of a list, and which of its `n` choices."""
    choice, rest = 0, request_id
    if found := _CHOICE.match(request_id):
        choice, rest = int(found[1]), request_id[found.end() :]
    if not rest.startswith(_COMPLETIONS):
        return 0, choice
    found = _PROMPT_AND_RANDOM.search(rest) or _PROMPT.search(rest)
    return int(found[1]) if found else 0, choice
