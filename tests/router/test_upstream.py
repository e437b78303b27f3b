"""What the engines are sent."""

import pytest

from kvpush.router.upstream import request_head


def test_request_has_a_length_when_it_may_have_a_body() -> None:
    assert b"Content-Length: 2\r\n" in request_head("POST", "/x", {}, b"{}")
    assert b"Content-Length: 0\r\n" in request_head("POST", "/x", {}, None)
    assert request_head("GET", "/x", {"Host": "h:1"}, None) == b"GET /x HTTP/1.1\r\nHost: h:1\r\n\r\n"


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nb", "a\rb"])
def test_header_with_a_line_break_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        request_head("POST", "/x", {"Authorization": value}, b"")
