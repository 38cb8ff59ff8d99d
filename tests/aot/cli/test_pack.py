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

from pretuned.aot.pack.package import contents, tag
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle


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
    report = json.loads(ended.out)
    folder = here / "made" / "bundles"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert stat.S_IMODE((folder / bundle).stat().st_mode) == 0o644
    data = (here / bundle).read_bytes()
    assert report["bundles"] == [{"file": bundle, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}]
    assert report["targets"] == ["sm_80"]
    with open_bundle(folder / bundle, sha256=report["bundles"][0]["sha256"]) as opened:
        assert opened.target.sm == 80


def test_a_package_has_its_bundles_in_one_order(bundle, here):
    (here / "a-sm80.msgpack").write_bytes((here / bundle).read_bytes())
    listed = contents([bundle, "a-sm80.msgpack", bundle], "Acme.MoE-kernels", "1.0+h100")
    assert [item.file for item in listed.items] == ["a-sm80.msgpack", bundle]
    assert (listed.module, listed.targets, tag(listed)) == ("acme_moe_kernels", ("sm_80",), "1.0_h100")


def test_a_directory_that_the_runtime_would_refuse_is_reported(aot, here, bundle):
    (here / "open").mkdir()
    (here / "open").chmod(0o777)
    ended = aot("pack", bundle, "--dir", "open")
    assert ended.code == 0
    assert "the runtime refuses bundles in 'open'" in ended.err
    assert "everybody can write it" in ended.err
    assert json.loads(aot("pack", bundle, "--dir", "open", "--json").out)["notes"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["small-sm80.msgpack"], "nothing to write: give --wheel DIR, --oci DIR or --dir DIR"),
        (["none.msgpack", "--dir", "d"], "no such file"),
        (["small-sm80.msgpack", "--dir", "d", "--name", "9"], "--name '9' is no package name"),
        (["small-sm80.msgpack", "--dir", "d", "--name", "a/b"], "--name 'a/b' is no package name"),
        (["small-sm80.msgpack", "--dir", "d", "--name", "pretuned"], "names that begin with pretuned are reserved"),
        (["small-sm80.msgpack", "--dir", "d", "--version", "1.x"], "--version '1.x' is no package version"),
        (["small-sm80.msgpack", "--dir", "d", "--version", "01"], "--version '01' is no package version"),
        (["small-sm80.msgpack", "--oci", "d", "--version", "1." + "1" * 127], "--version has 129 characters"),
        (["small-sm80.msgpack", "--wheel", "dist", "--name", "torch"], "--name 'torch' is the name of another package"),
        (["small-sm80.msgpack", "--wheel", "dist", "--name", "Pytest"], "Choose your own, e.g. --name pytest-bundles"),
        (["small-sm80.msgpack", "--wheel", "dist", "--name", "yaml"], "is the name of another package"),
        (["small-sm80.msgpack", "--wheel", "dist", "--name", "json"], "is the name of another package"),
        (["small-sm80.msgpack", "--wheel", "dist", "--name", "VLLM"], "is the name of another package"),
        (["text.msgpack", "--dir", "d"], "text.msgpack"),
        (["small", "--dir", "d"], "the runtime would not list it under that name"),
        ([".small.msgpack", "--dir", "d"], "the runtime would not list it under that name"),
        (["small-sm80.msgpack", "other/small-sm80.msgpack", "--dir", "d"], "two bundles are named"),
        (["small-sm80.msgpack", "--oci", "other"], "holds something other than an OCI image layout"),
        (["small-sm80.msgpack", "--oci", "d", "--arch", "ppc"], "'ppc' is not one of"),
    ],
)
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
def another_bundle(small_bundle):
    """The bytes of a bundle that differs from the small one."""
    with open_bundle(small_bundle) as opened:
        bundle = opened.load()
    return codec.encode(bundle._replace(models=(bundle.models[0]._replace(name="another"), *bundle.models[1:])))


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
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    here = sysconfig.get_paths()["purelib"]
    (Path(purelib) / "these.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    output = subprocess.run([python, "-m", "pretuned.runtime"], capture_output=True, text=True, check=False).stdout
    assert f"{purelib}/acme_moe_kernels (an installed package): 1 bundle" in output, output
    assert f"{purelib}/acme_moe_kernels/small-sm80.msgpack (sm_80," in output
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
    packed = pack("--oci", "one", "--name", "acme")
    os.utime(here / "small-sm80.msgpack", (0, 0))
    assert pack("--oci", "two", "--name", "acme")["digest"] == packed["digest"]
    for name in sorted(path.relative_to(here / "one") for path in (here / "one").rglob("*") if path.is_file()):
        assert (here / "one" / name).read_bytes() == (here / "two" / name).read_bytes()
    assert pack("--oci", "two", "--name", "other")["digest"] != packed["digest"]


def test_the_layer_is_root_s_and_nobody_else_can_write_it(pack, here):
    manifest = json.loads(blob(here / "one", pack("--oci", "one")["digest"]).read_bytes())
    (layer,) = manifest["layers"]
    with tarfile.open(blob(here / "one", layer["digest"])) as tar:
        members = {member.name: (member.mode, member.uid, member.gid, member.mtime, member.isdir()) for member in tar}
    assert members == {
        **dict.fromkeys(("opt", "opt/pretuned", "opt/pretuned/bundles"), (0o755, 0, 0, 0, True)),
        "opt/pretuned/bundles/small-sm80.msgpack": (0o644, 0, 0, 0, False),
    }


def test_a_layout_keeps_its_other_tags(pack, here):
    first = pack("--oci", "one", "--version", "1.0")
    second = pack("--oci", "one", "--version", "1.1+h100")
    again = pack("--oci", "one", "--version", "1.0", "--name", "acme")
    index = json.loads((here / "one" / "index.json").read_bytes())
    images = {
        manifest["annotations"]["org.opencontainers.image.ref.name"]: manifest["digest"]
        for manifest in index["manifests"]
    }
    assert images == {"1.0": again["digest"], "1.1_h100": second["digest"]}
    assert first["digest"] not in images.values()


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("skopeo") and shutil.which("umoci")), reason="skopeo and umoci are not here")
def test_skopeo_and_umoci_read_it(pack, here, small_bundle):
    digest = pack("--oci", "one", "--name", "acme", "--version", "2.0")["digest"]

    def run(*command):
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout

    report = json.loads(run("skopeo", "inspect", "oci:one:2.0"))
    assert report["Digest"] == digest
    assert report["Labels"]["org.opencontainers.image.title"] == "acme"
    assert report["Labels"]["pretuned.targets"] == "sm_80"
    run("skopeo", "--insecure-policy", "copy", "oci:one:2.0", "oci:copied:2.0")  # as a push: it checks every digest
    copied, ours = (json.loads(run("skopeo", "inspect", "--config", f"oci:{name}:2.0")) for name in ("copied", "one"))
    assert copied["rootfs"] == ours["rootfs"]  # of the layer as it unpacks: the copy is compressed
    assert "aot pack: small-sm80.msgpack" in run("umoci", "stat", "--image", "one:2.0")
    root = os.geteuid() == 0
    run("umoci", "unpack", *([] if root else ["--rootless"]), "--image", "one:2.0", "unpacked")
    unpacked = here / "unpacked" / "rootfs" / "opt" / "pretuned" / "bundles" / "small-sm80.msgpack"
    assert unpacked.read_bytes() == small_bundle.read_bytes()
    assert [stat.S_IMODE(parent.stat().st_mode) for parent in (unpacked, *list(unpacked.parents)[:3])] == [
        0o644,
        *[0o755] * 3,
    ]
    with open_bundle(unpacked) as opened:  # owners and modes as unpacked are what the runtime accepts
        assert opened.target.sm == 80


