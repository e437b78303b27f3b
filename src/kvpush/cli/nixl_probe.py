"""`python -m kvpush.cli.nixl_probe`: make a NIXL agent the way a transfer thread does, and register memory with it."""

import os
import sys

import numpy as np

from kvpush.core.errors import TransportError
from kvpush.core.layout import Region


def main() -> int:
    """Say in one line what works; 1 when it does not."""
    from kvpush.cli.output import console
    from kvpush.transport.nixl import NixlTransport

    memory = np.zeros(1 << 20, np.uint8)
    try:
        transport = NixlTransport(f"doctor-{os.getpid()}")
        transport.register((Region(memory.ctypes.data, memory.nbytes),), "dram")
        transport.close()
    except TransportError as error:
        console.print(str(error), markup=False)
        return 1
    console.print(f"agent with UCX, {memory.nbytes >> 20} MiB registered", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
