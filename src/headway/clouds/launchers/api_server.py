"""What an API server of Kubernetes takes as a name, an amount or an image, checked before anything is sent to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from headway.clouds.launchers.job import DNS_LABEL, DNS_LABEL_LENGTH, Job, plain_name
from headway.core.errors import ConfigError

#: Names of Services, and of what has a Service of its name (RFC 1035): they begin with a letter.
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{DNS_LABEL.pattern}(\.{DNS_LABEL.pattern})*")
_SUBDOMAIN_LENGTH = 253
_AMOUNT = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]+)?")
_UNITS = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
#: As the registries of images read it: host and port, path in lower case, tag, digest.
_IMAGE = re.compile(
    r"((localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|[A-Za-z0-9.-]+(?=:[0-9]+/)|\[[0-9A-Fa-f:]+\])(:[0-9]+)?/)?"
    r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*)*"
    r"(:\w[\w.-]{0,127})?(@[A-Za-z][A-Za-z0-9+._-]*:[0-9A-Fa-f]{32,})?",
    re.ASCII,
)


def name_problems(job: Job, suffix: str, *, is_service: bool) -> Iterator[ConfigError]:
    """Yield why a run's name can name no objects of this kind of job.

    Args:
        job: The run.
        suffix: What the engine appends to the name in the longest name that it makes.
        is_service: A Service bears the name.
    """
    pattern = _SERVICE_NAME if is_service else DNS_LABEL
    most = DNS_LABEL_LENGTH - len(suffix)
    if len(job.name) <= most and pattern.fullmatch(job.name):
        return
    begin = ", the first a letter" if is_service else ""
    longest = f", since the longest name made of it is {job.name}{suffix}" if suffix else ""
    yield ConfigError(
        f"'{job.name}' cannot name the objects of this job: at most {most} lower-case letters, digits and"
        f" dashes{begin}{longest}",
        where="name",
        fix=f"name={plain_name(job, most, letter_first=is_service)}",
    )


def value_problems(job: Job) -> Iterator[ConfigError]:
    """Yield the values of `launch.kubernetes` that the API server would refuse."""
    kubernetes = job.config.launch.kubernetes
    key = "launch.kubernetes"
    if not DNS_LABEL.fullmatch(kubernetes.namespace) or len(kubernetes.namespace) > DNS_LABEL_LENGTH:
        plain = re.sub(r"[^a-z0-9]+", "-", kubernetes.namespace.lower()).strip("-")
        yield ConfigError(
            f"'{kubernetes.namespace}' is no namespace: lower-case letters, digits and dashes",
            where=f"{key}.namespace",
            fix=f"{key}.namespace={plain[:DNS_LABEL_LENGTH].strip('-') or 'default'}",
        )
    image = job.config.launch.image
    if image is not None and not _IMAGE.fullmatch(image):
        yield ConfigError(
            f"'{image}' names no image: host/path:tag, the path in lower case, without blanks",
            where="launch.image",
            fix="launch.image=registry.example/headway:0.1",
        )
    names: dict[str, Sequence[str | None]] = {
        "service_account": [kubernetes.service_account],
        "priority_class": [kubernetes.priority_class],
        "pull_secret_names": kubernetes.pull_secret_names,
        "secret_names": kubernetes.secret_names,
        "queue.name": [None if kubernetes.queue is None else kubernetes.queue.name],
        "volumes.claim": [volume.claim for volume in kubernetes.volumes],
        "volumes.storage_class": [volume.storage_class for volume in kubernetes.volumes],
    }
    for where, given in names.items():
        for name in given:
            if name is not None and not (_SUBDOMAIN.fullmatch(name) and len(name) <= _SUBDOMAIN_LENGTH):
                yield ConfigError(
                    f"'{name}' names no object: lower-case letters, digits, dashes and dots",
                    where=f"{key}.{where}",
                    fix="kubectl get shows the names that there are",
                )
    amounts = {
        "memory": kubernetes.memory,
        "shared_memory": kubernetes.shared_memory,
        "scratch": kubernetes.scratch,
        **{f"volumes.{number}.size": volume.size for number, volume in enumerate(kubernetes.volumes)},
        **{f"quota.{name}": str(amount) for name, amount in kubernetes.quota.items()},
    }
    for where, amount in amounts.items():
        if amount is not None and read_amount(amount) is None:
            yield ConfigError(
                f"'{amount}' is no amount: 8Gi is 8 x 2^30, 8G is 8 x 10^9",
                where=f"{key}.{where}",
                fix=f"{key}.{where}={_nearest_amount(amount)}",
            )


def read_amount(text: str) -> float | None:
    """Read an amount as the API server does: `8Gi`, `500m`, `1e3`; None if it is none."""
    found = _AMOUNT.fullmatch(text)
    if found is None:
        return None
    number = found[1]
    unit = found[2] or ""
    if unit in _UNITS:
        return float(number) * _UNITS[unit]
    return float(number + unit)


def _nearest_amount(text: str) -> str:
    """Return the amount that was probably meant: `8GB` is 8G, `8GiB` and `8 gib` are 8Gi."""
    found = re.match(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtTpP]?)(i?)", text)
    if found is None:
        return "8Gi"
    number, unit, binary = found.groups()
    unit = unit.upper()
    if unit == "K" and not binary:
        unit = "k"
    return f"{number}{unit}{binary}"
