"""The lifecycle rule of a bucket that fits what a run keeps there.

The rule never removes a live object: retention is Headway's, which knows which checkpoint is the newest good one, and
the claims in `owners/` must stay. It removes what no process of the run can remove: parts of uploads that a kill has
cut off, and old versions of objects in a bucket that keeps them. Where some checkpoints are kept forever, it moves
large objects to storage that costs less and still answers at once.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from headway.checkpoint.retention import Rules
from headway.core.errors import ConfigError
from headway.core.storage import cloud_of

_DAY_SECONDS = 86400
#: No upload takes so long, and what was removed by mistake can be had back for at least this long.
_LEAST_DAYS = 7
#: Before that, moving costs more than it saves: the clouds bill at least 30 days of that storage.
_COLD_DAYS = 30
#: Smaller objects are manifests, records and claims, which are read and replaced all the time.
_LARGE_BYTES = 2**20
_NAME = "headway-checkpoints"


@dataclass(frozen=True)
class CloudDocument:
    """Say what a bucket or an identity gets, as the cloud's own program takes it."""

    document: Mapping[str, Any]
    command: str
    """Applies the document, in the file that it names."""

    @property
    def text(self) -> str:
        """Return the document in JSON."""
        return json.dumps(self.document, indent=2) + "\n"


def bucket_rule(url: str, rules: Rules) -> CloudDocument:
    """Return the rule for the place of a remote tier.

    Args:
        url: `checkpoint.remote.url`, or a run's folder below it.
        rules: What the run keeps there.

    Raises:
        ConfigError: the URL is of no bucket.
    """
    parts = urlsplit(url)
    cloud = cloud_of(url)
    if cloud is None or not parts.netloc:
        raise ConfigError(
            f"'{url}' is no URL of a bucket",
            where="URL",
            fix="write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER, as in checkpoint.remote.url",
        )
    folder = parts.path.strip("/")
    days = max(_LEAST_DAYS, -(-(rules.keep_for_seconds or 0) // _DAY_SECONDS))
    makers = {"aws": _s3, "gcp": _gcs, "azure": _azure}
    return makers[cloud](parts.netloc.partition("@")[0], f"{folder}/" if folder else "", days, rules)


def _s3(bucket: str, prefix: str, days: int, rules: Rules) -> CloudDocument:
    rule: dict[str, Any] = {
        "ID": _NAME,
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": _LEAST_DAYS},
        "NoncurrentVersionExpiration": {"NoncurrentDays": days},
    }
    found = [rule]
    if rules.keep_every is not None:
        large = {"And": {"Prefix": prefix, "ObjectSizeGreaterThan": _LARGE_BYTES}}
        moves = {"Transitions": [{"Days": _COLD_DAYS, "StorageClass": "STANDARD_IA"}]}
        found.append({"ID": f"{_NAME}-kept", "Status": "Enabled", "Filter": large, **moves})
    command = f"aws s3api put-bucket-lifecycle-configuration --bucket {shlex.quote(bucket)}"
    return CloudDocument({"Rules": found}, f"{command} --lifecycle-configuration file://rule.json")


def _gcs(bucket: str, prefix: str, days: int, rules: Rules) -> CloudDocument:
    within = {"matchesPrefix": [prefix]} if prefix else {}
    found: list[dict[str, Any]] = [
        {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": _LEAST_DAYS, **within}},
        {"action": {"type": "Delete"}, "condition": {"daysSinceNoncurrentTime": days, **within}},
    ]
    if rules.keep_every is not None:
        moves = {"type": "SetStorageClass", "storageClass": "NEARLINE"}
        weights = {"age": _COLD_DAYS, "matchesStorageClass": ["STANDARD"], "matchesSuffix": [".safetensors"]}
        found.append({"action": moves, "condition": {**weights, **within}})
    command = f"gcloud storage buckets update gs://{shlex.quote(bucket)} --lifecycle-file=rule.json"
    return CloudDocument({"lifecycle": {"rule": found}}, command)


def _azure(container: str, prefix: str, days: int, rules: Rules) -> CloudDocument:
    # Blocks of uploads that were cut off go after a week by themselves.
    actions: dict[str, Any] = {"version": {"delete": {"daysAfterCreationGreaterThan": days}}}
    if rules.keep_every is not None:
        actions["baseBlob"] = {"tierToCool": {"daysAfterModificationGreaterThan": _COLD_DAYS}}
    filters = {"blobTypes": ["blockBlob"], "prefixMatch": [f"{container}/{prefix}"]}
    definition = {"filters": filters, "actions": actions}
    rule = {"name": _NAME, "enabled": True, "type": "Lifecycle", "definition": definition}
    command = "az storage account management-policy create --account-name ACCOUNT --resource-group GROUP"
    return CloudDocument({"rules": [rule]}, f"{command} --policy @rule.json")
