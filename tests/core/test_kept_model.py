"""The model check for prompts that are kept for another turn: every interleaving of keeping, asking, releasing,
receiving and giving up over two real endpoints, with one fault anywhere."""

import pytest
from core.bounds import FAULTS, Bounds
from core.explore import Say, explore, say, walk
from core.kept_model import BLOCKS, KeptModel

from kvpush.core.mode import Mode


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("fault", FAULTS)
def test_kept_prompt_with_one_fault_anywhere(fault: str, mode: Mode, record_property: Say) -> None:
    search = explore(Bounds(blocks=BLOCKS, kinds=(fault,), mode=mode), 60_000, KeptModel)
    say(f"a kept prompt, {mode}, one fault ({fault})", search, record_property)
    assert search.is_complete


@pytest.mark.parametrize("mode", Mode)
def test_two_kept_prompts_with_three_faults_at_random(mode: Mode, record_property: Say) -> None:
    search = walk(Bounds(transfers=2, blocks=BLOCKS, faults=3, mode=mode), range(100), 60, KeptModel)
    say(f"two kept prompts, {mode}, three faults, at random", search, record_property)
