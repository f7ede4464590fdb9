"""Storage behind URLs, on `fsspec`, which is imported when it is first used.

`Storage` is the one client, with one retry policy; each domain (checkpoints, data) derives from it to put errors in its
own words. No code outside this package imports `fsspec` or retries requests.
"""

from headway.core.storage.client import PART_BYTES, RECORD_BYTES, Problem, Storage
from headway.core.storage.filesystem import (
    CLOUDS,
    WEB,
    Cloud,
    check_credentials,
    check_filesystem,
    cloud_of,
    credentials_fix,
    extra_for,
    filesystem,
    in_words,
    kind_of,
    load_filesystem,
    missing_fix,
    scheme_of,
)
from headway.core.storage.listing import ObjectInfo, highest

__all__ = [
    "CLOUDS",
    "PART_BYTES",
    "RECORD_BYTES",
    "WEB",
    "Cloud",
    "ObjectInfo",
    "Problem",
    "Storage",
    "check_credentials",
    "check_filesystem",
    "cloud_of",
    "credentials_fix",
    "filesystem",
    "highest",
    "in_words",
    "kind_of",
    "load_filesystem",
    "missing_fix",
    "extra_for",
    "scheme_of",
]
