"""`headway registry`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.config.arguments import StorageOption
from headway.core.command_line import DtypeOption, JsonOption, RegistryOption, StepOption, print_json, print_table
from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.core.user_command import suggest_next
from headway.models.versions import Reference, resolve
from headway.registry.aliases import check_alias, next_change, put_change, refusal
from headway.registry.cli import looking, sending
from headway.registry.cli.options import VersionArgument, moment, open_named, summary
from headway.registry.files import files_to_register
from headway.registry.gate import GATED, GateSettings, as_record, run_gate
from headway.registry.publish import register as publish
from headway.registry.signing import signed
from headway.registry.who import audit

if TYPE_CHECKING:
    from headway.models.versions import AliasChange, Registry
    from headway.registry.gate import Check

HELP = """Keep versions of trained models with their evidence: a registry in a folder or an object store.

A version has a number, and aliases such as prod name one. Versions never change. There is no server.

[bold]Examples[/bold]

headway registry add runs/quickstart --name my-model
headway registry alias my-model@1 prod
headway registry list
headway registry show my-model@prod
headway registry verify

The registry is --registry, or the environment variable HEADWAY_REGISTRY, or the folder registry.
"""

registry = typer.Typer(no_args_is_help=True, help=HELP)


@registry.command()
def add(
    model: Annotated[str, typer.Argument(metavar="RUN|FOLDER|hf://ORG/NAME", help="What to register.")],
    *,
    name: Annotated[str, typer.Option(help="Name of the model.")],
    place: RegistryOption = None,
    option: StorageOption = None,
    step: StepOption = None,
    best: Annotated[
        bool, typer.Option("--best", help="Take the run's best checkpoint by checkpoint.keep_metric.")
    ] = False,
    dtype: DtypeOption = "fp32",
    merge: Annotated[bool, typer.Option("--merge", help="Merge a run's adapter into its model.")] = False,
    benchmarks: Annotated[Path | None, typer.Option(help="Results of headway benchmark --json to add.")] = None,
    licence: Annotated[str | None, typer.Option("--licence", "--license", help="Identifier of SPDX.")] = None,
    parent: Annotated[str | None, typer.Option(help="Version or model that this one continues.")] = None,
    sign: Annotated[
        Path | None,
        typer.Option(metavar="PEM", help="Private key to sign with (OpenSSF model-signing)."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Register a run's newest checkpoint, a folder of Hugging Face, or a model of the Hub, with the next number.

    A run is exported first. No code of the model runs, and nothing is unpickled. When the command is killed, nothing
    is registered, and the same command completes it. The same model from the same source is registered once.

    [bold]Examples[/bold]

    headway registry add runs/quickstart --name my-model
    headway registry add runs/quickstart --name my-model --best --sign key.pem
    headway registry add my-export --name my-model --registry s3://bucket/registry
    """
    from headway.registry.sources import ExportOptions, gathered, with_benchmarks

    if best and step is not None:
        raise ConfigError("two checkpoints are named", where="--best, --step", fix="give one of them")
    target = open_named(place, option)
    target.check_model(name)
    with gathered(model, ExportOptions(step, best, dtype, merge)) as found:
        files, left_out = files_to_register(found.folder)
        if benchmarks is not None:
            found = with_benchmarks(found, benchmarks)
        found = replace(found, parent=parent or found.parent, licence=licence or found.licence)
        with nullcontext(files) if sign is None else signed(files, sign) as all_files:
            version, is_new = publish(target, name, found, all_files)
    if is_new:
        audit(target, name, "registry add", version=version.number, manifest_sha256=version.sha256, model=model)
    if json:
        print_json({**summary(version), "new": is_new, "left_out": left_out})
        return
    if left_out:
        notice(f"not registered: {', '.join(left_out)}")
    notice(f"registered {version} in {target.url}" if is_new else f"{version} is registered already")
    suggest_next(("registry", "alias", str(version), "candidate", "name it"))


