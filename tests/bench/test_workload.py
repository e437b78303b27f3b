import numpy as np
import pytest

from kvpush.bench.workload import Shape, draw_prompts, poisson_arrivals
from kvpush.core.errors import ConfigError
from kvpush.sim.kvfunc import FIRST_TOKEN


def test_same_seed_draws_the_same_prompts_and_another_seed_others() -> None:
    shape = Shape(input_tokens=50, output_tokens=7)
    first, again, other = (draw_prompts(shape, 5, 300, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert {len(prompt.tokens) for prompt in first} == {50}
    assert all(FIRST_TOKEN <= token < 300 for prompt in first for token in prompt.tokens)


@pytest.mark.parametrize(("share", "common"), [(0.0, 0), (0.5, 20), (1.0, 40)])
def test_prompts_have_the_asked_share_in_common(share: float, common: int) -> None:
    prompts = draw_prompts(Shape(input_tokens=40, output_tokens=1, prefix_share=share), 4, 4096, 3)
    columns = list(zip(*(prompt.tokens for prompt in prompts), strict=True))
    assert [len(set(column)) == 1 for column in columns[:common]] == [True] * common
    if common < 40:
        assert any(len(set(column)) > 1 for column in columns[common:])


def test_arrivals_begin_at_zero_and_come_at_the_rate_on_average() -> None:
    arrivals = poisson_arrivals(4000, 20.0, 5)
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)  # as an exponential's is


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"input_tokens": 0}, "input"), ({"output_tokens": 0}, "output"), ({"prefix_share": 1.5}, "prefix-share")],
)
def test_shape_that_cannot_be_is_refused_by_name(fields: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Shape(**{"input_tokens": 8, "output_tokens": 8, **fields})  # type: ignore[arg-type]
