"""`headway image`: build images, show their layers, and pin what they are built from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.clouds.supply.build import ENGINES, ImageRequest, build_image, find_engine, own_index
from headway.clouds.supply.fit import CPU, IMAGES, BuiltImage, remember
from headway.clouds.supply.layout import Image, read_image
from headway.clouds.supply.pins import check_pinned, github_commit, pin
from headway.clouds.supply.registry import resolve_digest
from headway.core.command_line import JsonOption, print_json, print_table
from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.core.format import counted, format_bytes

HELP = """Build images, show their layers, and pin what they are built from.

[bold]Examples[/bold]

headway image build --tag my-lab-train:0.1.0
headway image build --target serve --arg TORCH_BUILD=cu130
headway image layers build/images/train
headway image pin Dockerfile .github/workflows/*.yml
headway image pin --check Dockerfile .github/workflows/*.yml
"""

image = typer.Typer(no_args_is_help=True, help=HELP)


@image.command("build")
def build(
    context: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with the Dockerfile.")] = Path(),
    *,
    target: Annotated[str, typer.Option("--target", help="Stage of the Dockerfile: base, train or serve.")] = "train",
    tag: Annotated[
        str | None, typer.Option("--tag", help="Name of the image; the folder's and the target's when not given.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Option("--arg", metavar="NAME=VALUE", help="Build argument.")] = None,
    platform: Annotated[
        str | None, typer.Option("--platform", help="linux/amd64 or linux/arm64; this machine's when not given.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="docker or buildah; whichever answers when not given.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the image in the OCI layout.")
    ] = None,
) -> None:
    """Build an image with docker or buildah, and print the size of each layer.

    The package index, its credentials and its certificates come from pip's configuration; they are in no layer.

    [bold]Examples[/bold]

    headway image build --tag my-lab-train:0.1.0 --arg TORCH_BUILD=cu130
    headway image build --arg BASE=localhost/debian --arg TORCH_INDEX=

    Exit codes: 0 built, 1 the engine failed, 2 usage, or no engine is there.
    """
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"there is no engine '{engine}'", where="--engine", fix=" or ".join(ENGINES))
    given: dict[str, str] = {}
    for text in arguments or []:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"'{text}' is no build argument", where="--arg", fix="--arg NAME=VALUE")
        given[name] = value
    tag = tag or f"{context.resolve().name.lower()}-{target}:latest"
    request = ImageRequest(tag, target, given, platform, context)
    folder = output or context / IMAGES / target
    built = build_image(engine or find_engine(), request, own_index(), folder)
    torch_build = given.get("TORCH_BUILD", CPU)
    remember(folder, BuiltImage(tag, torch_build, built.architecture))
    _print(tag, built)
    notice(f"built {tag}; in the OCI layout: {folder}")


@image.command("layers")
def layers(
    layout: Annotated[Path, typer.Argument(metavar="FOLDER", help="Image in the OCI layout.")],
    as_json: JsonOption = False,
) -> None:
    """Print the size of each layer of an image, and what made it.

    [bold]Examples[/bold]

    headway image layers build/images/train
    """
    found = read_image(layout)
    if as_json:
        rows = [{"digest": one.digest, "bytes": one.size, "made_by": one.made_by} for one in found.layers]
        print_json({"architecture": found.architecture, "user": found.user, "bytes": found.size, "layers": rows})
    else:
        _print(str(layout), found)


@image.command("pin")
def pin_files(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="Dockerfiles, workflows, compose files."),
    ],
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if something has a tag alone.")] = False,
) -> None:
    """Write the digest of every image and the commit of every action into files.

    Tags are resolved anew, and get the digest that they have now. Registries are asked without a login.

    [bold]Examples[/bold]

    headway image pin Dockerfile .github/workflows/*.yml
    headway image pin --check Dockerfile

    Exit codes: 0 all are pinned, 2 one is not, or cannot be resolved; its file is as it was then.
    """
    if not check:
        for file in files:
            for before, after in pin(file, resolve_digest, github_commit).items():
                notice(f"{file}: {before} -> {after}")
    notice(f"{counted(check_pinned(files), 'image or action')} named by digest or commit")


def _print(name: str, found: Image) -> None:
    rows = [
        [str(number), format_bytes(layer.size), layer.digest.partition(":")[2][:12], _short(layer.made_by)]
        for number, layer in enumerate(found.layers, 1)
    ]
    print_table(
        ["LAYER", "SIZE", "DIGEST", "MADE BY"], [*rows, ["", format_bytes(found.size), "", name]], numeric=(0, 1)
    )


def _short(made_by: str) -> str:
    """Return the part of a recorded line that tells it from others."""
    text = made_by.removeprefix("/bin/sh -c ").removeprefix("#(nop) ").replace("RUN ", "")
    words = [word for word in text.split() if not word.startswith(("--mount", "|"))]
    return " ".join(words)[:70]
