import socket

import pytest

from kvpush.cli.ports import can_listen, free_ports, listen_error
from kvpush.core.errors import ConfigError


def test_free_ranges_do_not_overlap() -> None:
    bases = free_ports(20, 16)
    taken = [port for base in bases for port in range(base, base + 16)]
    assert len(set(taken)) == 20 * 16


def test_free_ports_lie_below_those_that_the_kernel_hands_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert max(free_ports(50)) < server.getsockname()[1]


def test_range_with_one_port_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not can_listen(range(port - 1, port + 1))
    assert can_listen([port])


def test_asking_for_more_ports_than_there_are_names_the_range() -> None:
    with pytest.raises(ConfigError, match="12000-32000"):
        free_ports(2, 15_000)


def test_address_that_cannot_be_listened_on_says_why() -> None:
    assert not listen_error(0, "127.0.0.1")
    assert "assign" in listen_error(0, "192.0.2.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "in use" in listen_error(server.getsockname()[1], "127.0.0.1")
