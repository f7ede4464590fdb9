"""An image on disk in the OCI layout, as docker and buildah write it: its layers, their sizes and what made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files.foreign import read_json_object

#: Registries and engines have one layout of their own each; this one they share.
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_DEPTH = 3


@dataclass(frozen=True)
class Layer:
    """A layer of an image."""

    digest: str
    """SHA-256 of its content, not compressed: equal digests are equal files."""
    size: int
    """Bytes of its file in the layout: buildah compresses it, as a registry does; docker does not."""
    made_by: str
    """The line of the Dockerfile that made it, as the engine recorded it."""


@dataclass(frozen=True)
class Image:
    """An image, the layers from the ground up."""

    architecture: str
    user: str
    layers: tuple[Layer, ...]

    @property
    def size(self) -> int:
        """Bytes of all layers."""
        return sum(layer.size for layer in self.layers)


def read_image(layout: Path) -> Image:
    """Read an image in the OCI layout.

    Args:
        layout: Folder with `index.json` and `blobs/`.

    Raises:
        ConfigError: it has no image, or what it has is damaged.
    """
    try:
        manifest = _manifest(layout, read_json_object(layout / "index.json"), _DEPTH)
        config = _blob(layout, manifest["config"])
        return _image(manifest, config)
    except FileNotFoundError as error:
        fix = f"headway image build --output {layout}"
        raise ConfigError("there is no image", where=str(error.filename or layout), fix=fix) from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"the image cannot be read: {error}", where=str(layout), fix=f"headway image build --output {layout}"
        ) from None


def _manifest(layout: Path, index: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return the manifest of the first image that an index leads to."""
    if depth == 0:
        raise ValueError("its indexes do not end")
    first = index["manifests"][0]
    found = _blob(layout, first)
    return _manifest(layout, found, depth - 1) if first.get("mediaType") in _INDEXES else found


def _blob(layout: Path, descriptor: Mapping[str, Any]) -> dict[str, Any]:
    algorithm, _, digits = str(descriptor["digest"]).partition(":")
    if algorithm != "sha256" or not digits.isalnum():
        raise ValueError("a digest is not sha256")
    return read_json_object(layout / "blobs" / algorithm / digits)


def _image(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> Image:
    made = [str(step.get("created_by", "")) for step in config.get("history", []) if not step.get("empty_layer")]
    digests = [str(digest) for digest in config["rootfs"]["diff_ids"]]
    sizes = [int(layer["size"]) for layer in manifest["layers"]]
    if len(digests) != len(sizes):
        raise ValueError(f"it has {len(sizes)} layers and {len(digests)} digests")
    # A base image that was made without a Dockerfile has no history.
    made = [""] * (len(sizes) - len(made)) + made[-len(sizes) :]
    settings = config.get("config", {})
    layers = tuple(Layer(*one) for one in zip(digests, sizes, made, strict=True))
    return Image(str(config.get("architecture", "")), str(settings.get("User", "")), layers)
