"""Lifecycle rules of a bucket, which may remove the claims on remote checkpoints like any other object."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.config import Config
from headway.core.console import notice
from headway.core.storage import cloud_of, filesystem, in_words, kind_of, scheme_of
from headway.lab.doctor.findings import Finding

_WHERE = "checkpoint.remote.url"
#: Size of a claim.
_CLAIM_BYTES = 300
#: Storage classes whose objects cannot be read at once.
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
_FIX = (
    "limit the rule to other prefixes, or remove it: without its claims two machines can train one run at the same"
    " time; checkpoint.remote.keep removes old checkpoints"
)


@dataclass(frozen=True)
class Rule:
    """A rule that removes or archives current objects."""

    name: str
    prefixes: tuple[str, ...]
    """Prefixes of the affected names; an empty one matches all."""
    does: str
    """Effect in words: `removes objects after 30 days`."""


def examine_lifecycle(config: Config) -> Iterator[Finding]:
    """Look for lifecycle rules that reach the claims of a run (`owners/`); only reads from the store."""
    remote = config.checkpoint.remote
    scheme = None if remote is None else scheme_of(remote.url)
    if remote is None or scheme in ("file", "local"):
        return
    read = _READERS.get(str(cloud_of(remote.url) or scheme))
    if read is None:
        yield Finding(
            "note",
            f"lifecycle rules of {scheme}:// cannot be queried: check that none removes objects below owners/",
            f"{_WHERE}={remote.url}",
        )
        return
    notice(f"asking {scheme}:// for lifecycle rules")
    try:
        files, path = filesystem(remote.url, remote.options, "keeping checkpoints at")
        bucket, _, folder = path.strip("/").partition("/")
        rules = list(read(files, bucket))
    except Exception as error:
        kind, reason = kind_of(error)
        if kind == "missing":
            reason = f"there is no such bucket: {reason}"
        yield Finding(
            "note",
            f"the lifecycle rules of the bucket cannot be read: {reason or in_words(error)}",
            f"{_WHERE}={remote.url}",
            "allow s3:GetLifecycleConfiguration (Google: storage.buckets.get), or look for rules that reach owners/",
        )
        return
    run = f"{folder}/{config.run_directory.name}/".lstrip("/")
    found = [rule for rule in rules if any(reaches_claims(prefix, run) for prefix in rule.prefixes)]
    for rule in found:
        what = f"lifecycle rule '{rule.name}' of bucket {bucket} {rule.does}: it reaches the claims in owners/"
        yield Finding("warning", what, f"{_WHERE}={remote.url}", _FIX)
    if not found:
        yield Finding("ok", f"no lifecycle rule of bucket {bucket} reaches the claims of the run", remote.url)


def reaches_claims(prefix: str, run: str) -> bool:
    """Return whether names with a prefix can be claims of a run.

    Args:
        prefix: Prefix of a rule.
        run: The run's folder in the bucket, with a trailing slash.
    """
    if run.startswith(prefix):
        return True
    if not prefix.startswith(run):
        return False
    generation, *rest = prefix.removeprefix(run).split("/", 1)
    if not rest:
        return "run-".startswith(generation) or re.fullmatch(r"run-[0-9]+", generation) is not None
    return re.fullmatch(r"run-[0-9]+", generation) is not None and (
        "owners/".startswith(rest[0]) or rest[0].startswith("owners/")
    )


def _s3_rules(files: Any, bucket: str) -> Iterator[Rule]:
    try:
        answer = files.call_s3("get_bucket_lifecycle_configuration", Bucket=bucket)
    except FileNotFoundError as error:
        if "lifecycle" in str(error).lower():  # the bucket exists and has no rules
            return
        raise
    yield from s3_rules(answer)


def s3_rules(answer: Mapping[str, Any]) -> Iterator[Rule]:
    """Parse the response of S3 (GetBucketLifecycleConfiguration).

    Rules on old versions and on multipart uploads are harmless, and so are rules on tags: Headway sets none.
    """
    for rule in answer.get("Rules", ()):
        if rule.get("Status") != "Enabled":
            continue
        chosen = rule.get("Filter") or {}
        chosen = {**chosen, **chosen.get("And", {})}
        is_tagged = bool(chosen.get("Tag") or chosen.get("Tags"))
        size = _CLAIM_BYTES
        if is_tagged or not chosen.get("ObjectSizeGreaterThan", 0) < size < chosen.get("ObjectSizeLessThan", size + 1):
            continue
        prefix = str(chosen.get("Prefix") or rule.get("Prefix") or "")
        name = str(rule.get("ID") or "without a name")
        expires = rule.get("Expiration") or {}
        if "Days" in expires or "Date" in expires:
            when = f"after {expires['Days']} days" if "Days" in expires else f"on {expires['Date']}"
            yield Rule(name, (prefix,), f"removes objects {when}")
        # Since 2024 objects below 128 KiB are not moved by default.
        moves = [move.get("StorageClass") for move in rule.get("Transitions", ())]
        small_too = answer.get("TransitionDefaultMinimumObjectSize") == "varies_by_storage_class"
        if small_too and any(to in _ARCHIVES for to in moves):
            yield Rule(name, (prefix,), "moves objects to an archive that cannot be read at once")


def gcs_rules(answer: Mapping[str, Any]) -> Iterator[Rule]:
    """Parse the response of Google (buckets.get); all of its storage classes can be read at once."""
    for number, rule in enumerate(answer.get("lifecycle", {}).get("rule", ()), start=1):
        condition = rule.get("condition", {})
        of_old_versions = ("daysSinceNoncurrentTime", "noncurrentTimeBefore", "numNewerVersions")
        is_current = condition.get("isLive", True) and not any(key in condition for key in of_old_versions)
        suffixes: Sequence[str] = condition.get("matchesSuffix") or ("",)
        if rule.get("action", {}).get("type") != "Delete" or not is_current:
            continue
        if any(".json".endswith(suffix) or suffix.endswith(".json") for suffix in suffixes):
            age = condition.get("age")
            when = "by its conditions" if age is None else f"after {age} days"
            yield Rule(f"number {number}", tuple(condition.get("matchesPrefix") or ("",)), f"removes objects {when}")


_READERS: Mapping[str, Callable[[Any, str], Iterator[Rule]]] = {
    "aws": _s3_rules,
    "gcp": lambda files, bucket: gcs_rules(files.call("GET", "b/{}", bucket, json_out=True)),
}
