"""One-time coded masks, for buffers of updates that start from different versions (asynchronous LightSecAgg).

The protocol has senders (clients that upload an update) and N holders (clients that store shares of the
masks):

    1. A sender adds a new mask to its update, and encrypts ("seals") one share of the mask for each holder.
    2. The server stores masked updates and sealed shares. When K updates are buffered, it sends each holder a
       `Request` with the weights of these updates and their sealed shares.
    3. A holder decrypts its shares, checks the request, and answers with the weighted sum of the shares.
    4. From any U answers, the server recovers the weighted sum of the masks, and subtracts it from the
       weighted sum of the masked updates.

A mask does not depend on the model's version or on other clients, so updates of any staleness can be summed,
and a client may go offline after its upload. Any T holders together with the server learn nothing but the
sums if the server sends all holders the same requests; otherwise see docs/secure.md. N − U holders may be
offline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from edgefl import kernels
from edgefl.kernels.arguments import Floats
from edgefl.kernels.field import PRIME, Words
from edgefl.secure import ID_BYTES, SecureError, digest_of, masks
from edgefl.secure.coding import Code
from edgefl.secure.fixed import FixedPoint
from edgefl.secure.keys import TAG_BYTES, KeyPair


class Rules(msgspec.Struct, frozen=True, tag="masks"):
    """Parameters of the protocol. They must be the same for the senders, the holders and the server of a
    run."""

    code: Code
    fixed: FixedPoint
    resolution: int
    """Largest integer weight. The weights of updates are represented by integers from 1 to this number."""
    least_clients: int
    """Minimum number of clients in a sum; holders refuse sums with fewer."""

    def __post_init__(self) -> None:
        code = self.code
        if 2 * code.recover <= code.holders + code.private:
            need = (code.holders + code.private) // 2 + 1
            why = "otherwise a server could use different holders to unmask two sums with the same mask"
            raise ValueError(f"recover must be at least {need} (got {code.recover}): {why}")

    @property
    def sealed_bytes(self) -> int:
        """Length of a sealed share, in bytes."""
        return 4 * self.code.share_size + TAG_BYTES

    @property
    def overhead_bytes(self) -> int:
        """Number of bytes that an upload contains in addition to the masked update: the id of the mask and N
        sealed shares."""
        return ID_BYTES + self.code.holders * self.sealed_bytes

    @property
    def download_bytes(self) -> int:
        """Number of bytes that a client receives in addition to the model: none."""
        return 0

    @property
    def cipher_bytes(self) -> int:
        """Bytes that a client's cipher processes per upload: the mask's key stream and the sealed shares."""
        return 4 * (self.code.size + self.code.noise_size) + self.code.holders * self.sealed_bytes

    @property
    def moved_bytes(self) -> int:
        """Number of bytes that a client reads and writes to encode one upload and to compute its shares."""
        return 12 * self.code.size + 4 * self.code.holders * (self.code.recover + 1) * self.code.share_size

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes that a holder receives for each update in a sum, and bytes that it sends for each sum."""
        return self.sealed_bytes, 4 * self.code.share_size

    @property
    def size(self) -> int:
        """Number of elements of an update."""
        return self.code.size

    @property
    def step(self) -> float:
        """The elements of an update are rounded to multiples of this number."""
        return self.fixed.step

    @property
    def clip(self) -> float:
        """Maximum magnitude of an element of an update; larger elements are clipped."""
        return self.fixed.clip


class Member(msgspec.Struct, frozen=True, array_like=True):
    """An update in a request, with its client, mask id and weight, and the share sealed for the holder."""

    client: int
    mask: bytes
    weight: int
    sealed: bytes


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Message from the server to a holder: the updates to be summed."""

    members: list[Member]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Message from a holder to the server: the weighted sum of the requested shares, as little-endian words,
    or the reason why the holder ``refused`` the request."""

    holder: int
    share: bytes = b""
    refused: str = ""


def _purpose(client: int, holder: int, mask: bytes) -> bytes:
    return b"share %d %d " % (client, holder) + mask


class Sender:
    """Masks the updates of one client. ``holders`` maps the index of each holder to its public key."""

    def __init__(self, client: int, keys: KeyPair, holders: Mapping[int, bytes], rules: Rules) -> None:
        if set(holders) != set(range(1, rules.code.holders + 1)):
            raise SecureError(f"keys of {len(holders)} holders are known; {rules.code.holders} are needed")
        if len(set(holders.values())) < len(holders):
            raise SecureError("two holders have the same key")
        self._client, self._keys, self._holders, self._rules = client, keys, dict(holders), rules
        self.clipped = 0
        """Number of elements of the last masked update that were clipped."""

    def mask(self, out: Floats | Words, update: Floats, trip: int) -> tuple[bytes, list[bytes]]:
        """Write the masked ``update`` of a trip to ``out``; return the mask's id and the sealed shares.

        The mask is derived from the client's private key, the trip and the content of the update. So a trip
        that is repeated after a crash sends the same bytes, and two different updates never share a mask.
        ``out`` must have as many elements as the update, each of 4 bytes, and not overlap the update. Raises
        `SecureError` if the update contains a number that is not finite.
        """
        if not np.isfinite(kernels.sq_norm(update)):
            raise SecureError("the update is not finite")
        code, derived = self._rules.code, self._derived(update, trip)
        mask, name = masks.expand(derived(b"mask"), code.size), derived(b"name")[:ID_BYTES]
        self.clipped = self._rules.fixed.encode(out.view(np.uint32), update, mask)
        shares = code.shares(mask, masks.expand(derived(b"noise"), code.noise_size))
        sealed = [
            self._keys.seal(self._holders[holder], _purpose(self._client, holder, name), share.data.cast("B"))
            for holder, share in enumerate(shares, start=1)
        ]
        return name, sealed

    def _derived(self, update: Floats, trip: int) -> Callable[[bytes], bytes]:
        """Return a function that derives 32 secret bytes for a given purpose."""
        content = hashlib.blake2b(b"%d %d " % (self._client, trip), key=self._keys.private)
        content.update(np.ascontiguousarray(update).data)
        root = content.digest()
        return lambda purpose: hashlib.blake2b(purpose, key=root, digest_size=32).digest()


