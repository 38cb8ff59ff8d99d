"""Opening, reading, publishing, locking: with real files."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import craft
import golden_bundles
import pytest
from calls import calls_of
from descriptors import open_files
from processes import copy_of
from steps import steps

from pretuned.artifacts import bundle_file, codec
from pretuned.artifacts.bundle_file import open_bundle, open_bytes
from pretuned.artifacts.errors import BundleCorrupt, BundleUnreadable, BundleUntrusted, HostError
from pretuned.artifacts.format import Index, glance_at_gpus, glance_at_kernels
from pretuned.artifacts.limits import MAX_FILE_BYTES, MAX_OPEN_BUNDLES
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import DType, Fusion, Layout, Op, Problem
from pretuned.artifacts.wire import PREAMBLE_BYTES

MEDIUM = codec.encode(golden_bundles.medium())


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "b.msgpack"
    publish(path, MEDIUM)
    return path


def test_what_an_open_bundle_tells(path):
    bundle = golden_bundles.medium()
    with open_bundle(path) as file:
        assert file.path == str(path)
        assert file.digest == MEDIUM[31:63]
        assert (file.target, file.min_driver, file.producer) == (bundle.target, 12080, bundle.producer)
        assert (file.kernels, file.gpus, file.variant_count) == (bundle.kernels, bundle.gpus, 6)
        assert file.variant(5) == bundle.variants[5]
        assert file.cubin(5) == bundle.cubins[5]


def test_the_variants_of_a_kind():
    """Variants are listed by what they compute; no record of another kind is read."""
    for bundle in (golden_bundles.small(), golden_bundles.medium()):
        kinds = {(variant.op, variant.dtype, variant.layout, variant.fusion) for variant in bundle.variants}
        with open_bytes(codec.encode(bundle), "made") as file:
            for kind in kinds:
                wanted = [
                    (i, variant)
                    for i, variant in enumerate(bundle.variants)
                    if (variant.op, variant.dtype, variant.layout, variant.fusion) == kind
                ]
                assert list(file.of_kind(*kind)) == wanted
            assert file.of_kind(Op.DX, DType.MXFP8, Layout.KN, Fusion.SILU) == ()


def test_a_file_that_others_may_write_once_its_place_was_checked(path, monkeypatch):
    """The opened file is checked again, by its descriptor."""

    def opened(name, *how, real=os.open, **more):
        if name == str(path):
            path.chmod(0o666)
        return real(name, *how, **more)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(BundleUntrusted, match="mode 0666"):
        open_bundle(path)


def test_the_largest_file(path):
    os.truncate(path, MAX_FILE_BYTES)
    with pytest.raises(BundleCorrupt, match=rf"file is {MAX_FILE_BYTES} bytes, (?!the limit)"):
        open_bundle(path)
    os.truncate(path, MAX_FILE_BYTES + 1)
    with pytest.raises(BundleCorrupt, match=f"file is {MAX_FILE_BYTES + 1} bytes, the limit is {MAX_FILE_BYTES}"):
        open_bundle(path)


def test_bytes_are_checked_when_they_are_opened():
    """No index of theirs is put off: its last byte, which the target does not hang on, is told at once."""
    with open_bytes(MEDIUM, "made here") as whole:
        last = PREAMBLE_BYTES + whole._preamble.index_bytes - 1
    with pytest.raises(BundleCorrupt, match="made here"):
        open_bytes(MEDIUM[:last] + bytes([MEDIUM[last] ^ 1]) + MEDIUM[last + 1 :], "made here")


def test_a_problem_that_is_not_there(path):
    with open_bundle(path) as file:
        assert file.find(Problem(Op.FORWARD, DType.BF16, 1, 1, 1)) == ()
        assert file.find(Problem(Op.FORWARD, DType.BF16, 1, 2**70, 1)) == ()
        assert file.find(Problem(Op.DW, DType.TF32, 65536, 2**31 - 1, 2**31 - 1)) == ()


@pytest.mark.parametrize("i", [-1, 6])
def test_a_variant_that_is_not_there(path, i):
    with open_bundle(path) as file:
        with pytest.raises(IndexError, match="has 6 variants"):
            file.variant(i)
        with pytest.raises(IndexError, match="has 6 variants"):
            file.cubin(i)


def test_opened_for_later_it_tells_its_target_and_is_checked_when_more_is_asked(tmp_path, path):
    target = golden_bundles.medium().target
    with open_bundle(path, later=True) as file:
        assert (file.target, file.digest, file.size_bytes) == (target, MEDIUM[31:63], len(MEDIUM))
        assert file.load() == golden_bundles.medium()
        assert file.cubin(5) == golden_bundles.medium().cubins[5]
        assert file.target == target
    damaged = tmp_path / "damaged.msgpack"
    damaged.write_bytes(MEDIUM[:300] + bytes([MEDIUM[300] ^ 1]) + MEDIUM[301:])
    problem = next(iter(golden_bundles.medium().choices))
    with open_bundle(damaged, later=True) as file:
        assert file.target == target
        for read in (
            lambda: file.min_driver,
            lambda: file.producer,
            lambda: file.kernels,
            lambda: file.gpus,
            lambda: file.variant_count,
            lambda: file.variant(0),
            file.variants,
            lambda: file.find(problem),
            file.problems,
            file.models,
            lambda: file.cubin(0),
            file.load,
        ):
            with pytest.raises(BundleCorrupt, match="sha256"):
                read()
        assert file.target == target
    with pytest.raises(BundleCorrupt):
        open_bundle(damaged)
    file = open_bundle(path, later=True)
    file.close()
    with pytest.raises(BundleUnreadable, match="it was closed"):
        file.gpus  # noqa: B018
    with pytest.raises(BundleUntrusted):  # what is pinned is checked whole at once
        open_bundle(path, sha256="0" * 64, later=True)


def test_opened_for_later_its_index_is_read_once(tmp_path, path):
    with calls_of(Index.__init__) as read, open_bundle(path, later=True) as file:
        assert file.target == golden_bundles.medium().target
        assert read == []
        assert all((file.variants(), file.models(), file.gpus))
        assert len(read) == 1
    at = int.from_bytes(MEDIUM[25:29], "big") + PREAMBLE_BYTES  # the cubins' header
    broken = tmp_path / "broken.msgpack"
    broken.write_bytes(MEDIUM[: at + 1] + bytes([MEDIUM[at + 1] ^ 1]) + MEDIUM[at + 2 :])
    with open_bundle(broken, later=True) as file:
        errors = []
        for _ in range(2):
            with pytest.raises(BundleCorrupt, match="the cubins' header") as caught:
                file.cubin(0)
            errors.append(caught.value)
        assert errors[0] is errors[1]


def test_opened_for_later_its_target_is_what_it_was(path):
    """It said another one when it was opened: whoever asked has gone by that."""
    at = MEDIUM.index(b"\xa2sm") + 3
    other = bytes([MEDIUM[at] + 6])
    assert MEDIUM[at] < 100  # one byte of msgpack
    path.write_bytes(MEDIUM[:at] + other + MEDIUM[at + 1 :])
    with open_bundle(path, later=True) as file:
        assert file.target.sm == other[0]
        path.write_bytes(MEDIUM)
        for _ in range(2):
            with pytest.raises(BundleCorrupt, match="the file was changed after it was opened"):
                file.gpus  # noqa: B018


def test_opened_for_later_without_a_target_it_is_refused_at_once(tmp_path):
    at = MEDIUM.index(b"target")
    path = tmp_path / "b.msgpack"
    for changed in (b"tarGet", b"\xc1arget"):
        path.write_bytes(MEDIUM[:at] + changed + MEDIUM[at + 6 :])
        with pytest.raises(BundleCorrupt, match="sha256"):
            open_bundle(path, later=True)


@pytest.mark.parametrize("key", [b"gpus", b"kernels"])
def test_opened_for_later_it_tells_what_it_may_be_of_unread(tmp_path, path, key):
    """The GPUs that it was measured on, and its kernels."""
    (gpu, *_), (kernel, *_) = golden_bundles.medium().gpus, golden_bundles.medium().kernels
    right, wrong = [lambda file: file.may_have({kernel.name})], [lambda file: file.may_have({"another"})]
    if key == b"gpus":
        right = [
            lambda file, local=local: file.may_be_of(local) for local in (gpu, gpu._replace(driver=gpu.driver + 10))
        ]
        wrong = [lambda file: file.may_be_of(gpu._replace(name="another"))]
    else:
        right.append(lambda file: file.may_have({"another", kernel.name}))
        wrong.append(lambda file: file.may_have(()))
    for later in (True, False):
        with calls_of(Index.__init__) as read, open_bundle(path, later=later) as file:
            assert all(check(file) for check in right)
            assert not any(check(file) for check in wrong)
        assert bool(read) is not later
    at = MEDIUM.index(key)
    damaged = tmp_path / "damaged.msgpack"
    damaged.write_bytes(MEDIUM[:at] + key.title() + MEDIUM[at + len(key) :])
    with open_bundle(damaged, later=True) as file:
        assert wrong[0](file)  # it does not tell
        with pytest.raises(BundleCorrupt):
            file.gpus  # noqa: B018
        assert wrong[0](file)


def test_the_gpus_of_what_ships_are_within_what_is_glanced_at():
    paths = sorted((Path(bundle_file.__file__).parent / "bundles").glob("*.msgpack"))
    assert len(paths) == 11
    for shipped in paths:
        with open_bundle(shipped, later=True) as file:
            assert glance_at_gpus(file._begin) == file.gpus
            assert glance_at_kernels(file._begin) == {kernel.name for kernel in file.kernels}


def test_closed(path):
    file = open_bundle(path)
    file.close()
    file.close()
    assert file.find(next(iter(golden_bundles.medium().choices)))
    for read in (lambda: file.cubin(0), file.load):
        with pytest.raises(BundleUnreadable, match="it was closed"):
            read()


def test_an_absolute_path_needs_no_working_directory(path, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert open_bundle(path).variant_count
    with pytest.raises(BundleUnreadable, match=r"relative\.msgpack"):
        open_bundle("relative.msgpack")


def test_no_file_descriptor_is_left(path, tmp_path):
    broken = tmp_path / "broken.msgpack"
    broken.write_bytes(MEDIUM[:-1])
    before = open_files()
    for _ in range(20):
        open_bundle(path)  # dropped, not closed
        with pytest.raises(BundleCorrupt):
            open_bundle(broken)
    assert open_files() <= before  # bundles of other tests may rest by now


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: None, BundleUnreadable, "No such file"),
        (lambda p: p.mkdir(), BundleUnreadable, "it is a directory"),
        (os.mkfifo, BundleUnreadable, "no regular file"),
        (lambda p: p.write_bytes(b""), BundleCorrupt, "file is 0 bytes"),
        (lambda p: p.write_bytes(b"\x7fELF" * 100), BundleCorrupt, "it is no bundle"),
        (lambda p: p.symlink_to(p), BundleUnreadable, "symbolic links"),
    ],
)
def test_files_that_are_no_bundles(tmp_path, make, error, message):
    path = tmp_path / "b.msgpack"
    make(path)
    with pytest.raises(error, match=message):
        open_bundle(path)


def test_a_path_with_a_nul():
    for pin in (None, "0" * 64):
        with pytest.raises(BundleUnreadable):
            open_bundle("a\0b", sha256=pin)


def test_pin(path):
    pin = hashlib.sha256(MEDIUM).hexdigest()
    path.chmod(0o666)
    with pytest.raises(BundleUntrusted, match=r"everybody can write it\. Move the bundle, or run: chmod g?o-w /\S+$"):
        open_bundle(path)
    with open_bundle(path, sha256=pin.upper()) as file:
        assert file.load() == golden_bundles.medium()
    with pytest.raises(BundleUntrusted, match=f"its sha256 is {pin}, the pin says 000"):
        open_bundle(path, sha256="0" * 64)
    for wrong in ("", "abc", "g" * 64):
        with pytest.raises(BundleUntrusted, match="64 hex digits"):
            open_bundle(path, sha256=wrong)


def test_a_pin_covers_the_cubins_too(path):
    pin = hashlib.sha256(MEDIUM).hexdigest()
    path.write_bytes(MEDIUM[:-1] + bytes((MEDIUM[-1] ^ 1,)))
    with pytest.raises(BundleUntrusted, match="the pin says"):
        open_bundle(path, sha256=pin)


def test_a_changed_cubin_is_reported_when_it_is_read(path):
    path.write_bytes(MEDIUM[:-1] + bytes((MEDIUM[-1] ^ 1,)))
    with open_bundle(path) as file:
        assert file.cubin(0) == golden_bundles.medium().cubins[0]
        with pytest.raises(BundleCorrupt, match="cubin 5 has sha256"):
            file.cubin(5)
        with pytest.raises(BundleCorrupt, match="cubin 5 has sha256"):
            file.load()


def test_a_file_cut_while_open(path):
    with open_bundle(path) as file:
        os.truncate(path, 100)
        with pytest.raises(BundleCorrupt, match="cubin 0 has sha256"):
            file.cubin(0)
        with pytest.raises(BundleCorrupt, match="file is 100 bytes, header says"):
            file.load()


def test_a_whole_other_bundle_written_over_it_while_open(path):
    other = codec.encode(golden_bundles.medium()._replace(min_driver=12090))
    assert len(other) == len(MEDIUM)
    with open_bundle(path) as file:
        path.write_bytes(other)
        with pytest.raises(BundleCorrupt, match="changed after it was opened"):
            file.load()


def test_a_file_descriptor_closed_behind_its_back(path):
    file = open_bundle(path)
    os.close(file._held.fd)
    with pytest.raises(BundleUnreadable, match="Bad file descriptor"):
        file.cubin(0)


def test_a_file_that_rests_is_opened_and_checked_again(path, tmp_path, monkeypatch):
    bundle = golden_bundles.medium()
    monkeypatch.chdir(tmp_path)
    with open_bundle(path.name) as file:
        monkeypatch.chdir("/")
        file.rest()
        assert file.cubin(0) == bundle.cubins[0]
        file.rest()
        path.chmod(0o666)
        with pytest.raises(BundleUntrusted, match="everybody can write it"):
            file.cubin(0)
        path.chmod(0o644)
        assert file.load() == bundle
        file.rest()
        path.write_bytes(codec.encode(bundle._replace(min_driver=12090)))
        with pytest.raises(BundleCorrupt, match="changed after it was opened"):
            file.cubin(0)
        file.rest()
        path.unlink()
        with pytest.raises(BundleUnreadable, match="No such file"):
            file.cubin(0)
    with pytest.raises(BundleUnreadable, match="it was closed"):
        file.cubin(0)


def test_a_pinned_file_that_rests_is_opened_again_wherever_it_lies(path):
    path.chmod(0o666)
    with open_bundle(path, sha256=hashlib.sha256(MEDIUM).hexdigest()) as file:
        file.rest()
        assert file.load() == golden_bundles.medium()


def test_the_header_of_the_cubins(path):
    at = len(MEDIUM) - sum(map(len, golden_bundles.medium().cubins)) - 5
    for i in range(5):
        data = bytearray(MEDIUM)
        data[at + i] ^= 1
        path.write_bytes(data)
        for read in (lambda: open_bundle(path), lambda data=data: codec.decode(bytes(data), "b")):
            with pytest.raises(BundleCorrupt, match="the cubins' header"):
                read()


def test_the_lazy_reader_checks_what_it_touches(tmp_path):
    path = tmp_path / "b.msgpack"
    problem = next(iter(golden_bundles.small().choices))
    small = codec.encode(golden_bundles.small())
    path.write_bytes(craft.changed_variant(small, threads=0))
    with open_bundle(path) as file, pytest.raises(BundleCorrupt, match=r"variant 0: variant.threads is 0"):
        file.variant(0)
    path.write_bytes(craft.changed_variant(small, op="dW"))
    with open_bundle(path) as file, pytest.raises(BundleCorrupt, match="variant 0 is for"):
        file.find(problem)
    path.write_bytes(craft.changed(small, problems=dict.fromkeys(craft.parts(small)[0]["problems"], b"\x90")))
    with open_bundle(path) as file, pytest.raises(BundleCorrupt, match="choices for forward bf16 E=128"):
        file.find(problem)
    path.write_bytes(craft.changed(small, problems={b"\x90": b"\x90"}))
    with open_bundle(path) as file, pytest.raises(BundleCorrupt, match="problem 0"):
        file.problems()
    path.write_bytes(craft.changed(small, models=b"\x91\x80"))
    with open_bundle(path) as file, pytest.raises(BundleCorrupt, match="models: model has the keys"):
        file.models()


def test_from_many_threads(path):
    bundle = golden_bundles.medium()
    wrong = []
    with open_bundle(path) as file:

        def read() -> None:
            for _ in range(20):
                for i, cubin in enumerate(bundle.cubins):
                    if file.cubin(i) != cubin or file.variant(i) != bundle.variants[i]:
                        wrong.append(i)
                for problem, choices in bundle.choices.items():
                    if file.find(problem) != choices:
                        wrong.append(problem)

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


FORKED = """
import os, sys
from pretuned.artifacts.bundle_file import open_bundle
file = open_bundle(sys.argv[1])
child = os.fork()
same = all(file.cubin(i) == file.load().cubins[i] for _ in range(20) for i in range(6))
if child == 0:
    os._exit(0 if same else 1)
