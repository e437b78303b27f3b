"""A real vLLM engine on the simulated `ci` device, in one process: serves prompts from stdin, answers on stdout.

Run as `python -m sim.offline FOLDER sync|async`; FOLDER gets the model's folder and the step log. Reads JSON: waves of
[prompt tokens, output tokens], each served together. Writes, as the last line, the answers' tokens and how
often a request was preempted.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from kvpush.sim.launch import launch_args
from kvpush.sim.settings import SimSettings

BLOCKS = 180  # of 16 tokens: too few for all prompts at once


def main() -> None:
    folder = Path(sys.argv[1])
    launch = launch_args("ci", folder)
    os.environ.update(launch.env)
    os.environ.update(SimSettings(profile="ci", verify=True, log=str(folder)).to_env())
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})
    waves = json.load(sys.stdin)
    engine, scheduler = _engine(str(launch.model), sys.argv[2])
    preempted = _count_preemptions(scheduler)
    answers = [_serve(engine, wave) for wave in waves]
    print(json.dumps({"answers": answers, "preempted": preempted[0]}))


def _engine(model: str, scheduling: str) -> tuple[Any, Any]:
    from vllm import LLM

    engine = LLM(
        model=model,
        worker_cls="kvpush.sim.worker.SimWorker",
        dtype="bfloat16",
        block_size=16,
        max_model_len=2048,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        num_gpu_blocks_override=BLOCKS,
        gpu_memory_utilization=0.2,  # what others use must not matter
        enforce_eager=True,
        enable_prefix_caching=True,
        async_scheduling=scheduling == "async",
    )
    return engine, engine.llm_engine.engine_core.engine_core.scheduler


def _count_preemptions(scheduler: Any) -> list[int]:
    count = [0]
    inner = scheduler._preempt_request

    def preempt(*args: Any, **kwargs: Any) -> None:
        count[0] += 1
        inner(*args, **kwargs)

    scheduler._preempt_request = preempt
    return count


def _serve(engine: Any, asked: list[tuple[list[int], int]]) -> list[list[int]]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": tokens} for tokens, _ in asked]
    params = [SamplingParams(max_tokens=output, ignore_eos=True) for _, output in asked]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()
