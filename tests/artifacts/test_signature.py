"""Key files and signature files: their forms, and which are refused."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import signing
from descriptors import open_files

from pretuned.artifacts.errors import BundleUnreadable, BundleUntrusted, InputError
from pretuned.artifacts.limits import MAX_KEYS
from pretuned.artifacts.signature import Key, Keys, check, key_id, message, read, read_key, read_keys

PUBLIC = signing.PRIVATE.public_key().public_bytes_raw()
GOLDEN = Path(__file__).parents[1] / "golden" / "format2-small.msgpack"


def test_what_openssl_and_ssh_keygen_make(tmp_path: Path) -> None:
    def run(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    run("openssl", "genpkey", "-algorithm", "ed25519", "-out", "private.pem")
    run("openssl", "pkey", "-in", "private.pem", "-pubout", "-out", "a.pem")
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "who I am", "-f", "b")
    raw = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", tmp_path / "a.pem", "-outform", "DER"], check=True, capture_output=True
    ).stdout[-32:]
    assert read_key(str(tmp_path / "a.pem")) == Key("a.pem", raw)
    blob = base64.b64decode((tmp_path / "b.pub").read_text().split()[1])
    assert read_key(str(tmp_path / "b.pub")) == Key("b.pub", blob[-32:])
    assert len(key_id(raw)) == 16


def pem(raw: bytes, words: str = "PUBLIC KEY") -> bytes:
    return f"-----BEGIN {words}-----\n{base64.b64encode(raw).decode()}\n-----END {words}-----\n".encode()


DER = bytes.fromhex("302a300506032b6570032100")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "no public Ed25519 key"),
        (b"-----BEGIN PUBLIC KEY-----\n", "no public Ed25519 key"),
        (pem(PUBLIC), "no public Ed25519 key"),
        (pem(DER + PUBLIC[:31]), "no public Ed25519 key"),
        (pem(DER + PUBLIC + b"\0"), "no public Ed25519 key"),
        (pem(bytes.fromhex("302a300506032b656e032100") + PUBLIC), "no public Ed25519 key"),  # X25519
        (pem(DER + PUBLIC).replace(b"MCow", b"MC*w"), "no public Ed25519 key"),
        (pem(DER + PUBLIC).replace(b"MCow", b"MCo"), "no public Ed25519 key"),
        *((pem(DER + PUBLIC).replace(b"=", other), "no public Ed25519 key") for other in (b"====", b"=A=", b"=AAAA")),
        (2 * pem(DER + PUBLIC), "no public Ed25519 key"),
        (pem(DER + PUBLIC, "PRIVATE KEY"), "a private key, which belongs on the machine that signs"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\n", "a private key"),
        (b"ssh-ed25519 " + base64.b64encode(PUBLIC), "no public Ed25519 key"),
        (b"ssh-rsa AAAA x", "no public Ed25519 key"),
        (b"a" * 8193, "no public Ed25519 key"),
    ],
)
def test_what_is_no_key(data: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "k.pem").write_bytes(data)
    with pytest.raises(InputError, match=complaint):
        read_key(str(tmp_path / "k.pem"))


def test_a_keys_place_is_checked_as_a_bundles_is(tmp_path: Path) -> None:
    path = signing.keys(tmp_path / "keys") / "0.pem"
    assert read_key(str(path)).public == PUBLIC
    (tmp_path / "link").symlink_to(path)
    assert read_key(str(tmp_path / "link")).public == PUBLIC
    path.chmod(0o666)
    with pytest.raises(BundleUntrusted, match=r"key .*0\.pem': .*everybody can write it\. Move the key, or run: "):
        read_key(str(path))
    path.chmod(0o644)
    path.parent.chmod(0o777)
    with pytest.raises(BundleUntrusted, match="everybody can write it"):
        read_key(str(path))
    path.parent.chmod(0o755)
    os.mkfifo(tmp_path / "fifo.pem")
    with pytest.raises(BundleUnreadable, match=r"key '.*fifo\.pem': '.*fifo\.pem' is no regular file"):
        read_key(str(tmp_path / "fifo.pem"))
    (tmp_path / "folder.pem").mkdir()
    before = open_files()
    with pytest.raises(BundleUnreadable, match=r"key '.*folder\.pem': can't be read: Is a directory"):
        read_key(str(tmp_path / "folder.pem"))
    assert open_files() == before
    for missing in ("none.pem", "nul\0.pem", "0.pem/x"):
        with pytest.raises(BundleUnreadable, match=r"key '.*': "):
            read_key(str(path.parent / missing))


def test_a_key_that_others_may_write_by_the_time_it_is_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = signing.keys(tmp_path / "keys") / "0.pem"

    def opened(name: str, *how: int, real: Callable[..., int] = os.open, **more: int) -> int:
        if name == str(path):  # once its place was checked
            path.chmod(0o666)
        return real(name, *how, **more)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(BundleUntrusted, match=r"key .*0\.pem': .*everybody can write it"):
        read_key(str(path))


def test_the_keys_of_a_directory(tmp_path: Path) -> None:
    folder = signing.keys(tmp_path / "keys", signing.PRIVATE, signing.STRANGER)
    (folder / "README").write_text("which key is whose")
    (folder / ".hidden.pem").write_text("an editor's")
    keys = read_keys(str(folder), "TEST")
    assert [key.name for key in keys.keys] == ["0.pem", "1.pem"]
    assert keys.faults == ()
    (folder / "1.pem").write_text("nothing")
    keys = read_keys(str(folder), "TEST")
    assert [key.name for key in keys.keys] == ["0.pem"]
    assert "1.pem" in keys.faults[0]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("none", "can't be listed: No such file"),
        ("file", "can't be listed: Not a directory"),
        ("empty", "holds no key"),
        ("nul\0", "can't be listed: embedded null byte"),
    ],
)
def test_a_directory_without_keys(name: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    keys = read_keys(str(tmp_path / name), "TEST")
    assert keys.keys == ()
    assert fault in keys.faults[0]
    with pytest.raises(BundleUntrusted, match="TEST wants it signed, and has no key to check with: "):
        check(str(GOLDEN), bytes(32), keys)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "b.msgpack"
    path.write_bytes(GOLDEN.read_bytes())
    return path


TRUSTED = Keys("TEST", (Key("mine.pem", PUBLIC),))


def test_a_signature(bundle: Path) -> None:
    digest = bundle.read_bytes()[31:63]
    assert read(str(bundle)) is None
    with pytest.raises(BundleUntrusted, match=r"it has no signature .*b\.msgpack\.sig'\. TEST wants one by mine\.pem"):
        check(str(bundle), digest, TRUSTED)
    signing.sign(bundle)
    assert check(str(bundle), digest, TRUSTED).name == "mine.pem"
    assert len(Path(f"{bundle}.sig").read_bytes()) == 112
    signing.sign(bundle, signing.STRANGER)
    with pytest.raises(BundleUntrusted, match=r"is by another key, [0-9a-f]{16}\. TEST wants"):
        check(str(bundle), digest, TRUSTED)


def test_the_key_in_a_signature_is_a_hint_alone(bundle: Path) -> None:
    """A stranger's signature that names the trusted key."""
    digest = bundle.read_bytes()[31:63]
    stranger = signing.signature(bundle, signing.STRANGER)
    Path(f"{bundle}.sig").write_bytes(stranger[:16] + PUBLIC + stranger[48:])
    with pytest.raises(BundleUntrusted, match=r"by mine\.pem, is not of this content"):
        check(str(bundle), digest, TRUSTED)


