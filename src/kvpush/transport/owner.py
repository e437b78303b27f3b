"""Which thread may call a transport."""

import threading

from kvpush.core.errors import LocalProtocolError


class Owner:
    """The thread that made this is the owner, for as long as it lives."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()

    def check(self, what: str) -> None:
        """Raise `LocalProtocolError` when called from another thread than the (living) owner."""
        caller = threading.current_thread()
        if caller is not self._thread and self._thread.is_alive():
            raise LocalProtocolError(f"{what}: called from thread {caller.name}, but {self._thread.name} owns it")