@pytest.mark.parametrize(
    ("option", "file"),
    [("--dir", "{bundle}"), ("--dir", "{bundle}.sig"), ("--wheel", "pretuned_bundles-1.0-py3-none-any.whl")],
)
def test_another_file_of_that_name_is_not_overwritten(aot, here, bundle, option, file):
    signing.sign(here / bundle)
    there = here / "out" / file.format(bundle=bundle)
    there.parent.mkdir()
    there.write_text("notes")
    ended = aot("pack", bundle, option, "out")
    assert ended.code == 2
    assert f"'{there.relative_to(here)}' is there and is no" in ended.err
    assert [path.name for path in there.parent.iterdir()] == [there.name]
    assert there.read_text() == "notes"


def test_a_directory_that_is_made_under_umask_000_is_loaded_from(aot, here, bundle):
    old = os.umask(0)
    try:
        ended = aot("pack", bundle, "--dir", "some/where/made")
    finally:
        os.umask(old)
    assert (ended.code, ended.err) == (0, "")
    assert {(here / name).stat().st_mode & 0o777 for name in ("some", "some/where", "some/where/made")} == {0o755}


def test_others_can_read_a_directory_that_is_made_under_umask_077(aot, here, bundle):
    old = os.umask(0o077)
    try:
        ended = aot("pack", bundle, "--dir", "made")
    finally:
        os.umask(old)
    assert (ended.code, ended.err) == (0, "")
    assert (here / "made").stat().st_mode & 0o777 == 0o755


