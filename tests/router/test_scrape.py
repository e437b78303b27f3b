"""What is read of `/metrics`, and what is made of pages that are not as expected."""

from hypothesis import given
from hypothesis import strategies as st

from kvpush.core.ids import Address
from kvpush.router.scrape import parse_metrics

PAGE = r"""
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a\"b"} 3.0
vllm:num_requests_running{engine="1",model_name="a\"b"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 1234.0
process_start_time_seconds 1.79e+09
kvpush_engine_info{engine_id="p0",host="10.0.0.1",port="5600",tp_size="2"} 1.0
kvpush_transfers_total{engine="0",role="receiver",outcome="delivered",reason="ok"} 50.0
kvpush_transfers_total{engine="0",role="receiver",outcome="failed",reason="peer_lost"} 3.0
kvpush_transfers_total{engine="0",role="receiver",outcome="expired",reason="deadline"} 1.0
kvpush_transfers_total{engine="0",role="receiver",outcome="failed",reason="aborted"} 9.0
kvpush_transfers_total{engine="0",role="sender",outcome="failed",reason="peer_lost"} 7.0
"""


def test_page_is_read_and_ranks_are_added_up() -> None:
    sample = parse_metrics(PAGE)
    assert (sample.running, sample.waiting, sample.kv_usage) == (7.0, 2.0, 0.5)
    assert (sample.total_blocks, sample.block_size, sample.free_blocks) == (1000, 16, 500.0)
    assert sample.moved_tokens == 1234.0
    assert sample.lost_prompts == 4.0, "what others lost, or nobody wanted any more, is not"
    assert sample.started_at == 1.79e9
    assert sample.identity is not None
    assert sample.identity.target.address == Address("10.0.0.1", 5600)
    assert (sample.identity.target.engine_id, sample.identity.tp_size) == ("p0", 2)


def test_page_without_these_metrics_has_no_values() -> None:
    sample = parse_metrics("# nothing here\n")
    assert (sample.running, sample.kv_usage, sample.total_blocks, sample.identity) == (None, None, None, None)
    assert sample.lost_prompts is None


def test_identity_without_an_address_is_none() -> None:
    assert parse_metrics('kvpush_engine_info{engine_id="p0",host="",port="x",tp_size="1"} 1.0').identity is None


@given(st.text(alphabet='kvpush_engine_info{}",=\\ \n0.9vllm:num_requests_running'))
def test_no_page_is_an_error(page: str) -> None:
    parse_metrics(page)
