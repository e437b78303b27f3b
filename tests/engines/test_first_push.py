"""One prompt, pushed from a real engine to a real engine."""

import pytest
from engines.calls import Ask
from engines.harness import Pair, new_id, prompt_of

pytestmark = pytest.mark.engine


def test_decode_engine_continues_a_prompt_that_the_prefill_engine_has_computed(pair: Pair) -> None:
    prompt = prompt_of(100)
    (plain,) = pair.decode.ask(Ask(request_id=new_id(), prompt=prompt))
    pair.forget()

    (pushed,) = pair.ask(Ask(request_id=new_id(), prompt=prompt))

    assert pushed.choices == plain.choices
    assert pair.decode.look().transfers == {"receiver delivered ok": 1}
    pair.assert_nothing_held()
