"""Which tokens a request consists of, as another engine can compare them."""

from vllm.v1.request import Request

from kvpush.core.digests import NO_DIGESTS, Digests, digests_of

_SEPARATOR = b"\0"


def prompt_digests(request: Request) -> Digests:
    """The digests of a request's prompt."""
    return _digests(request, int(request.num_prompt_tokens))


def digests_of_first(request: Request, tokens: int) -> Digests:
    """The digests of the first `tokens` tokens of prompt and answer."""
    return _digests(request, tokens)


def _digests(request: Request, tokens: int) -> Digests:
    """None for prompts that are more than tokens: what an image adds to the KV is not to be seen in them."""
    if request.mm_features or request.prompt_embeds is not None:
        return NO_DIGESTS
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    seed = _SEPARATOR.join((adapter.encode(), (request.cache_salt or "").encode()))
    return digests_of(request.all_token_ids[:tokens], seed)
