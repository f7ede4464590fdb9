"""The least rights that a run needs at its clouds' buckets, from the places that its config names.

A run reads and writes below its own folder of the remote tier, and reads the token store and the sources behind URLs.
The actions are those that the storage client uses (`headway.core.storage`); anchors of the audit log may be made and
read, but not removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from headway.checkpoint.lifecycle import CloudDocument
from headway.checkpoint.remote.audit_anchor import ANCHORS
from headway.config import Config
from headway.core.errors import ConfigError
from headway.core.storage import CLOUDS, Cloud, cloud_of
from headway.core.storage.listing import fixed_part, is_glob

_S3_READ = ("s3:GetObject",)
_S3_WRITE = ("s3:AbortMultipartUpload", "s3:DeleteObject", "s3:PutObject")
_GCS_READ = ("storage.objects.get", "storage.objects.list")
_GCS_WRITE = ("storage.objects.create", "storage.objects.delete")
_BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"


@dataclass(frozen=True)
class Place:
    """Name a folder or an object in a bucket, and say what a run does there."""

    cloud: Cloud
    bucket: str
    path: str
    """Folder or object, without slashes at its ends; empty for the whole bucket."""
    writes: bool
    options: Mapping[str, Any]

    @property
    def below(self) -> str:
        """Return what names of objects in the folder begin with."""
        return f"{self.path}/" if self.path else ""


def places_of(config: Config) -> list[Place]:
    """Return the buckets that a config names, and what a run does there."""
    given: list[tuple[str, bool, Mapping[str, Any]]] = []
    remote = config.checkpoint.remote
    if remote is not None:
        given.append((f"{remote.url}/{config.run_directory.resolve().name}", True, remote.options))
    if config.data.remote is not None:
        given.append((config.data.remote, False, config.data.remote_options))
    given += [(source.path, False, source.storage_options) for source in config.data.sources]
    found = []
    for url, writes, options in given:
        parts = urlsplit(url)
        cloud = cloud_of(url)
        if cloud is not None:
            whole = f"{parts.netloc.partition('@')[0]}{parts.path}"
            bucket, _, path = (fixed_part(whole) if is_glob(url) else whole).partition("/")
            found.append(Place(cloud, bucket, path.strip("/"), writes, options))
    return list({(place.bucket, place.path, place.writes): place for place in found}.values())


def policy_for(config: Config, cloud: Cloud) -> CloudDocument:
    """Return the least rights that a run needs at the buckets of one cloud.

    Raises:
        ConfigError: The config names no bucket there.
    """
    places = [place for place in places_of(config) if place.cloud == cloud]
    if not places:
        scheme = next(scheme for scheme, of in CLOUDS.items() if of == cloud)
        raise ConfigError(
            f"the config names no bucket at {cloud}",
            where="checkpoint.remote.url, data.remote, data.sources",
            fix=f"add checkpoint.remote.url={scheme}://BUCKET/FOLDER, or give another --cloud",
        )
    makers: Mapping[Cloud, Callable[[Sequence[Place]], CloudDocument]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
    return makers[cloud](places)


def _aws(places: Sequence[Place]) -> CloudDocument:
    """Return an identity policy of IAM."""
    statements: list[dict[str, Any]] = []
    for number, place in enumerate(places, 1):
        bucket = f"arn:aws:s3:::{place.bucket}"
        folder = f"{bucket}/{place.below}*"
        # A path may be that of one object.
        objects = [folder] if place.writes or not place.path else [folder, f"{bucket}/{place.path}"]
        actions = sorted((*_S3_READ, *_S3_WRITE)) if place.writes else list(_S3_READ)
        listing: dict[str, Any] = {"Sid": f"List{number}", "Effect": "Allow", "Action": "s3:ListBucket"}
        listing["Resource"] = bucket
        if place.path:
            listing["Condition"] = {"StringLike": {"s3:prefix": [place.path, f"{place.below}*"]}}
        name = "Write" if place.writes else "Read"
        objects_rights = {"Sid": f"{name}{number}", "Effect": "Allow", "Action": actions, "Resource": objects}
        statements += [listing, objects_rights]
        if place.writes:
            anchors = f"{bucket}/{place.below}{ANCHORS}/*"
            kept = {"Sid": f"Keep{number}", "Effect": "Deny", "Action": "s3:DeleteObject", "Resource": anchors}
            statements.append(kept)
    command = "aws iam put-role-policy --role-name ROLE --policy-name headway --policy-document file://policy.json"
    return CloudDocument({"Version": "2012-10-17", "Statement": statements}, command)


def _gcp(places: Sequence[Place]) -> CloudDocument:
    """Return roles of one's own, and bindings to them with conditions, for the policy of each bucket."""
    roles = {
        "headwayReader": {"title": "Headway reader", "stage": "GA", "includedPermissions": list(_GCS_READ)},
        "headwayWriter": {"title": "Headway writer", "stage": "GA", "includedPermissions": [*_GCS_READ, *_GCS_WRITE]},
    }
    bindings: dict[str, list[dict[str, Any]]] = {}
    for place in places:
        name = f"projects/_/buckets/{place.bucket}"
        objects = f"{name}/objects"
        listed = f'api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith("{place.path}")'
        below = f'resource.name.startsWith("{objects}/{place.below}") || resource.name == "{objects}/{place.path}"'
        expression = f'{below} || (resource.name == "{name}" && {listed})'
        role = "headwayWriter" if place.writes else "headwayReader"
        binding: dict[str, Any] = {"role": f"projects/PROJECT/roles/{role}", "members": ["serviceAccount:ACCOUNT"]}
        if place.path:
            binding["condition"] = {"title": f"headway below {place.path}"[:100], "expression": expression}
        bindings.setdefault(place.bucket, []).append(binding)
    command = "gcloud iam roles create, and gcloud storage buckets add-iam-policy-binding, with the parts of it"
    return CloudDocument(
        {"roles": roles, "buckets": {name: {"bindings": found} for name, found in bindings.items()}}, command
    )


