"""The packages that making a model takes: there or not, and without their own progress bars."""

from importlib.util import find_spec

from kvpush.core.errors import ConfigError


def require(*packages: str) -> None:
    """Raises `ConfigError` for the first one that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError("model", f"making it needs the package {package}", "pip install 'kvpush[vllm]'.")


def quieten() -> None:
    """Turn off the progress bars of transformers: we have our own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
