from kvpush.runtime.links import InboundLinks


def test_links_are_negative_and_never_used_twice() -> None:
    links = InboundLinks(10)
    first = links.accept(b"a", 1)
    links.forget(first)
    second = links.accept(b"a", 1)
    assert first < 0
    assert second < first
    assert links.identity(first) is None
    assert links.identity(second) == b"a"


def test_peer_is_known_by_its_identity_link_and_connection() -> None:
    links = InboundLinks(10)
    link = links.accept(b"a", 5)
    assert links.heard(b"a") == link
    assert links.on_connection(5) == link
    assert links.heard(b"b") is None
    assert links.on_connection(6) is None


def test_new_peer_on_a_used_connection_displaces_only_the_old_one() -> None:
    links = InboundLinks(2)
    old, other = links.accept(b"a", 5), links.accept(b"b", 6)
    assert links.make_room(5) == [old]
    new = links.accept(b"c", 5)
    assert links.on_connection(5) == new
    assert links.identity(other) == b"b"


def test_peer_silent_longest_makes_room_when_full() -> None:
    links = InboundLinks(3)
    a, b, c = (links.accept(name, fd) for fd, name in enumerate([b"a", b"b", b"c"]))
    links.heard(b"a")
    assert links.make_room(9) == [b]
    links.accept(b"d", 9)
    assert links.make_room(10) == [c]
    assert links.identity(a) == b"a"


def test_forgetting_leaves_nothing() -> None:
    links = InboundLinks(1000)
    accepted = [links.accept(str(number).encode(), number) for number in range(1000)]
    for link in accepted:
        links.forget(link)
        links.forget(link)
    assert len(links) == 0
    assert links.heard(b"7") is None
    assert links.on_connection(7) is None


def test_strangers_make_room_before_peers_do() -> None:
    links = InboundLinks(3)
    peer, stranger, other = (links.accept(name, fd) for fd, name in enumerate([b"a", b"b", b"c"]))
    links.trust(peer)
    links.heard(b"b")
    assert links.is_trusted(peer)
    assert not links.is_trusted(stranger)
    assert links.make_room(9) == [other]
    links.trust(stranger)
    links.accept(b"d", 9)
    links.trust(links.heard(b"d") or peer)
    assert links.make_room(10) == [peer]


def test_trust_ends_with_its_link() -> None:
    links = InboundLinks(3)
    links.trust(links.accept(b"a", 1))
    assert links.make_room(1)
    again = links.accept(b"a", 1)
    assert not links.is_trusted(again)
    assert [links.count_frame(again), links.count_frame(again)] == [1, 2]
