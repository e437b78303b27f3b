"""The secret of a cluster's control channels: made for one run, in a file that only this user can read.

A launcher that is killed leaves the file behind; its engines end with it, so there is nothing left that it opens.
"""

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BYTES = 32


@contextmanager
def secret_file() -> Iterator[Path]:
    """A file with a new secret, while this block lasts."""
    with tempfile.TemporaryDirectory(prefix="kvpush-secret-") as folder:
        path = Path(folder, "secret")
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(_BYTES))
        yield path