LAYOUT = '{"imageLayoutVersion":"1.0.0"}'
NO_MANIFESTS = '{"schemaVersion":2,"manifests":[]}'
MANIFEST = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": "sha256:" + 64 * "0", "size": 7}


def index(*manifests: object, **other: object) -> str:
    return json.dumps({"schemaVersion": 2, "manifests": manifests, **other})


@pytest.mark.parametrize(
    ("mark", "listed"),
    [
        (None, NO_MANIFESTS),  # no layout without its mark
        ("{}", NO_MANIFESTS),
        ("[]", NO_MANIFESTS),
        ('{"imageLayoutVersion":"2.0"}', NO_MANIFESTS),
        (LAYOUT, '{"manifests":""}'),
        (LAYOUT, '{"schemaVersion":2,"manifests":""}'),
        (LAYOUT, '{"schemaVersion":2,"manifests":{}}'),
        (LAYOUT, '{"schemaVersion":1,"manifests":[]}'),
        (LAYOUT, "[]"),
        (LAYOUT, ""),
        (LAYOUT, index("sha256:00")),
        (LAYOUT, index({})),
        (LAYOUT, index({**MANIFEST, "digest": "../../etc/passwd"})),
        (LAYOUT, index({**MANIFEST, "size": "7"})),
        (LAYOUT, index({**MANIFEST, "size": -1})),
        (LAYOUT, index({**MANIFEST, "annotations": []})),
        (LAYOUT, index({**MANIFEST, "annotations": {"org.opencontainers.image.ref.name": 1}})),
    ],
)
def test_what_is_no_layout_is_left_as_it_is(aot, here, bundle, mark, listed):
    (here / "image").mkdir()
    (here / "image" / "index.json").write_text(listed)
    if mark is not None:
        (here / "image" / "oci-layout").write_text(mark)
    before = {path: path.read_bytes() for path in (here / "image").iterdir()}
    ended = aot("pack", bundle, "--oci", "image")
    assert ended.code == 2
    assert "holds something other than an OCI image layout and is left as it is" in ended.err
    assert {path: path.read_bytes() for path in (here / "image").iterdir()} == before


def test_a_layout_keeps_what_others_wrote_into_it(pack, here):
    (here / "one").mkdir()
    (here / "one" / "oci-layout").write_text(LAYOUT + "\n")
    nested = {**MANIFEST, "mediaType": "application/vnd.oci.image.index.v1+json", "platform": {"os": "linux"}}
    (here / "one" / "index.json").write_text(index(nested, annotations={"who": "me"}))
    pack("--oci", "one")
    manifest_index = json.loads((here / "one" / "index.json").read_bytes())
    assert manifest_index["manifests"][0] == nested
    assert manifest_index["annotations"] == {"who": "me"}
    assert (here / "one" / "oci-layout").read_text() == LAYOUT + "\n"