class Holder:
    """Acts for one holder of shares: checks and answers the server's requests.

    ``clients`` returns a client's public key, or None if the client is unknown.

    ``used`` maps the id of each mask in an answered request to the digest of that request. Each answer adds
    entries to ``used``, and the holder must keep these entries for as long as it keeps its keys.
    """

    def __init__(
        self,
        number: int,
        keys: KeyPair,
        clients: Callable[[int], bytes | None],
        rules: Rules,
        used: dict[bytes, bytes] | None = None,
    ) -> None:
        self.number, self._keys, self._clients, self._rules = number, keys, clients, rules
        self.used: dict[bytes, bytes] = {} if used is None else used

    def answer(self, request: Request) -> Answer:
        """Return the weighted sum of the requested shares, or the reason why the request is refused."""
        try:
            return Answer(self.number, self._sum(request).tobytes())
        except SecureError as error:
            return Answer(self.number, refused=str(error))

    def _sum(self, request: Request) -> Words:
        rules, members = self._rules, request.members
        check_members(rules, [(one.client, one.mask, one.weight) for one in members])
        digest = digest_of(b"%d %d " % (one.client, one.weight) + one.mask for one in members)
        for one in members:
            if self.used.get(one.mask, digest) != digest:
                raise SecureError(f"the mask of client {one.client} was used in another sum")
        shares = [self._open(one) for one in members]
        out = np.empty(rules.code.share_size, np.uint32)
        kernels.field_sum(out, shares, [one.weight for one in members])
        self.used.update(dict.fromkeys((one.mask for one in members), digest))
        return out

    def _open(self, member: Member) -> Words:
        key = self._clients(member.client)
        if key is None:
            raise SecureError(f"client {member.client} is unknown")
        opened = self._keys.open(key, _purpose(member.client, self.number, member.mask), member.sealed)
        return _words(opened, self._rules.code.share_size, f"the share of client {member.client}")


def check_members(rules: Rules, members: Sequence[tuple[int, bytes, int]]) -> None:
    """Raise `SecureError` if a sum of these (client, mask id, weight) members violates the rules."""
    names = [mask for _, mask, _ in members]
    if len(set(names)) < len(names):
        raise SecureError("one mask is in the sum twice")
    for client, mask, weight in members:
        if len(mask) != ID_BYTES:
            raise SecureError(f"the mask id of client {client} has {len(mask)} bytes, not {ID_BYTES}")
        if not 1 <= weight <= rules.resolution:
            raise SecureError(
                f"the weight of client {client} is {weight}; 1 to {rules.resolution} is allowed"
            )
    if (clients := len({client for client, _, _ in members})) < rules.least_clients:
        raise SecureError(
            f"the sum includes updates from {clients} clients; at least {rules.least_clients} are required"
        )
    if (total := sum(weight for _, _, weight in members)) > rules.fixed.total_weight:
        raise SecureError(
            f"the weights add up to {total}, above {rules.fixed.total_weight}: the sum could overflow"
        )


def _words(raw: bytes, size: int, name: str) -> Words:
    if len(raw) != 4 * size:
        raise SecureError(f"{name} has {len(raw)} bytes, not {4 * size}")
    words: Words = np.frombuffer(raw, "<u4")
    if size and int(words.max()) >= PRIME:
        raise SecureError(f"{name} contains a number that is not below p")
    return words


def unmasked(
    rules: Rules, updates: Sequence[Words], weights: Sequence[int], answers: Iterable[Answer]
) -> Floats:
    """Return the weighted sum of masked ``updates`` after removing the masks with the holders' ``answers``.

    Raises `SecureError` if fewer than U holders answered, if answers contradict each other, or if the masks
    do not cancel.
    """
    mask = sum_of_masks(rules, answers)
    total, out = np.empty_like(mask), np.empty(mask.size, np.float32)
    kernels.field_sum(total, updates, weights)
    rules.fixed.decode(out, total, mask, weights)
    return out


def sum_of_masks(rules: Rules, answers: Iterable[Answer]) -> Words:
    """Recover the weighted sum of a request's masks from the holders' answers.

    Raises `SecureError` if fewer than U holders answered or if answers contradict each other.
    """
    shares: dict[int, Words] = {}
    refused = ""
    for answer in answers:
        if answer.refused:
            refused = refused or f"; holder {answer.holder} refused: {answer.refused}"
            continue
        if answer.holder in shares:
            raise SecureError(f"holder {answer.holder} answered twice")
        name = f"the answer of holder {answer.holder}"
        shares[answer.holder] = _words(answer.share, rules.code.share_size, name)
    if len(shares) < rules.code.recover:
        raise SecureError(f"{len(shares)} holders answered; {rules.code.recover} are needed{refused}")
    return rules.code.recovered(shares)
