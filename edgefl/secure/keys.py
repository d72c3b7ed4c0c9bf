"""Keys that two clients share, and encryption of the messages that the server relays between them.

The keys result from X25519 key agreement and HKDF; messages are encrypted with AES-256-GCM.
"""

from __future__ import annotations

from functools import cached_property

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from edgefl.secure import SecureError

KEY_BYTES = 32
TAG_BYTES = 16
"""Number of bytes by which `KeyPair.seal` lengthens a message."""


class KeyPair:
    """The private and the public X25519 key of a client.

    >>> a, b = KeyPair.new(), KeyPair.new()
    >>> b.open(a.public, b"first", a.seal(b.public, b"first", b"hello"))
    b'hello'
    """

    def __init__(self, private: bytes) -> None:
        self.private = private
        self._key = X25519PrivateKey.from_private_bytes(private)
        self._shared: dict[bytes, bytes] = {}

    @classmethod
    def new(cls) -> KeyPair:
        return cls(X25519PrivateKey.generate().private_bytes_raw())

    @cached_property
    def public(self) -> bytes:
        """The public key, which is 32 bytes long."""
        return self._key.public_key().public_bytes_raw()

    def secret(self, other: bytes, purpose: bytes) -> bytes:
        """Return 32 secret bytes that only this client and the owner of the public key ``other`` can compute.

        Raises `SecureError` if ``other`` is not a valid public key.
        """
        if other not in self._shared:
            try:
                self._shared[other] = self._key.exchange(X25519PublicKey.from_public_bytes(other))
            except ValueError:
                raise SecureError("a peer's public key is invalid") from None
        both = b"".join(sorted((self.public, other)))
        derivation = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=b"edgefl secure " + both + purpose)
        return derivation.derive(self._shared[other])

    def seal(self, receiver: bytes, purpose: bytes, message: bytes | memoryview) -> bytes:
        """Encrypt and authenticate one message for the owner of the public key ``receiver``.

        ``purpose`` must be different for each message to a receiver. Each purpose has its own key, so the
        constant nonce is used only once per key.
        """
        key = self.secret(receiver, self.public + purpose)
        return AESGCM(key).encrypt(bytes(12), bytes(message), purpose)

    def open(self, sender: bytes, purpose: bytes, sealed: bytes) -> bytes:
        """Decrypt a message that `seal` encrypted. Raises `SecureError` if the message was altered, or
        if it has a different sender or purpose."""
        key = self.secret(sender, sender + purpose)
        try:
            return AESGCM(key).decrypt(bytes(12), sealed, purpose)
        except InvalidTag:
            raise SecureError("a sealed message was altered, or has another sender or purpose") from None
