"""Ed25519: RFC 8032's own vectors, the package cryptography on random and broken ones, and the edge cases."""

from __future__ import annotations

import hashlib
import random

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from pretuned.artifacts.files.ed25519 import is_key, verify

P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
VECTORS = [  # RFC 8032, 7.1: TEST 1, 2 and 3 (public key, message, signature)
    ("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a", "",
     "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655"
     "141438e7a100b"),
    ("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c", "72",
     "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00"
     "d291612bb0c00"),
    ("fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025", "af82",
     "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc02"
     "7beceea1ec40a"),
]  # fmt: skip
SMALL = [  # the eight points of small order
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
]
OTHER_FORMS = [  # of these: y from p on, and -0 for x
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0100000000000000000000000000000000000000000000000000000000000080",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
]


@pytest.mark.parametrize(("public", "message", "signature"), VECTORS)
def test_the_rfcs_vectors(public: str, message: str, signature: str) -> None:
    key, text, signed = map(bytes.fromhex, (public, message, signature))
    assert is_key(key)
    assert verify(key, text, signed)
    for i in range(len(signed)):
        assert not verify(key, text, signed[:i] + bytes([signed[i] ^ 1]) + signed[i + 1 :])
    assert not verify(key, text + b"\0", signed)


def theirs(public: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@pytest.mark.slow
def test_as_cryptography_does_on_random_and_on_broken_ones() -> None:
    rng = random.Random(0)
    good = 0
    for _ in range(150):
        private = Ed25519PrivateKey.from_private_bytes(rng.randbytes(32))
        public, message = private.public_key().public_bytes_raw(), rng.randbytes(rng.randrange(200))
        signature = private.sign(message)
        for broken in range(4):
            parts = [bytearray(public), bytearray(message), bytearray(signature)]
            if broken and (part := parts[broken - 1]):
                part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
            given = tuple(map(bytes, parts))
            ours = verify(*given)  # type: ignore[arg-type]
            assert ours == theirs(*given)  # type: ignore[arg-type]
            good += ours
    assert 150 <= good < 160  # (an empty message can't be broken)


def test_keys_of_either_sign() -> None:
    """Of a point's two values of x the last bit names one: each is somebody's key, and the other is not his."""
    signs = set()
    for i in range(16):
        private = Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32)
        public = private.public_key().public_bytes_raw()
        signs.add(public[31] >> 7)
        assert is_key(public)
        assert verify(public, b"text", private.sign(b"text"))
        assert not verify(public[:31] + bytes([public[31] ^ 128]), b"text", private.sign(b"text"))
    assert signs == {0, 1}


def test_another_scalar_of_the_same_signature_is_refused() -> None:
    key, text, signed = map(bytes.fromhex, VECTORS[1])
    s = int.from_bytes(signed[32:], "little")
    for other in (s + L, s + 2 * L, s + 2**255, L, 2**256 - 1):
        if other < 2**256:
            assert not verify(key, text, signed[:32] + other.to_bytes(32, "little"))


@pytest.mark.parametrize("key", SMALL + OTHER_FORMS)
def test_a_key_of_small_order_or_in_another_form_is_none(key: str) -> None:
    """With such a key one signature is good for every message, or for one in eight."""
    assert not is_key(bytes.fromhex(key))
    for r in SMALL + OTHER_FORMS:
        for number in range(8):
            assert not verify(bytes.fromhex(key), bytes([number]), bytes.fromhex(r) + bytes(32))


@pytest.mark.parametrize("r", SMALL + OTHER_FORMS)
def test_an_r_of_small_order_is_refused(r: str) -> None:
    """Whoever has the key can make one that holds: S is then h times the secret."""
    secret = bytes(range(32))
    private = Ed25519PrivateKey.from_private_bytes(secret)
    public = private.public_key().public_bytes_raw()
    number = int.from_bytes(hashlib.sha512(secret).digest()[:32], "little")
    scalar = number & ((1 << 254) - 8) | 1 << 254
    for message in map(bytes, ([i] for i in range(16))):
        h = int.from_bytes(hashlib.sha512(bytes.fromhex(r) + public + message).digest(), "little") % L
        s = h * scalar % L
        assert not verify(public, message, bytes.fromhex(r) + s.to_bytes(32, "little"))


def test_a_key_in_another_form_is_none_of_ours() -> None:
    """y + p in 255 bits is there for y below 19 alone; none of those is a point but those above."""
    for y in range(19):
        for sign in (0, 1 << 255):
            assert not is_key((y + P | sign).to_bytes(32, "little"))
    key = bytes.fromhex(VECTORS[0][0])
    assert not is_key(key[:31])
    assert not is_key(key + b"\0")
    assert not is_key(b"")
    assert not is_key(b"\x02" + bytes(31))  # no point has this y


@pytest.mark.parametrize("signature", [b"", bytes(63), bytes(65)])
def test_a_signature_of_another_length(signature: bytes) -> None:
    assert not verify(bytes.fromhex(VECTORS[0][0]), b"", signature)
