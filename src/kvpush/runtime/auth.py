"""Who may use a control channel: CURVE keys that everyone who knows the shared secret can derive.

All peers of a deployment are given one secret. From it each derives the same two key pairs, one for the listening
end of a link and one for the connecting end. CURVE (https://rfc.zeromq.org/spec/26/) then encrypts every link, a
client must know the server's public key to get past its first message, and `Gate` lets in nothing but the derived
client key. A process without the secret can therefore open a TCP connection, and nothing else.

Without a secret the gate lets everyone in who speaks ZeroMQ's present protocol. Because there is a gate, ZeroMQ itself
turns away those that speak its first two, as random bytes may seem to; what such a peer sends could not be traced to
its connection, and so not be ended.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from kvpush.core.errors import ConfigError, ControlError

MIN_SECRET_CHARS = 16
_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # fixed by the ZAP specification, https://rfc.zeromq.org/spec/27/
_ZAP_DOMAIN = b"kvpush"
_ZAP_REQUEST_FRAMES = 9  # client, delimiter, version, request id, domain, address, identity, mechanism, key
_REQUESTS_PER_TURN = 64


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, both keys as 40 Z85 characters."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class Keys:
    """The two ends' key pairs. Every peer of a deployment holds both."""

    server: KeyPair
    client: KeyPair


def check_secret(secret: str) -> None:
    """Raise `ConfigError` for a secret that can be guessed; "" (no secret) is allowed."""
    if 0 < len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            "secret",
            f"has {len(secret)} characters, which can be guessed; at least {MIN_SECRET_CHARS} are needed",
            "Make one with `openssl rand -hex 32` and give it to every engine.",
        )


def read_secret(path: str) -> str:
    """The secret that a file holds, without white space around it. Raises `ConfigError`, also when it holds none."""
    remedy = "Name a file with the secret, the same for every engine and readable by each of its processes."
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError("secret_file", f"{path} cannot be read: {error.strerror}", remedy) from None
    except UnicodeDecodeError:
        raise ConfigError("secret_file", f"{path} is not UTF-8 text", remedy) from None
    if not secret:
        raise ConfigError("secret_file", f"{path} is empty", remedy)
    check_secret(secret)
    return secret


def derive_keys(secret: str) -> Keys:
    """The key pairs of everyone who knows `secret`. Raises `ConfigError`, or `ControlError` without CURVE."""
    check_secret(secret)
    if not zmq.has("curve"):
        raise ControlError("This libzmq was built without CURVE: install pyzmq from a wheel, or unset the secret.")
    return Keys(_derive(secret, b"kvpush server 1"), _derive(secret, b"kvpush client 1"))


def _derive(secret: str, purpose: bytes) -> KeyPair:
    """Any 32 bytes are a Curve25519 secret key; `purpose` keeps the two pairs independent."""
    seed = hashlib.blake2b(secret.encode(), digest_size=32, person=purpose).digest()
    secret_key = z85.encode(seed)
    return KeyPair(zmq.curve_public(secret_key), secret_key)


class Gate:
    """Answers libzmq's question (ZAP) whether a client, which has proved to own a key if that is needed, may come in.

    It has no thread: its socket is polled by the transfer thread along with the others. Must exist before the
    guarded socket is bound, in the same context.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: Keys | None) -> None:
        self._keys = keys
        self._credentials = (b"CURVE", [z85.decode(keys.client.public)]) if keys else (b"NULL", [])
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ADDRESS)

    def guard(self, listener: "zmq.Socket[bytes]") -> None:
        """Make `listener` ask this gate, as a CURVE server if there are keys."""
        listener.zap_domain = _ZAP_DOMAIN
        if self._keys:
            listener.curve_server = True
            listener.curve_publickey = self._keys.server.public
            listener.curve_secretkey = self._keys.server.secret

    def identify(self, dealer: "zmq.Socket[bytes]") -> None:
        """Make `dealer` a CURVE client of a peer's guarded socket, if there are keys."""
        if self._keys:
            dealer.curve_serverkey = self._keys.server.public
            dealer.curve_publickey = self._keys.client.public
            dealer.curve_secretkey = self._keys.client.secret

    def answer(self) -> None:
        """Answer the requests that wait, a bounded number of them."""
        for _ in range(_REQUESTS_PER_TURN):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(request) >= _ZAP_REQUEST_FRAMES - 1:
                self.socket.send_multipart(self._reply(request), zmq.NOBLOCK)

    def _reply(self, request: list[bytes]) -> list[bytes]:
        client, delimiter, version, request_id = request[:4]
        mechanism, credentials = request[7], request[8:]
        known = (mechanism, credentials) == self._credentials
        verdict = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        return [client, delimiter, version, request_id, *verdict, b"", b""]
