"""Versions of named models in a registry: their records, and how a reference becomes a verified folder.

    REGISTRY/NAME/versions/00000003.json      a version's manifest: made once, after all its files
    REGISTRY/NAME/files/FINGERPRINT/...       a version's files, named by the hash of their names and hashes
    REGISTRY/NAME/aliases/prod/00000002.json  the second change of the alias `prod`

A registry is a folder or an object store. Nothing in it is ever replaced, so there is no server and no database: a
manifest and a change of an alias are made by a conditional put, which only one of several writers wins. A kill leaves
files without a manifest, which nobody sees and the same command completes.

Readers use three functions: `resolve` of a reference, `local_folder` of what it found, and `open_registry`. The room
`headway.registry` writes.
"""

from headway.models.versions.records import AliasChange, ModelVersion, VersionFile
from headway.models.versions.registry import Registry, open_registry
from headway.models.versions.resolve import Reference, ResolvedVersion, fetch, is_reference, local_folder, resolve

__all__ = [
    "AliasChange",
    "ModelVersion",
    "Reference",
    "Registry",
    "ResolvedVersion",
    "VersionFile",
    "fetch",
    "is_reference",
    "local_folder",
    "open_registry",
    "resolve",
]
