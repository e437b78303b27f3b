"""The protocol's times and bounds. All durations in seconds on the driver's monotonic clock."""

import msgspec

from kvpush.core.errors import ConfigError


class ProtocolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults suit a data centre; tests shrink them.

    `quarantine_s` must be longer than the transport's own time-out (UCX over TCP gives up on an unreachable peer
    after the 10 s that transport/nixl.py sets; by itself it does not), because a posted write cannot be cancelled
    (R1). `drain_s`: when writes of an ended transfer take longer than this to stop, the connection to their
    receiver is given up. `transfer_s` bounds the time from acceptance to delivery, prefill queue included.
    `inquiry_s`: how long a prompt may wait to hear what is kept of it elsewhere.
    `window_bytes`: what is under way to one receiver at a time; a single write may be more.
    `doubt_s`: a peer whose control connection has broken is lost unless it is heard of again within this.
    """

    lease_s: float = 30.0
    heartbeat_s: float = 2.0
    peer_timeout_s: float = 10.0
    connect_timeout_s: float = 5.0
    doubt_s: float = 2.0
    retry_s: float = 0.5
    inquiry_s: float = 1.0
    unannounced_s: float = 10.0
    notice_grace_s: float = 2.0
    quarantine_s: float = 30.0
    drain_s: float = 60.0
    transfer_s: float = 1800.0
    retired_memory_s: float = 900.0
    retired_memory_keys: int = 200_000
    stop_s: float = 10.0
    window_bytes: int = 32 << 20

    @property
    def fence_s(self) -> float:
        """How long after the end of its lease a write may still go on: a receiver uses its blocks again
        `quarantine_s` after it, and the other half of that is for what the transport has under way."""
        return min(self.drain_s, self.quarantine_s / 2)

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if not getattr(self, field) > 0:
                raise ConfigError(
                    field, f"must be greater than 0, got {getattr(self, field)}", "Set a positive number."
                )
        # a heartbeat renews a lease from when the answer to an earlier one was sent: with every other heartbeat lost,
        # two of their intervals ago, and the next renewal comes another two later
        room = min(self.lease_s / 4, self.peer_timeout_s / 2)
        if self.heartbeat_s > room:
            raise ConfigError(
                "heartbeat_s",
                f"{self.heartbeat_s} leaves no room for a lost heartbeat within lease_s {self.lease_s} "
                f"and peer_timeout_s {self.peer_timeout_s}",
                f"Use at most {room:g}: a quarter of lease_s, and half of peer_timeout_s.",
            )
