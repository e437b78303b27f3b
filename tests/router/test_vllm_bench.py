"""vLLM's own load generator as a client of the router."""

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE

import pytest
from router.rig import rigged
from router.stub import Reply, Seen, event

from kvpush.cli.models import model_path

PROMPTS = 30
SCRIPT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def tokens(seen: Seen) -> Reply:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 50, "completion_tokens": 8, "total_tokens": 58}}\n\n'
    chunks = (*(event("t") for _ in range(8)), usage, b"data: [DONE]\n\n")
    return Reply(chunks=chunks, content_type="text/event-stream", gap_s=0.001, wait_s=0.01)


@pytest.mark.long
async def test_every_request_of_vllms_load_generator_succeeds() -> None:
    tokenizer = str(await asyncio.to_thread(model_path, "tiny"))
    settings = ["--backend", "openai", "--model", tokenizer, "--served-model-name", "m", "--dataset-name", "random"]
    settings += ["--random-input-len", "50", "--random-output-len", "8", "--disable-tqdm"]
    settings += ["--num-prompts", str(PROMPTS), "--max-concurrency", "8"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    async with rigged(decode=[tokens]) as rig:
        command = (sys.executable, "-c", SCRIPT, "--base-url", rig.url, *settings)
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL, env=env)
        output, _ = await process.communicate()
    found = re.search(rb"Successful requests: +(\d+)", output)
    assert found is not None, output[-2000:]
    assert int(found[1]) == PROMPTS
    assert len(rig.prefill.seen) >= PROMPTS
