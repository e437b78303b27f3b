"""Models whose fresh blocks must be zeroed are refused when the engine starts, with what is wrong and what to do."""

import pytest
import torch
from engines.scheduler_rig import SchedulerRig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec

from kvpush.core.errors import ConfigError
from kvpush.vllm.connector import KVPushConnector

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_HALF, _FULL = (
    FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=dtype)
    for dtype in (torch.bfloat16, torch.float32)
)
_MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))


@pytest.mark.parametrize("other", [_HALF, _MAMBA], ids=["two precisions", "mamba"])
def test_model_whose_blocks_must_be_zeroed_is_refused_at_the_start(tiny: str, other: KVCacheSpec) -> None:
    groups = [KVCacheGroupSpec(["layers.0"], _FULL), KVCacheGroupSpec(["layers.1"], other)]
    caches = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)

    with pytest.raises(
        ConfigError, match=r"model: has Mamba layers or KV caches of several precisions.*kv_cache_dtype"
    ):
        KVPushConnector(SchedulerRig(tiny).config, KVConnectorRole.SCHEDULER, caches)
