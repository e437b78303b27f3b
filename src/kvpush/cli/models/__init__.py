"""Models made on this machine, without a hub: `tiny` for tests, `smollm2-135m` for the demo."""

from kvpush.cli.models.cache import cache_dir
from kvpush.cli.models.catalog import CATALOG, Recipe, ensure_model, model_path

__all__ = ["CATALOG", "Recipe", "cache_dir", "ensure_model", "model_path"]