assert os.waitpid(child, 0)[1] == 0 and same
"""


def test_after_a_fork(path):
    subprocess.run([sys.executable, "-c", FORKED, str(path)], check=True)


def test_one_look_into_a_real_size_decodes_little(tmp_path):
    """700 problems x 17 buckets, 160 variants: 1,388 calls where this was written, those of all problems 208,225."""
    bundle = golden_bundles.full()
    path = tmp_path / "b.msgpack"
    publish(path, codec.encode(bundle))
    problem = list(bundle.choices)[333]

    def look() -> None:
        with open_bundle(path) as file:
            i = file.find(problem)[3].variant
            file.variant(i)
            file.cubin(i)

    assert steps(look) < 2000


def test_digest_stands_for_the_whole_content():
    bundle = golden_bundles.medium()
    cubin = bundle.cubins[0][:-1] + b"\xff"
    variant = bundle.variants[0]._replace(cubin_sha256=hashlib.sha256(cubin).digest())
    other = bundle._replace(variants=(variant, *bundle.variants[1:]), cubins=(cubin, *bundle.cubins[1:]))
    assert codec.encode(other)[31:63] != MEDIUM[31:63]


def test_a_descriptor_closes_after_modules_have_lost_their_names(tmp_path):
    """When the interpreter ends, no ignored exception is printed and the file is closed."""
    fd, module = os.open(tmp_path, os.O_RDONLY), copy_of(bundle_file)
    held = module._Descriptor(fd)
    module.os = module.contextlib = None
    del held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_bytes_made_here_are_opened_as_a_file_is():
    with open_bytes(MEDIUM, "made") as file:
        assert file.load() == golden_bundles.medium()
        assert (file.path, file.size_bytes) == ("made", len(MEDIUM))
        file.rest()  # there is nothing to open again: it stays open
        assert file.cubin(0) == golden_bundles.medium().cubins[0]
    for broken in (b"", MEDIUM[:-1], b"text"):
        with pytest.raises(BundleCorrupt, match="bundle 'made'"):
            open_bytes(broken, "made")


@pytest.mark.parametrize(
    ("limit", "value", "why"),
    [(resource.RLIMIT_FSIZE, len(MEDIUM) - 1, "File too large"), (resource.RLIMIT_NOFILE, 0, "Too many open files")],
)
def test_bytes_that_there_is_no_room_for(limit, value, why):
    old = resource.getrlimit(limit)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(limit, (value, old[1]))
    try:
        with pytest.raises(HostError, match=f"^can't keep 'made' in memory: {why}$"):
            open_bytes(MEDIUM, "made")
    finally:
        resource.setrlimit(limit, old)
        signal.signal(signal.SIGXFSZ, before)


def test_bytes_made_here_that_can_not_be_read_back(monkeypatch):
    def pread(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(BundleUnreadable, match="bundle 'made': can't be read: Input/output error"):
        open_bytes(MEDIUM, "made")


def test_a_file_that_comes_in_pieces(path, monkeypatch):
    """A network's file system may return a file in pieces."""
    for most in (1000, 60, 17):
        monkeypatch.setattr(os, "pread", lambda fd, size, at, most=most, real=os.pread: real(fd, min(size, most), at))
        with open_bundle(path) as file:
            assert file.load() == golden_bundles.medium()
            assert file.cubin(1) == golden_bundles.medium().cubins[1]
        monkeypatch.undo()


def test_of_more_files_than_may_be_open_those_opened_first_rest(path):
    files = [open_bundle(path) for _ in range(MAX_OPEN_BUNDLES + 2)]  # all that were open before rest
    assert [i for i, file in enumerate(files) if file._held is None] == [0, 1]
    files[0].cubin(0)
    assert [i for i, file in enumerate(files) if file._held is None] == [1, 2]
    assert len(bundle_file._open) == MAX_OPEN_BUNDLES
    files[3].rest()
    files[3].cubin(0)  # the last one that was opened, by now
    files[1].cubin(0)
    assert [i for i, file in enumerate(files) if file._held is None] == [2, 4]
    del files[3:]
    gc.collect()
    assert open_bundle(path).cubin(1) == golden_bundles.medium().cubins[1]
