"""aot sign, aot verify --key, and signatures in what aot pack makes."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import signing
import warm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

JOINT = Path(__file__).parents[3] / "artifacts" / "bundles" / "candidates-sm120-sm121.msgpack.xz"


@pytest.fixture
def bundle(here: Path, small_bundle: Path) -> str:
    """A copy of the small bundle in the working directory, and keys as openssl makes them."""
    (here / "small-sm80.msgpack").write_bytes(small_bundle.read_bytes())
    for command in (
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", "private.pem"],
        ["openssl", "pkey", "-in", "private.pem", "-pubout", "-out", "release.pem"],
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "ssh"],
    ):
        subprocess.run(command, cwd=here, check=True, capture_output=True)
    return "small-sm80.msgpack"


@pytest.mark.parametrize(
    ("private", "public", "other"), [("private.pem", "release.pem", "ssh.pub"), ("ssh", "ssh.pub", "release.pem")]
)
def test_sign_and_verify(private, public, other, aot, here, bundle):
    (here / private).chmod(0o600)
    signed = aot("sign", bundle, "--key", private)
    assert signed.code == 0, signed.err
    assert signed.out.startswith(f"{bundle}.sig: by key ")
    assert signed.err == ""
    assert (here / f"{bundle}.sig").stat().st_mode & 0o7777 == 0o644
    verified = aot("verify", bundle, "--key", public)
    assert verified.code == 0, verified.err
    assert verified.out.endswith(f", signed by {public}\n")
    assert json.loads(aot("verify", bundle, "--key", other, "--key", public, "--json").out)[0]["signed_by"] == public
    refused = aot("verify", bundle, "--key", other)
    assert refused.code == 2
    assert f"is by another key, {signed.out.split()[-1]}. --key {other} wants one by {other}" in refused.err
    assert "(unchanged)" in aot("sign", bundle, "--key", private).out


def test_what_can_not_be_verified(aot, here, bundle):
    ended = aot("verify", bundle, "--key", "release.pem")
    assert ended.code == 2
    assert f"it has no signature '{bundle}.sig'" in ended.err
    assert aot("verify", bundle).code == 0
    assert aot("verify", bundle, "--key", "none.pem").code == 2
    assert "belongs on the machine that signs alone" in aot("verify", bundle, "--key", "private.pem").err
    (here / "release.pem").chmod(0o666)
    assert "Move the key, or run: chmod" in aot("verify", bundle, "--key", "release.pem").err


def test_keys_that_can_not_sign(aot, here, bundle):
    (here / "text").write_text("none")
    (here / "ec.pem").write_bytes(
        generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    (here / "secret.pem").write_bytes(
        signing.PRIVATE.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    )
    for key, code, complaint in (
        ("text", 2, "no private key can be had of it"),
        ("ec.pem", 2, "it is a ECPrivateKey, wanted one of Ed25519"),
        ("release.pem", 2, "no private key can be had of it"),
        ("gone.pem", 1, "can't be read: No such file"),
        ("secret.pem", 2, "it has a password, and there is no terminal"),
    ):
        ended = aot("sign", bundle, "--key", key)
        assert ended.code == code, ended.err
        assert f"key '{key}': {complaint}" in ended.err
    assert not (here / f"{bundle}.sig").exists()


# signing.PRIVATE under the password "word"
_ENCRYPTED = """-----BEGIN ENCRYPTED PRIVATE KEY-----
MIGjMF8GCSqGSIb3DQEFDTBSMDEGCSqGSIb3DQEFDDAkBBAL7pepQGtIce/go3Qp
5zd5AgIIADAMBggqhkiG9w0CCQUAMB0GCWCGSAFlAwQBKgQQQbIk4MyKQL1qFKfi
Yx+2oQRAmpJKDVNo76h38Q5YeKOmOS5E1l/cnnucBmF+cmv93dwPwrnPmrzLaxyF
m/RtFFs1N54neKEzuUfmLbZaw4KmAQ==
-----END ENCRYPTED PRIVATE KEY-----
"""


def test_a_key_with_a_password(here, bundle):
    from pretuned.aot.cli.sign import private_key
    from pretuned.artifacts.errors import InputError

    (here / "secret.pem").write_bytes(
        signing.PRIVATE.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    )
    got = private_key("secret.pem", lambda: "word").public_key().public_bytes_raw()
    assert got == signing.PRIVATE.public_key().public_bytes_raw()
    with pytest.raises(InputError, match=r"no private key can be had of it: the password is wrong, or the file .*"):
        private_key("secret.pem", lambda: "wrong")

    # with one wrong password of some 256 what comes out ends like a key: the package then names no password
    (here / "secret.pem").write_text(_ENCRYPTED)
    with pytest.raises(InputError, match="the password is wrong, or the file is damaged: Incorrect password"):
        private_key("secret.pem", lambda: "wrong0")
    with pytest.raises(InputError, match="the password is wrong, or the file is damaged: Could not deserialize"):
        private_key("secret.pem", lambda: "wrong34")


def test_a_damaged_bundle_is_not_signed(aot, here, bundle):
    data = (here / bundle).read_bytes()
    (here / bundle).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (here / "private.pem").chmod(0o644)
    ended = aot("sign", bundle, "--key", "private.pem")
    assert ended.code == 2
    assert not (here / f"{bundle}.sig").exists()
    (here / bundle).write_bytes(data)
    assert "note: others can read private.pem: chmod 600 private.pem" in aot("sign", bundle, "--key", "private.pem").err


def test_another_file_beside_a_bundle_is_not_overwritten(aot, here, bundle):
    """gpg, too, writes NAME.sig."""
    (here / f"{bundle}.sig").write_bytes(b"\x89\x02gpg's own")
    ended = aot("sign", bundle, "--key", "private.pem")
    assert ended.code == 2
    assert f"'{bundle}.sig' is there and is no signature of aot sign: it is not overwritten" in ended.err
    assert (here / f"{bundle}.sig").read_bytes() == b"\x89\x02gpg's own"
    (here / f"{bundle}.sig").unlink()
    (here / "other.msgpack").write_bytes((here / bundle).read_bytes())
    (here / "other.msgpack.sig").write_text("notes")
    assert aot("sign", bundle, "other.msgpack", "--key", "private.pem").code == 2
    assert not (here / f"{bundle}.sig").exists()  # what can't all be signed is not begun


def test_a_bundle_of_a_directory_that_is_not_there(aot, here, bundle):
    ended = aot("sign", "nowhere/small.msgpack", "--key", "private.pem")
    assert ended.code == 2
    assert ended.err == (
        "error: bundle 'nowhere/small.msgpack': no such file; "
        "name a bundle, or a directory of bundles such as aot build writes\n"
    )


@pytest.mark.slow
def test_keys_without_an_end(aot_process, here, bundle):
    with (here / "sparse.pem").open("wb") as file:
        file.truncate(1 << 40)
    for key in ("/dev/zero", "sparse.pem"):
        for verb in ("sign", "verify"):
            ended = aot_process(verb, bundle, "--key", key)
            assert ended.code == 2, ended.err
            assert f"key '{key}': " in ended.err
            assert "it holds no" in ended.err or verb == "verify"  # a device is no safe place for one
    piped = subprocess.run(  # as bash's <(pass show key) does
        ["bash", "-c", f"{sys.executable} -m pretuned.aot sign {bundle} --key <(cat private.pem)"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert piped.returncode == 0, piped.stderr


def test_without_cryptography(aot_process, here, bundle):
    (here / "sitecustomize.py").write_text("import sys; sys.modules['cryptography'] = None\n")
    ended = aot_process("sign", bundle, "--key", "private.pem", PYTHONPATH=str(here))
    assert ended.code == 1
    assert ended.err.strip().endswith('which is not installed: pip install "pretuned[sign]"')
    assert aot_process("verify", bundle, "--key", "release.pem", PYTHONPATH=str(here)).code == 2  # it is not signed


@pytest.mark.slow  # all candidates for three capabilities, a wheel
def test_a_package_has_the_signatures(aot, here, bundle):
    """And the runtime finds them there."""
    assert aot("sign", bundle, "--key", "private.pem").code == 0
    ended = aot("pack", bundle, "--dir", "made", "--wheel", "dist", "--oci", "image", "--name", "acme-bundles")
    assert ended.code == 0, ended.err
    signature = (here / f"{bundle}.sig").read_bytes()
    assert (here / "made" / f"{bundle}.sig").read_bytes() == signature
    with zipfile.ZipFile(next((here / "dist").glob("*.whl"))) as wheel:
        assert wheel.read(f"acme_bundles/{bundle}.sig") == signature
    layers = []
    for blob in (here / "image" / "blobs" / "sha256").iterdir():
        if tarfile.is_tarfile(blob):
            with tarfile.open(blob) as tar:
                layers += [tar.extractfile(f"opt/pretuned/bundles/{bundle}.sig").read()]
    assert layers == [signature]
    (here / "keys").mkdir()
    (here / "keys" / "release.pem").write_bytes((here / "release.pem").read_bytes())
    env = {"PRETUNED_BUNDLES": str(here / "made"), "PRETUNED_TRUSTED_KEYS": str(here / "keys"), "HOME": str(here)}
    doctor = warm.run(["-m", "pretuned.runtime"], env=env, cwd=here)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr


def test_a_signature_of_other_content_is_not_packed(aot, here, bundle):
    (here / f"{bundle}.sig").write_bytes(signing.signature(Path(__file__).parents[2] / "golden/format2-small.msgpack"))
    ended = aot("pack", bundle, "--dir", "made")
    assert ended.code == 2
    assert "is not of this content" in ended.err
    assert not (here / "made").exists()


@pytest.mark.slow  # all candidates for three capabilities, a wheel
def test_each_bundle_of_a_joint_file_is_signed(aot, here, bundle):
    joint = "two.msgpack.xz"
    (here / joint).write_bytes(JOINT.read_bytes())
    signed = aot("sign", joint, "--key", "private.pem")
    assert signed.code == 0, signed.err
    assert [line.partition(":")[0] for line in signed.out.splitlines()] == [f"{joint}#sm{sm}.sig" for sm in (120, 121)]
    verified = aot("verify", joint, "--key", "release.pem", "--json")
    assert [entry["path"] for entry in json.loads(verified.out) if entry["signed_by"]] == [
        f"{joint}#sm120",
        f"{joint}#sm121",
    ]
    (here / f"{joint}#sm121.sig").write_bytes((here / f"{joint}#sm120.sig").read_bytes())
    assert aot("verify", f"{joint}#sm120", "--key", "release.pem").code == 0
    refused = aot("verify", joint, "--key", "release.pem")
    assert refused.code == 2
    assert f"'{joint}#sm121.sig', by release.pem, is not of this content" in refused.err
