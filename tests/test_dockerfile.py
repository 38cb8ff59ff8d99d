"""examples/container/Dockerfile and the image of aot pack, built by buildah and run as any user on a read-only root.

No registry is asked: the base in python:3.12-slim's place is this machine's Python with its torch, mounted read-only.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from wheels import ROOT

EXAMPLES = ROOT / "examples"
BUNDLE = ROOT / "artifacts" / "bundles" / "catalogue-sm80.msgpack"
TOOLS = ("buildah", "skopeo", "umoci")
USER = "54321:54321"  # no passwd file knows it
LEFT_OUT = ("pretuned", "__editable__", "distutils-precedence")
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Images:
    """buildah's store in a folder of its own, and what each container of it has of this machine."""

    folder: Path
    mounts: tuple[str, ...]

    def buildah(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        store = ("--storage-driver", "vfs", "--root", self.folder / "store", "--runroot", self.folder / "run")
        return subprocess.run(["buildah", *store, *words], cwd=self.folder, capture_output=True, text=True, check=False)

    def build(self, context: Path, name: str) -> subprocess.CompletedProcess[str]:
        policy = self.folder / "policy.json"
        policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        mounted = [word for mount in self.mounts for word in ("-v", f"{mount}:{mount}:ro")]
        return self.buildah(
            "bud",
            "--isolation",
            "chroot",
            "--signature-policy",
            policy,
            *mounted,
            "--build-arg",
            "BASE=localhost/base",
            "-t",
            name,
            context,
        )

    def run(self, name: str, command: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """``command``, else the image's own, as USER, with the image's environment alone, its root read-only."""
        layout, root = f"oci:{self.folder / name}:latest", self.folder / f"{name}-unpacked" / "rootfs"
        if not root.exists():
            done = self.buildah("push", "--signature-policy", self.folder / "policy.json", name, layout)
            assert done.returncode == 0, done.stderr
            unpack = ["umoci", "unpack", "--image", f"{self.folder / name}:latest", root.parent]
            subprocess.run(unpack, capture_output=True, check=True)
        inspected = subprocess.run(
            ["skopeo", "inspect", "--config", layout], capture_output=True, text=True, check=True
        )
        config = json.loads(inspected.stdout)["config"]
        assert config["User"] == "12345"
        lines = ["set -e", f"mount --bind {root} {root}"]
        for mount in (*self.mounts, "/dev"):
            lines += [
                f"mkdir -p {root}{mount}",
                f"mount --bind {mount} {root}{mount}",
                f"mount -o remount,bind,ro {root}{mount}",
            ]
        lines += [
            f"mount -o remount,bind,ro {root}",
            f"exec chroot --userspec={USER} {root} env -i {shlex.join(config['Env'])} "
            f"{shlex.join(command or config['Cmd'])}",
        ]
        script = "\n".join(lines)
        return subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """With an image ``base``: a Python at /venv that has all packages of this one but pretuned."""
    if os.geteuid() or not all(map(shutil.which, TOOLS)):
        if request.config.getoption("--without-namespaces"):
            pytest.skip("needs root, buildah, skopeo and umoci")
        pytest.fail(
            "these tests build images: run as root, install buildah, skopeo and umoci, or run with --without-namespaces"
        )
    folder = tmp_path_factory.mktemp("images")
    root = folder / "base" / "root"
    venv.create(root / "venv", symlinks=True)
    pip = root / "venv" / "bin" / "pip"
    pip.write_text("#!/venv/bin/python\nfrom pip._internal.cli.main import main\nraise SystemExit(main())\n")
    pip.chmod(0o755)
    shared = root / "shared"
    shared.mkdir()
    places = [Path(entry).resolve() for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    for path in (path for place in places for path in place.iterdir()):
        if not path.name.startswith(LEFT_OUT) and not (shared / path.name).is_symlink():
            (shared / path.name).symlink_to(path)
    packages = root / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (packages / "shared.pth").write_text("/shared\n")
    mounts = ["/usr", *(str(place) for place in (Path(sys.base_prefix).resolve(), *places) if place.parts[1] != "usr")]
    for path in (Path("/bin"), Path("/lib"), Path("/lib64")):
        if path.is_symlink():
            (root / path.name).symlink_to(path.readlink())
        elif path.exists():
            mounts.append(str(path))
    (root / "tmp").mkdir(mode=0o1777)
    words = ("FROM scratch", "COPY root /", "ENV PATH=/venv/bin:/usr/bin:/bin PIP_NO_INDEX=1")
    (folder / "base" / "Dockerfile").write_text("\n".join(words))
    images = Images(folder, tuple(mounts))
    done = images.build(folder / "base", "base")
    assert done.returncode == 0, done.stderr
    yield images
    shutil.rmtree(folder)  # half a GB


@pytest.fixture
def context(tmp_path: Path, built_wheel: Path) -> Path:
    """The folder that the Dockerfile asks for."""
    shutil.copy(EXAMPLES / "container" / "Dockerfile", tmp_path)
    shutil.copy(EXAMPLES / "serve.py", tmp_path)
    shutil.copy(built_wheel, tmp_path)
    (tmp_path / "bundles").mkdir()
    shutil.copy(BUNDLE, tmp_path / "bundles")
    return tmp_path


def test_the_image_serves_as_any_user_and_writes_nothing(images: Images, context: Path) -> None:
    built = images.build(context, "served")
    assert built.returncode == 0, built.stdout + built.stderr
    assert "/opt/pretuned/bundles/catalogue-sm80.msgpack (sm_80" in built.stdout  # the doctor, in the build
    served = images.run("served")
    assert served.returncode == 0, served.stderr
    assert served.stdout.count("mean square") == 4
    done = images.run("served", ["python", "-m", "pretuned.runtime"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "searched  /opt/pretuned/bundles (PRETUNED_BUNDLES): 1 bundle" in done.stdout
    assert "catalogue-sm80.msgpack (sm_80" in done.stdout
    assert "refused" not in done.stdout
    wrote = images.run("served", ["python", "-c", "import os; print(os.getuid()); open('/tmp/x', 'w')"])
    assert wrote.stdout == "54321\n"
    assert "Read-only file system" in wrote.stderr


@pytest.mark.nightly  # tests/runtime/inspect/test_doctor.py has the doctor's word on it
def test_a_bundle_that_can_t_be_opened_ends_the_build(images: Images, context: Path) -> None:
    bundle = context / "bundles" / BUNDLE.name
    bundle.write_bytes(bundle.read_bytes()[:-1])
    built = images.build(context, "cut")
    assert built.returncode != 0
    assert "ok        no" in built.stdout


@pytest.mark.nightly
def test_bundles_are_copied_from_a_packed_image(images: Images, context: Path) -> None:
    """The page's table uses COPY --from of the image that aot pack --oci wrote."""
    packed = [
        sys.executable,
        "-m",
        "pretuned.aot",
        "pack",
        str(BUNDLE),
        "--oci",
        str(context / "image"),
        "--name",
        "acme-bundles",
        "--version",
        "1.0",
    ]
    subprocess.run(packed, capture_output=True, check=True)
    pulled = images.buildah(
        "pull", "-q", "--signature-policy", images.folder / "policy.json", f"oci:{context / 'image'}:1.0"
    )
    assert pulled.returncode == 0, pulled.stderr
    images.buildah("tag", pulled.stdout.strip(), "registry/acme-bundles:1.0")
    dockerfile = context / "Dockerfile"
    own = "COPY --chown=0:0 --chmod=0755 bundles /opt/pretuned/bundles"
    assert own in dockerfile.read_text()
    dockerfile.write_text(
        dockerfile.read_text().replace(own, "COPY --from=registry/acme-bundles:1.0 /opt/pretuned /opt/pretuned")
    )
    built = images.build(context, "copied")
    assert built.returncode == 0, built.stdout + built.stderr
    done = images.run("copied", ["python", "-m", "pretuned.runtime"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/opt/pretuned/bundles/catalogue-sm80.msgpack (sm_80" in done.stdout
