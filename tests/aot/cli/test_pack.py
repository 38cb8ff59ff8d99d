"""aot pack: what it takes and refuses, and what pip, skopeo and umoci make of what it writes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import signing

from pretuned.aot.pack.image import tag
from pretuned.aot.pack.package import contents
from pretuned.artifacts.files.bundle_file import open_bundle


@pytest.fixture
def bundle(here, small_bundle):
    """A copy of the small bundle in the working directory."""
    (here / "small-sm80.msgpack").write_bytes(small_bundle.read_bytes())
    return "small-sm80.msgpack"


def test_a_directory_that_the_runtime_accepts(aot, here, bundle):
    previous = os.umask(0o002)
    try:
        ended = aot("pack", bundle, "--dir", "made/bundles", "--json")
    finally:
        os.umask(previous)
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    made = here / "made" / "bundles"
    assert stat.S_IMODE(made.stat().st_mode) == 0o755
    assert stat.S_IMODE((made / bundle).stat().st_mode) == 0o644
    data = (here / bundle).read_bytes()
    assert told["bundles"] == [{"file": bundle, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}]
    assert told["targets"] == ["sm_80"]
    with open_bundle(made / bundle, sha256=told["bundles"][0]["sha256"]) as opened:
        assert opened.target.sm == 80


def test_a_package_has_its_bundles_in_one_order(bundle, here):
    (here / "a-sm80.msgpack").write_bytes((here / bundle).read_bytes())
    found = contents([bundle, "a-sm80.msgpack", bundle], "Acme.MoE-kernels", "1.0+h100")
    assert [one.file for one in found.items] == ["a-sm80.msgpack", bundle]
    assert (found.module, found.targets, tag(found)) == ("acme_moe_kernels", ("sm_80",), "1.0_h100")


def test_a_directory_that_the_runtime_would_refuse_is_told(aot, here, bundle):
    (here / "open").mkdir()
    (here / "open").chmod(0o777)
    ended = aot("pack", bundle, "--dir", "open")
    assert ended.code == 0
    assert "the runtime refuses it" in ended.err
    assert "everybody can write it" in ended.err
    assert json.loads(aot("pack", bundle, "--dir", "open", "--json").out)["notes"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["small-sm80.msgpack"], "nothing to write: give --wheel DIR, --oci DIR or --dir DIR"),
        (["none.msgpack", "--dir", "d"], "can't be read: No such file"),
        (["small-sm80.msgpack", "--dir", "d", "--name", "9"], "--name '9' can be no package's"),
        (["small-sm80.msgpack", "--dir", "d", "--name", "a/b"], "--name 'a/b' can be no package's"),
        (["small-sm80.msgpack", "--dir", "d", "--name", "pretuned"], "names that begin with pretuned are ours"),
        (["small-sm80.msgpack", "--dir", "d", "--version", "1.x"], "--version '1.x' can be no package's"),
        (["small-sm80.msgpack", "--dir", "d", "--version", "01"], "--version '01' can be no package's"),
        (["text.msgpack", "--dir", "d"], "text.msgpack"),
        (["small", "--dir", "d"], "the runtime would not list it under that name"),
        ([".small.msgpack", "--dir", "d"], "the runtime would not list it under that name"),
        (["small-sm80.msgpack", "other/small-sm80.msgpack", "--dir", "d"], "two bundles are named"),
        (["small-sm80.msgpack", "--oci", "other"], "is there and is no OCI image layout"),
        (["small-sm80.msgpack", "--oci", "d", "--arch", "ppc"], "'ppc' is not one of"),
    ],
)  # fmt: skip
def test_what_is_refused(aot, here, bundle, arguments, complaint):
    data = (here / bundle).read_bytes()
    (here / "other").mkdir()
    for name in ("small", ".small.msgpack", "other/small-sm80.msgpack"):
        (here / name).write_bytes(data)
    (here / "text.msgpack").write_text("not a bundle, and longer than any bundle's first bytes are")
    ended = aot("pack", *arguments)
    assert ended.code == 2
    assert complaint in ended.err
    assert not ended.out
    assert not (here / "d").exists()


def test_a_place_that_can_not_be_made_is_the_machine_s(aot, here, bundle):
    for option in ("--dir", "--oci", "--wheel"):
        ended = aot("pack", bundle, option, f"{bundle}/below")
        assert ended.code == 1, ended.err
        assert f"{bundle}/below" in ended.err


@pytest.fixture
def wheel(aot, here, small_bundle):
    """A wheel of the small bundle."""
    (here / "small-sm80.msgpack").write_bytes(small_bundle.read_bytes())
    ended = aot(
        "pack", "small-sm80.msgpack", "--wheel", "dist", "--name", "Acme.MoE-kernels", "--version", "1.2", "--json"
    )
    assert ended.code == 0, ended.err
    return here / json.loads(ended.out)["wheel"]["path"]


def test_the_same_input_gives_the_same_bytes(aot, wheel):
    before = wheel.read_bytes()
    wheel.unlink()
    ended = aot("pack", "small-sm80.msgpack", "--wheel", "dist", "--name", "Acme.MoE-kernels", "--version", "1.2")
    assert f"pip install {wheel.relative_to(wheel.parents[1])}" in ended.out
    assert wheel.read_bytes() == before


def test_what_it_holds(wheel, small_bundle):
    assert wheel.name == "acme_moe_kernels-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        info = "acme_moe_kernels-1.2.dist-info"
        assert archive.namelist()[-1] == f"{info}/RECORD"
        assert archive.read("acme_moe_kernels/small-sm80.msgpack") == small_bundle.read_bytes()
        assert "Requires-Dist: pretuned>=" in archive.read(f"{info}/METADATA").decode()


@pytest.mark.slow
def test_pip_installs_it_and_the_runtime_finds_its_bundle(wheel, tmp_path):
    """In a fresh environment, to which this one's packages are added for torch and pretuned."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    here = sysconfig.get_paths()["purelib"]
    (Path(purelib) / "these.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    told = subprocess.run([python, "-m", "pretuned.runtime"], capture_output=True, text=True, check=False).stdout
    assert f"{purelib}/acme_moe_kernels (an installed package): 1 bundle" in told, told
    assert f"{purelib}/acme_moe_kernels/small-sm80.msgpack (sm_80," in told
    subprocess.run([*pip, "uninstall", "-q", "-y", "acme-moe-kernels"], check=True)
    assert not (Path(purelib) / "acme_moe_kernels").exists()  # RECORD named every file


@pytest.fixture
def pack(aot, here, small_bundle):
    """Pack the small bundle into a layout; returns what was told."""
    (here / "small-sm80.msgpack").write_bytes(small_bundle.read_bytes())

    def command(*arguments):
        ended = aot("pack", "small-sm80.msgpack", "--json", *arguments)
        assert ended.code == 0, ended.err
        return json.loads(ended.out)["oci"]

    return command


def blob(layout, digest):
    return layout / "blobs" / "sha256" / digest.removeprefix("sha256:")


def test_the_same_input_gives_the_same_digest(pack, here):
    one = pack("--oci", "one", "--name", "acme")
    os.utime(here / "small-sm80.msgpack", (0, 0))
    assert pack("--oci", "two", "--name", "acme")["digest"] == one["digest"]
    for name in sorted(path.relative_to(here / "one") for path in (here / "one").rglob("*") if path.is_file()):
        assert (here / "one" / name).read_bytes() == (here / "two" / name).read_bytes()
    assert pack("--oci", "two", "--name", "other")["digest"] != one["digest"]


def test_the_layer_is_root_s_and_nobody_else_can_write_it(pack, here):
    manifest = json.loads(blob(here / "one", pack("--oci", "one")["digest"]).read_bytes())
    (layer,) = manifest["layers"]
    with tarfile.open(blob(here / "one", layer["digest"])) as tar:
        found = {one.name: (one.mode, one.uid, one.gid, one.mtime, one.isdir()) for one in tar}
    assert found == {
        **dict.fromkeys(("opt", "opt/pretuned", "opt/pretuned/bundles"), (0o755, 0, 0, 0, True)),
        "opt/pretuned/bundles/small-sm80.msgpack": (0o644, 0, 0, 0, False),
    }


def test_a_layout_keeps_its_other_tags(pack, here):
    first = pack("--oci", "one", "--version", "1.0")
    second = pack("--oci", "one", "--version", "1.1+h100")
    again = pack("--oci", "one", "--version", "1.0", "--name", "acme")
    index = json.loads((here / "one" / "index.json").read_bytes())
    found = {one["annotations"]["org.opencontainers.image.ref.name"]: one["digest"] for one in index["manifests"]}
    assert found == {"1.0": again["digest"], "1.1_h100": second["digest"]}
    assert first["digest"] not in found.values()


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("skopeo") and shutil.which("umoci")), reason="skopeo and umoci are not here")
def test_skopeo_and_umoci_read_it(pack, here, small_bundle):
    digest = pack("--oci", "one", "--name", "acme", "--version", "2.0")["digest"]

    def run(*command):
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout

    told = json.loads(run("skopeo", "inspect", "oci:one:2.0"))
    assert told["Digest"] == digest
    assert told["Labels"]["org.opencontainers.image.title"] == "acme"
    assert told["Labels"]["pretuned.targets"] == "sm_80"
    run("skopeo", "--insecure-policy", "copy", "oci:one:2.0", "oci:copied:2.0")  # as a push: it checks every digest
    copied, ours = (json.loads(run("skopeo", "inspect", "--config", f"oci:{one}:2.0")) for one in ("copied", "one"))
    assert copied["rootfs"] == ours["rootfs"]  # of the layer as it unpacks: the copy is compressed
    assert "aot pack: small-sm80.msgpack" in run("umoci", "stat", "--image", "one:2.0")
    root = os.geteuid() == 0
    run("umoci", "unpack", *([] if root else ["--rootless"]), "--image", "one:2.0", "unpacked")
    made = here / "unpacked" / "rootfs" / "opt" / "pretuned" / "bundles" / "small-sm80.msgpack"
    assert made.read_bytes() == small_bundle.read_bytes()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (made, *list(made.parents)[:3])] == [0o644, *[0o755] * 3]
    with open_bundle(made) as opened:  # owners and modes as unpacked are what the runtime accepts
        assert opened.target.sm == 80