def test_a_tag_has_128_characters_at_most(pack):
    longest = "1." + "2" * 120 + "+h100a"
    assert len(longest) == 128
    assert pack("--oci", "one", "--version", longest)["tag"] == longest.replace("+", "_")


def test_a_registry_s_name_has_no_capitals(aot, bundle):
    ended = aot("pack", bundle, "--oci", "image", "--name", "Acme._MoE")
    assert "docker://REGISTRY/acme-moe" in ended.out


def test_a_wheel_of_bundles_may_be_packed_anew_where_it_is_installed(aot, here, bundle, monkeypatch):
    ended = aot("pack", bundle, "--wheel", "dist", "--name", "acme-bundles", "--json")
    with zipfile.ZipFile(json.loads(ended.out)["wheel"]["path"]) as archive:
        archive.extractall(here / "site")
    monkeypatch.syspath_prepend(here / "site")
    (here / "acme").mkdir()  # a folder of the working directory is no installed package
    for name in ("acme-bundles", "Acme_Bundles", "acme"):
        assert aot("pack", bundle, "--wheel", "dist", "--name", name).code == 0
    (here / "site" / "other").mkdir()
    (here / "site" / "other" / "code.py").touch()
    (here / "site" / "alone.py").touch()
    for name in ("other", "alone"):
        ended = aot("pack", bundle, "--wheel", "dist", "--name", name)
        assert f"--name '{name}' is the name of another package" in ended.err


def test_a_signature_of_the_bundle_before_is_removed(aot, here, bundle, another_bundle):
    signing.sign(here / bundle)
    assert aot("pack", bundle, "--dir", "out").code == 0
    signature = here / "out" / f"{bundle}.sig"
    (here / f"{bundle}.sig").unlink()
    assert aot("pack", bundle, "--dir", "out").err == ""
    assert signature.exists()  # it signs these bytes still
    (here / bundle).write_bytes(another_bundle)
    ended = aot("pack", bundle, "--dir", "out", "--json")
    (note,) = json.loads(ended.out)["notes"]
    assert note.startswith(f"removed 'out/{bundle}.sig': it signed the bundle that was there before")
    assert not signature.exists()


def test_a_signature_of_another_tool_is_left_and_nothing_is_written(aot, here, bundle):
    (here / "out").mkdir()
    (here / "out" / f"{bundle}.sig").write_text("-----BEGIN PGP SIGNATURE-----")
    ended = aot("pack", bundle, "--dir", "out")
    assert ended.code == 2
    assert "is there and is no signature of aot sign" in ended.err
    assert [path.name for path in (here / "out").iterdir()] == [f"{bundle}.sig"]


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("skopeo") and shutil.which("umoci")), reason="skopeo and umoci are not here")
@pytest.mark.parametrize("maker", ["skopeo", "umoci"])
def test_a_layout_that_another_tool_made_takes_one_more_tag(pack, here, maker):
    def run(*command):
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout

    if maker == "umoci":
        run("umoci", "init", "--layout", "two")
        run("umoci", "new", "--image", "two:theirs")
    else:
        pack("--oci", "one")
        run("skopeo", "--insecure-policy", "copy", "oci:one:1.0", "oci:two:theirs")
    pack("--oci", "two", "--version", "2.0", "--name", "acme")
    assert run("umoci", "list", "--layout", "two").split() == ["theirs", "2.0"]
    run("umoci", "gc", "--layout", "two")  # removes the blobs that no tag leads to
    run("umoci", "stat", "--image", "two:theirs")
    run("skopeo", "--insecure-policy", "copy", "oci:two:2.0", "oci:three:2.0")


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
    assert "'image' holds something other than an OCI image layout and is left as it is" in ended.err


def test_no_digest_is_reported_whole_unasked(aot, bundle):
    ended = aot("pack", bundle, "--oci", "image", "--name", "acme")
    assert ended.code == 0, ended.err
    assert re.search(r"sha256:[0-9a-f]{12} \(--json has it whole\)", ended.out)
    assert not re.search(r"[0-9a-f]{64}", ended.out + ended.err)
