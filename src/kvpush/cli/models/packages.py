"""The packages that making a model takes: there or not, and without their own progress bars."""

import os
from importlib.util import find_spec

from kvpush.core.errors import ConfigError


def require(*packages: str) -> None:
    """Raises `ConfigError` for the first one that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError("model", f"making it needs the package {package}", "pip install 'kvpush[vllm]'.")


def quieten() -> None:
    """Turn off the progress bars of transformers: we have our own. Call it before transformers is imported."""
    # tqdm reads this once, when it is imported, and processes that we start later are not to inherit it
    os.environ["TQDM_DISABLE"] = "1"
    try:
        from transformers.utils import logging
    finally:
        del os.environ["TQDM_DISABLE"]
    logging.disable_progress_bar()