@pytest.mark.parametrize(("option", "file"), [("--dir", "{bundle}"), ("--dir", "{bundle}.sig"),
                                              ("--wheel", "pretuned_bundles-1.0-py3-none-any.whl")])  # fmt: skip
def test_another_file_of_that_name_is_not_overwritten(aot, here, bundle, option, file):
    signing.sign(here / bundle)
    there = here / "out" / file.format(bundle=bundle)
    there.parent.mkdir()
    there.write_text("notes")
    ended = aot("pack", bundle, option, "out")
    assert ended.code == 2
    assert f"'{there.relative_to(here)}' is there and is no" in ended.err
    assert [one.name for one in there.parent.iterdir()] == [there.name]
    assert there.read_text() == "notes"


def test_a_directory_that_is_made_under_umask_000_is_loaded_from(aot, here, bundle):
    old = os.umask(0)
    try:
        ended = aot("pack", bundle, "--dir", "some/where/made")
    finally:
        os.umask(old)
    assert (ended.code, ended.err) == (0, "")
    assert {(here / one).stat().st_mode & 0o777 for one in ("some", "some/where", "some/where/made")} == {0o755}


def test_others_can_read_a_directory_that_is_made_under_umask_077(aot, here, bundle):
    old = os.umask(0o077)
    try:
        ended = aot("pack", bundle, "--dir", "made")
    finally:
        os.umask(old)
    assert (ended.code, ended.err) == (0, "")
    assert (here / "made").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("index", ["fifo", "sparse", "deep"])
def test_an_index_of_an_image_that_can_not_be_read_whole(aot_process, here, bundle, index):
    (here / "image").mkdir()
    path = here / "image" / "index.json"
    if index == "fifo":
        os.mkfifo(path)
    elif index == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.write_text('{"manifests":' + "[" * 100_000)
    ended = aot_process("pack", bundle, "--oci", "image")
    assert ended.code == 2, ended.err
    assert "'image' is there and is no OCI image layout: it is left alone" in ended.err


def test_no_digest_is_told_whole_unasked(aot, bundle):
    ended = aot("pack", bundle, "--oci", "image", "--name", "acme")
    assert ended.code == 0, ended.err
    assert re.search(r"sha256:[0-9a-f]{12} \(--json has it whole\)", ended.out)
    assert not re.search(r"[0-9a-f]{64}", ended.out + ended.err)