@registry.command()
def alias(
    version: VersionArgument,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="prod, candidate, ...")],
    *,
    place: RegistryOption = None,
    option: StorageOption = None,
    margin: Annotated[str, typer.Option(help="For prod: how much worse the loss may be than the present one's.")] = (
        "1%"
    ),
    data: Annotated[
        str | None,
        typer.Option(help="For prod: token store to compare on; that of the run when not given."),
    ] = None,
    force: Annotated[
        str | None,
        typer.Option("--force", metavar="REASON", help="Set it although a check fails; recorded."),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias; its history stays.")] = False,
    json: JsonOption = False,
) -> None:
    """Let an alias name a version. For a name without a version, print the alias's history.

    prod has a gate: every file verifies, the ledger is proven, and compared with the version that it names now no
    benchmark is below, and the loss is not worse by more than the margin (headway compare).

    [bold]Examples[/bold]

    headway registry alias my-model@3 candidate
    headway registry alias my-model@3 prod --margin 1%
    headway registry alias my-model@2 prod --force "rollback: 3 answers in French"
    headway registry alias my-model prod
    headway registry alias my-model candidate --remove

    Exit codes: 0 set, 2 refused by the gate or changed meanwhile, 4 a record is damaged.
    """
    check_alias(alias)
    target = open_named(place, option)
    wanted = Reference.parse(version)
    name = wanted.name
    before = target.present(name, alias)
    if not remove and version == name:
        _print_history(target, name, alias, json)
        return
    if remove:
        if before is None or before.number is None:
            raise target.unknown(name, f"alias '{alias}'", [f"@{one}" for one in target.aliases(name)])
        put_change(target, next_change(before, name, alias, None, forced=force))
        audit(target, name, "registry alias", alias=alias, version=None)
        notice(f"{name}@{alias} is removed")
        return
    found = resolve(wanted, target)
    if before is not None and before.version_sha256 == found.manifest_hash:
        notice(f"{name}@{alias} names version {found.number} already")
        return
    checks: list[Check] = []
    if alias in GATED:
        checks = run_gate(found, before, GateSettings(margin, data))
        if not json:
            print_table(["CHECK", "RESULT", ""], [[one.name, _passed(one), one.what] for one in checks])
        if not all(check.passed for check in checks) and force is None:
            raise refusal(str(found.version), alias, checks)
    change = next_change(before, name, alias, found.version, checks=as_record(checks), forced=force)
    put_change(target, change)
    audit(target, name, "registry alias", alias=alias, version=found.number, forced=force)
    if json:
        print_json(asdict(change))
    else:
        notice(f"{name}@{alias} names version {found.number}")


def _passed(check: Check) -> str:
    return "passed" if check.passed else "failed"


def _print_history(target: Registry, name: str, alias: str, json: bool) -> None:
    found = [change for number in target.changes(name, alias) if (change := target.change(name, alias, number))]
    if not found:
        raise target.unknown(name, f"alias '{alias}'", [f"@{one}" for one in target.aliases(name)])
    if json:
        print_json([asdict(change) for change in found])
        return
    rows = [[str(one.change), str(one.number or "removed"), moment(one.time), one.by, _why(one)] for one in found]
    print_table(["CHANGE", "VERSION", "SET", "BY", "CHECKS"], rows, numeric=(0, 1))


def _why(change: AliasChange) -> str:
    failed = [name for name, check in change.checks.items() if isinstance(check, dict) and not check.get("passed")]
    words = [f"failed: {', '.join(failed)}"] if failed else []
    words += [f"passed: {', '.join(change.checks)}"] if change.checks and not failed else []
    return "; ".join([*words, *([f"forced: {change.forced}"] if change.forced else [])])


registry.command("list")(looking.list_)
for command in (looking.show, looking.card, looking.verify, sending.pull, sending.push):
    registry.command()(command)
