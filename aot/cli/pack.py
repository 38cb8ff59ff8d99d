"""aot pack."""

from __future__ import annotations

from pathlib import Path

import click

from ...artifacts.publishing import publish
from ..pack.package import (
    ARCHITECTURES,
    check_layout,
    check_name,
    contents,
    file_name,
    repository,
    tag,
    wheel,
    write_directory,
    write_image,
)
from ..process.output import check_wheel, check_writable
from .options import as_json, bundle_files, directory, print_json
from .table import echo, next_steps, quoted, size, tell_one


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(), metavar="BUNDLE...")
@click.option(
    "--wheel",
    "wheels",
    type=directory(file_okay=False),
    metavar="DIR",
    help="Write a wheel into this directory. Once installed, the runtime finds its bundles.",
)
@click.option(
    "--oci",
    type=directory(file_okay=False),
    metavar="DIR",
    help="Write an OCI image layout with /opt/pretuned/bundles. Other tags of the layout stay.",
)
@click.option(
    "--dir",
    "folder",
    type=directory(file_okay=False),
    metavar="DIR",
    help="Write the bundles as files, with permissions that the runtime accepts.",
)
@click.option("--name", default="pretuned-bundles", show_default=True, help="The package's name.")
@click.option("--version", default="1.0", show_default=True, help="The package's version, which is the image's tag.")
@click.option(
    "--arch",
    type=click.Choice(ARCHITECTURES),
    default=ARCHITECTURES[0],
    show_default=True,
    help="The architecture in the image's record. The bundles are the same for all.",
)
@as_json
def pack(
    bundles: tuple[str, ...],
    wheels: Path | None,
    oci: Path | None,
    folder: Path | None,
    name: str,
    version: str,
    arch: str,
    as_json: bool,
) -> None:
    """Pack bundles to ship them: a wheel for pip, an image for COPY --from, or a directory.

    BUNDLE is a file, or a directory of bundles. Each is verified first. The same input gives the same bytes and the
    same image digest. If the command is interrupted, repeat it.

    \b
    Examples:
      aot pack bundles --wheel dist --name acme-bundles --version 1.0
      aot pack bundles --oci image --version 2026.11
      aot pack bundles/*.msgpack --dir /opt/pretuned/bundles
    """
    if not (wheels or oci or folder):
        raise click.UsageError("nothing to write: give --wheel DIR, --oci DIR or --dir DIR")
    if wheels:
        check_writable(wheels, "--wheel DIR")
    if oci:
        check_layout(oci)
    packed = contents(bundle_files(bundles), name, version)
    result: dict[str, object] = {
        "name": name,
        "version": version,
        "targets": list(packed.targets),
        "bundles": [{"file": item.file, "sha256": item.sha256, "size_bytes": len(item.data)} for item in packed.items],
    }
    lines: list[str] = []
    steps: list[tuple[str, str]] = []
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if not as_json:
            tell_one(text)

    if wheels:
        check_name(packed)
        path, data = wheels / file_name(packed), wheel(packed)
        check_wheel(path)
        publish(path, data)
        result["wheel"] = {"path": str(path), "size_bytes": len(data)}
        lines.append(f"wheel  {path}, {size(len(data))}")
        steps.append(("install", f"pip install {quoted(path)}"))
    if oci:
        digest = write_image(oci, packed, arch, note)
        image = f"{oci}:{tag(packed)}"
        result["oci"] = {"path": str(oci), "tag": tag(packed), "digest": digest}
        lines.append(f"image  {image}, {digest[:19]} (--json has it whole)")
        target = f"docker://REGISTRY/{repository(packed)}:{tag(packed)}"
        steps.append(("push", f"skopeo copy oci:{quoted(Path(image))} {target}"))
    if folder:
        write_directory(folder, packed, note)
        result["dir"] = {"path": str(folder)}
        lines.append(f"files  {folder}")
        steps.append(("use", f"export PRETUNED_BUNDLES={quoted(folder.resolve())}"))
    if as_json:
        print_json({**result, "notes": notes})
        return
    total = size(sum(len(item.data) for item in packed.items))
    count = f"{len(packed.items)} bundle{'s'[: len(packed.items) != 1]}"
    echo(f"{count}, {total}, for {', '.join(packed.targets)}")
    echo("\n".join(lines))
    echo(next_steps(*steps))