def test_a_signature_of_the_digest_alone_or_of_another_kind_is_none(bundle: Path) -> None:
    digest = bundle.read_bytes()[31:63]
    for text in (digest, digest.hex().encode(), b"pretuned bundle signature 1" + digest, message(digest) + b"\0"):
        data = signing.signature(bundle)[:48] + signing.PRIVATE.sign(text)
        Path(f"{bundle}.sig").write_bytes(data)
        with pytest.raises(BundleUntrusted, match="is not of this content"):
            check(str(bundle), digest, TRUSTED)


@pytest.mark.parametrize("cut", [0, 1, 16, 48, 111, 113, 1 << 20])
def test_a_signature_of_another_size_is_none(cut: int, bundle: Path) -> None:
    Path(f"{bundle}.sig").write_bytes((signing.signature(bundle) + bytes(1 << 20))[:cut])
    with pytest.raises(BundleUntrusted, match=r"is no signature, which has 112 bytes\. .*aot sign"):
        check(str(bundle), bundle.read_bytes()[31:63], TRUSTED)


def test_a_signature_that_is_no_file(bundle: Path, tmp_path: Path) -> None:
    os.mkfifo(f"{bundle}.sig")
    with pytest.raises(BundleUntrusted, match="is no signature"):
        check(str(bundle), bytes(32), TRUSTED)
    Path(f"{bundle}.sig").unlink()
    Path(f"{bundle}.sig").mkdir()
    with pytest.raises(BundleUntrusted, match=r"can't be read: Is a directory|is no signature"):
        check(str(bundle), bytes(32), TRUSTED)
    Path(f"{bundle}.sig").rmdir()
    Path(f"{bundle}.sig").symlink_to("b.msgpack.sig")
    with pytest.raises(BundleUntrusted, match="can't be read: Too many levels"):
        check(str(bundle), bytes(32), TRUSTED)


