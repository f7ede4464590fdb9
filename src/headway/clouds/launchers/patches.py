"""Changes of what is written, merged last (`launch.<target>.patch`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.core.errors import ConfigError


def merge(value: Any, patch: Any) -> Any:
    """Merge a patch over a value: mappings by key, lists whose items have names by name; null removes a key.

    Other lists, and all other values, are replaced.
    """
    if isinstance(patch, dict):
        below = value if isinstance(value, dict) else {}
        merged = {**below, **{key: merge(below.get(key), item) for key, item in patch.items()}}
        return {key: item for key, item in merged.items() if not (key in patch and patch[key] is None)}
    if isinstance(value, list) and isinstance(patch, list) and _are_named(value) and _are_named(patch) and patch:
        by_name = {item["name"]: item for item in value}
        return list({**by_name, **{item["name"]: merge(by_name.get(item["name"]), item) for item in patch}}.values())
    return patch


def patched(documents: Sequence[dict[str, Any]], patches: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Merge patches into the manifests that they name by `kind`, and `metadata.name` if given.

    Args:
        documents: The manifests.
        patches: The patches; a whole manifest that matches none is added.
        key: The key of the config that gives the patches.

    Raises:
        ConfigError: a patch names no manifest.
    """
    result = list(documents)
    for number, patch in enumerate(patches):
        name = (patch.get("metadata") or {}).get("name")
        found = [
            index
            for index, document in enumerate(result)
            if document["kind"] == patch.get("kind") and name in (None, document["metadata"]["name"])
        ]
        for index in found:
            result[index] = merge(result[index], patch)
        if found:
            continue
        if not {"apiVersion", "kind"} <= patch.keys() or name is None:
            kinds = ", ".join(dict.fromkeys(document["kind"] for document in documents))
            meant = " ".join(filter(None, (patch.get("kind") or "manifest without kind", name)))
            raise ConfigError(
                f"{key}.{number} changes no manifest: there is no {meant}",
                where=f"{key}.{number}",
                fix=f"give its kind, one of {kinds}; or a whole manifest with apiVersion, kind and metadata.name",
            )
        result.append(patch)
    return result


def _are_named(items: list[Any]) -> bool:
    return all(isinstance(item, dict) and "name" in item for item in items)
