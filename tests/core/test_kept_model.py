"""The model check for prompts that are kept for another turn: every interleaving of keeping, asking, releasing,
receiving and giving up over two real endpoints, with one fault anywhere."""

import pytest
from core.bounds import Bounds
from core.explore import explore, walk
from core.kept_model import BLOCKS, KeptModel

_QUICK = ("lose", "double", "fail", "unnoticed", "crash p", "crash d")
_LONGER = ("late", "break", "hang p")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [*_QUICK, *(pytest.param(fault, marks=pytest.mark.long) for fault in _LONGER)])
def test_kept_prompt_with_one_fault_anywhere(fault: str) -> None:
    search = explore(Bounds(blocks=BLOCKS, kinds=(fault,)), 60_000, KeptModel)
    assert search.is_complete


def test_two_kept_prompts_with_three_faults_at_random() -> None:
    walk(Bounds(transfers=2, blocks=BLOCKS, faults=3), range(100), 60, KeptModel)