def _azure(places: Sequence[Place]) -> CloudDocument:
    """Return roles of one's own, and their assignments with conditions."""
    rights = {"Headway reader": ["read"], "Headway writer": ["read", "write", "delete"]}
    roles = [
        {
            "Name": name,
            "IsCustom": True,
            "Description": "What a training needs of its containers.",
            "Actions": [],
            "DataActions": [f"{_BLOBS}/{verb}" for verb in verbs],
            "AssignableScopes": ["/subscriptions/SUBSCRIPTION"],
        }
        for name, verbs in rights.items()
    ]
    assignments = []
    for place in places:
        account = place.options.get("account_name", "ACCOUNT")
        storage = (
            f"/subscriptions/SUBSCRIPTION/resourceGroups/GROUP/providers/Microsoft.Storage/storageAccounts/{account}"
        )
        role = "Headway writer" if place.writes else "Headway reader"
        assignment = {"role": role, "scope": f"{storage}/blobServices/default/containers/{place.bucket}"}
        if place.path:
            # Lists have a prefix, all others the path of a blob (attribute-based access control, version 2.0).
            lists = f"ActionMatches{{'{_BLOBS}/read'}} AND SubOperationMatches{{'Blob.List'}}"
            assignment["condition"] = (
                f"((({lists}) AND @Request[{_BLOBS}:prefix] StringStartsWith '{place.path}')"
                f" OR (!({lists}) AND (@Resource[{_BLOBS}:path] StringStartsWith '{place.below}'"
                f" OR @Resource[{_BLOBS}:path] StringEquals '{place.path}')))"
            )
            assignment["condition-version"] = "2.0"
        assignments.append(assignment)
    command = "az role definition create, and az role assignment create --condition, with the parts of it"
    return CloudDocument({"roles": roles, "assignments": assignments}, command)