def test_without_cryptography_every_bundle_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signing.sign(bundle)
    digest = bundle.read_bytes()[31:63]
    assert check(str(bundle), digest, TRUSTED).name == "mine.pem"
    for name in [module for module in sys.modules if module.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(BundleUntrusted, match=r'TEST wants it signed, and the package cryptography.*pretuned\[keys\]"'):
        check(str(bundle), digest, TRUSTED)


def test_a_key_that_is_no_point_signs_nothing(bundle: Path) -> None:
    no_point = b"\xee" + b"\xff" * 30 + b"\x7f"
    data = signing.signature(bundle)
    Path(f"{bundle}.sig").write_bytes(data[:16] + no_point + data[48:])
    with pytest.raises(BundleUntrusted, match="is not of this content"):
        check(str(bundle), bundle.read_bytes()[31:63], Keys("TEST", (Key("odd.pem", no_point),)))


def test_a_changed_byte_of_it_is_refused(bundle: Path) -> None:
    whole = signing.signature(bundle)
    for i in range(len(whole)):
        Path(f"{bundle}.sig").write_bytes(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
        with pytest.raises(BundleUntrusted):
            check(str(bundle), bundle.read_bytes()[31:63], TRUSTED)


def test_the_most_keys_and_the_most_bytes_of_one(tmp_path: Path) -> None:
    """The first ones by name are read, and that there are more is said."""
    for i in range(MAX_KEYS):
        (tmp_path / f"{i:03d}.pem").write_bytes(signing.public_pem())
    keys = read_keys(str(tmp_path), "it")
    assert (len(keys.keys), keys.keys[-1].name, keys.faults) == (MAX_KEYS, f"{MAX_KEYS - 1:03d}.pem", ())
    (tmp_path / f"{MAX_KEYS}.pem").write_bytes(signing.public_pem())
    keys = read_keys(str(tmp_path), "it")
    assert (len(keys.keys), keys.keys[-1].name) == (MAX_KEYS, f"{MAX_KEYS - 1:03d}.pem")
    assert keys.faults == (f"'{tmp_path}' holds {MAX_KEYS + 1} keys: the first {MAX_KEYS} by name are read",)
    path = tmp_path / "padded.pub"
    text = signing.public_pem()
    path.write_bytes(text + b"\n" * (8192 - len(text)))
    assert read_key(str(path)).public == PUBLIC
    path.write_bytes(text + b"\n" * (8193 - len(text)))
    with pytest.raises(InputError, match="it holds no public Ed25519 key"):
        read_key(str(path))
