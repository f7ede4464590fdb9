"""`headway registry list`, `show`, `card` and `verify`: what is registered, and whether it is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.config.arguments import StorageOption
from headway.core.command_line import JsonOption, RegistryOption, print_json, print_table, writing
from headway.core.console import notice, print_line, print_text, warning
from headway.core.errors import CheckpointError, HeadwayError
from headway.core.files.atomic import write_text
from headway.core.format import UNKNOWN, format_bytes
from headway.models.versions import Reference, local_folder, resolve
from headway.registry.card import ledger_word, version_card
from headway.registry.cli.options import KeyOption, VersionArgument, moment, open_named, summary
from headway.registry.gate import benchmark_rows
from headway.registry.signing import check_key, signature_problem
from headway.registry.verify import Finding, verify_model
from headway.telemetry.record import dig

if TYPE_CHECKING:
    from headway.models.versions import ModelVersion, Registry


def list_(
    name: Annotated[str | None, typer.Argument(help="Model; all when not given.")] = None,
    place: RegistryOption = None,
    option: StorageOption = None,
    json: JsonOption = False,
) -> None:
    """List versions with their aliases, the oldest first.

    [bold]Examples[/bold]

    headway registry list
    headway registry list my-model --json
    """
    target = open_named(place, option)
    rows = []
    for model in target.models() if name is None else [name]:
        numbers = target.numbers(model)
        if name is not None and not numbers:
            raise target.unknown(model, "version", ())
        named = _named(target, model)
        for number in numbers:
            with _warning(f"{model}@{number}"):
                rows.append((target.required(model, number), named.get(number, [])))
    if json:
        print_json([{**summary(version), "aliases": aliases} for version, aliases in rows])
    elif not rows:
        notice(f"no versions in {target.url}")
    else:
        headers = ["MODEL", "VERSION", "ALIASES", "REGISTERED", "BY", "SIZE", "SOURCE", "LEDGER", "VALIDATION"]
        print_table(headers, [_row(version, aliases) for version, aliases in rows], numeric=(1, 5, 8))


def _named(target: Registry, name: str) -> dict[int, list[str]]:
    """Return the aliases of each version."""
    found: dict[int, list[str]] = {}
    for alias in target.aliases(name):
        with _warning(f"{name}@{alias}"):
            change = target.present(name, alias)
            if change is not None and change.number is not None:
                found.setdefault(change.number, []).append(alias)
    return found


@contextmanager
def _warning(what: str) -> Iterator[None]:
    """Turn a broken record into a warning: a list shows what else there is."""
    try:
        yield
    except CheckpointError as error:
        warning(f"{what}: {error.what} ({error.where})")


def _row(version: ModelVersion, aliases: list[str]) -> list[str]:
    loss = dig(version.evidence, "metrics", "evaluation/loss")
    return [
        version.name,
        str(version.number),
        ", ".join(aliases),
        moment(version.time),
        version.by,
        format_bytes(version.total_bytes),
        _source(version),
        ledger_word(version),
        f"{loss:.4f}" if isinstance(loss, float) else UNKNOWN,
    ]


def _source(version: ModelVersion) -> str:
    source = version.source
    if source.get("kind") == "run":
        return f"{source.get('run')}, step {source.get('step')}"
    return str(source.get("repository") or source.get("folder") or UNKNOWN)


def show(
    version: VersionArgument, place: RegistryOption = None, option: StorageOption = None, json: JsonOption = False
) -> None:
    """Show what is known of a version: files, ledger, config, data, metrics, benchmarks, parent, licence, who and when.

    [bold]Examples[/bold]

    headway registry show my-model@prod
    headway registry show my-model@3 --json
    """
    target = open_named(place, option)
    found = resolve(version, target)
    this = found.version
    aliases = _named(target, this.name).get(this.number, [])
    if json:
        print_json({**asdict(this), "manifest_sha256": this.sha256, "aliases": aliases, "url": found.url})
        return
    metrics = this.evidence.get("metrics") or {}
    ledger = dig(this.evidence, "ledger", "problems") or []
    rows = [
        ["aliases", ", ".join(aliases) or UNKNOWN],
        ["registered", f"{moment(this.time)} by {this.by}"],
        ["source", _source(this)],
        ["parent", this.parent or UNKNOWN],
        ["licence", this.licence or UNKNOWN],
        ["ledger", "; ".join([ledger_word(this), *map(str, ledger)])],
        ["data", str(dig(this.evidence, "data", "fingerprints", "data") or UNKNOWN)],
        *([name, f"{value:.4g}"] for name, value in sorted(metrics.items()) if isinstance(value, float)),
        *([f"{task} {metric}", f"{value:.4g}"] for task, metric, value in benchmark_rows(this.evidence)),
        ["signed", "yes" if this.is_signed else "no"],
        ["manifest", this.sha256],
        ["folder", found.url],
        *([name, f"{format_bytes(file.bytes)}  {file.sha256}"] for name, file in sorted(this.files.items())),
    ]
    print_table(["VERSION", str(this)], rows)


def card(
    version: VersionArgument,
    output: Annotated[Path | None, typer.Option(help="File to write; standard output when not given.")] = None,
    place: RegistryOption = None,
    option: StorageOption = None,
) -> None:
    """Write the model card of a version for the Hugging Face Hub, from what is known of it; the rest is n/a.

    [bold]Examples[/bold]

    headway registry card my-model@prod
    headway registry card my-model@3 --output README.md
    """
    text = version_card(resolve(version, open_named(place, option)).version)
    if output is None:
        print_text(text)
        return
    with writing(output):
        write_text(output, text)
    notice(f"wrote {output}")


def verify(
    version: Annotated[
        str | None,
        typer.Argument(metavar="NAME or NAME@VERSION", help="All models when not given."),
    ] = None,
    place: RegistryOption = None,
    option: StorageOption = None,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Read every byte of every version, and compare it with what was registered. Exit code 4 when anything differs.

    Also found: changed, missing and replaced records, files that belong to no version, and what killed commands have
    left, which is no damage.

    [bold]Examples[/bold]

    headway registry verify
    headway registry verify my-model@3 --key public.pem
    headway registry verify --registry s3://bucket/registry --json
    """
    target = open_named(place, option)
    if version is not None and "@" in version:
        found = resolve(version, target).version
        names = [found.name]
        numbers = {found.number}
    else:
        names = target.models() if version is None else [version]
        numbers = None
        if version is not None and not target.numbers(version):
            raise target.unknown(version, "version", ())
    if key is not None:
        check_key(key, "--key")
    findings = [finding for name in names for finding in verify_model(target, name, numbers)]
    if key is not None:
        known = {finding.where for finding in findings}
        findings += _signature_findings(target, names, numbers, key, known)
    damage = [finding for finding in findings if finding.kind == "damage"]
    if json:
        print_json({"good": not damage, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            print_line(f"{finding.kind}: {finding.where}: {finding.what}")
    if damage:
        raise CheckpointError(
            f"{len(damage)} of what is registered is not as it was",
            where=target.url,
            fix="restore what is named from a copy, or register the model again and move its aliases",
        )
    if not json:
        checked = sum(len(target.numbers(name)) for name in names) if numbers is None else len(numbers)
        notice(f"{checked} of {checked} versions verified" + (", with their signatures" if key else ""))


def _signature_findings(
    target: Registry, names: list[str], numbers: set[int] | None, key: Path, known: set[str]
) -> list[Finding]:
    """Return what is wrong with signatures of versions, except those that are known to be damaged."""
    found = []
    for name in names:
        for number in target.numbers(name) if numbers is None else sorted(numbers):
            if f"{name}@{number}" in known:
                continue
            try:
                problem = signature_problem(local_folder(resolve(Reference(name, number), target)), key)
            except HeadwayError as error:
                problem = error.what
            if problem:
                found.append(Finding("damage", f"{name}@{number}", problem))
    return found
