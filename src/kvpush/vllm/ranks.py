"""Which rank this worker is, and how many there are.

Ranks of two engines are paired by number: the one that listens on `port + r` with our rank `r`.
"""

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvpush.core.ids import EngineId


@dataclass(frozen=True)
class Rank:
    """A worker's place in its engine: `number` of `count` tensor parallel ranks, `index` of all `ranks`."""

    number: int
    count: int
    index: int
    ranks: int

    @classmethod
    def of_this_process(cls) -> "Rank":
        """As vLLM has set up its process groups."""
        tensor, pipeline = get_tp_group(), get_pp_group()
        count, stages = tensor.world_size, pipeline.world_size
        return cls(tensor.rank_in_group, count, pipeline.rank_in_group * count + tensor.rank_in_group, count * stages)


def ranks_per_engine(config: VllmConfig) -> int:
    """How many workers, and so how many control addresses, one engine has."""
    parallel = config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def engine_group(config: VllmConfig) -> int:
    """The data parallel rank of this engine among those that share its settings."""
    return int(config.parallel_config.data_parallel_index)


def engine_id(config: VllmConfig) -> EngineId:
    """vLLM's id of this engine; vLLM itself makes those of data parallel ranks differ."""
    return EngineId(config.kv_transfer_config.engine_id)
