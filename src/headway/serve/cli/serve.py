"""`headway serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from headway.config.arguments import StorageOption, storage_options
from headway.core.command_line import (
    DefaultVerb,
    JsonOption,
    RegistryOption,
    StepOption,
    print_json,
    print_table,
    writing,
)
from headway.core.console import notice, print_line
from headway.core.errors import ConfigError, needing
from headway.core.exposure import tls_pair
from headway.core.files.atomic import write_text
from headway.serve.experiment.journal import Plan
from headway.serve.experiment.planning import Assumed
from headway.serve.experiment.planning import plan as simulated
from headway.serve.experiment.report import headline, page, table_of
from headway.serve.experiment.report import report as read
from headway.serve.experiment.sequential import SequentialTest
from headway.serve.experiment.split import Split
from headway.serve.options import EngineOptions, Limits, Place, ServerOptions, Source

HELP = """Serve a trained model with OpenAI's interface, and try one version against another.

The verb run may be left out.

[bold]Examples[/bold]

headway serve runs/quickstart
headway serve my-model@prod --registry s3://bucket/models --port 9000
headway serve my-model --split prod=90,candidate=10 --experiment trials/one
headway serve plan --split prod=90,new=10 --base-rate 0.3 --difference 0.02
headway serve report trials/one
"""
_RUN_HELP = """Serve a trained model with OpenAI's interface: completions and chat, streamed or whole.

Replies are those of headway generate and headway chat with the same seed, however many are computed at once. Requests
need a key (HEADWAY_API_KEY or HEADWAY_API_KEY_FILE) where one is set; beyond this machine a key and TLS are required.
A model that is named by an alias of a registry is followed: another version is loaded beside it and takes over.

With --split, two aliases of a model share the requests by their user. Clients post outcomes, and the worse alias is
stopped once a test that may always be looked at says so.

[bold]Examples[/bold]

headway serve runs/quickstart
HEADWAY_API_KEY_FILE=key.txt headway serve runs/my-chat --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
headway serve my-model --split prod=90,candidate=10 --experiment trials/one
"""

serve = typer.Typer(cls=DefaultVerb, no_args_is_help=True, help=HELP, subcommand_metavar="MODEL|COMMAND [ARGS]...")
EffectOption = Annotated[
    float, typer.Option(min=0.0001, max=1.0, help="Difference of the shares of successes that matters.")
]
AlphaOption = Annotated[
    float, typer.Option(min=0.0001, max=0.5, help="Largest probability of a decision without a difference.")
]


def plan(
    split: Annotated[str, typer.Option(help="Two aliases with their shares.")] = "prod=90,candidate=10",
    *,
    base_rate: Annotated[float, typer.Option(help="Share of successes of the first alias.")],
    difference: Annotated[float, typer.Option(help="How much more the second one has; may be negative.")] = 0.02,
    effect: EffectOption = 0.02,
    alpha: AlphaOption = 0.05,
    horizon: Annotated[int, typer.Option(min=100, max=10**7, help="Outcomes after which it is given up.")] = 200_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulation.")] = 0,
    json: JsonOption = False,
) -> None:
    """Simulate experiments, and print how many outcomes a decision takes.

    [bold]Examples[/bold]

    headway serve plan --base-rate 0.3
    headway serve plan --split prod=50,new=50 --base-rate 0.02 --json
    """
    found = simulated(Split.parse(split), SequentialTest(effect, alpha), Assumed(base_rate, difference, horizon, seed))
    if json:
        print_json(found)
        return
    outcomes = found["outcomes"]
    rates = " and ".join(f"{arm} {rate:.1%}" for arm, rate in found["rates"].items())
    print_line(f"with {rates} of successes, in {found['experiments']} simulated experiments:")
    print_line(f"  decided after {outcomes['median']:,} outcomes (median), {outcomes['mean']:,.0f} (mean)")
    print_line(f"  90 % of them between {outcomes['low']:,} and {outcomes['high']:,} outcomes")
    print_line(f"  decided within {found['horizon']:,} outcomes: {found['decided']:.1%}")
    print_line(f"without a difference, decided all the same: {found['false_alarms']:.1%}")


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    *,
    output: Annotated[Path | None, typer.Option(help="Write a page (HTML) to this file.")] = None,
    json: JsonOption = False,
) -> None:
    """Show what an experiment has decided, when and why. It may be running.

    [bold]Examples[/bold]

    headway serve report trials/one
    headway serve report trials/one --output report.html
    headway serve report trials/one --json
    """
    found = read(folder)
    if output is not None:
        with writing(output):
            write_text(output, page(found))
        notice(f"wrote {output}")
    if json:
        print_json(found)
        return
    print_line(headline(found))
    headers, rows = table_of(found)
    print_table(headers, rows, numeric=range(2, 7))


@serve.command(help=_RUN_HELP)
def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Run directory, Hugging Face folder, or NAME@ALIAS of a registry; NAME with --split."
        ),
    ],
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; the default serves this machine only.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="Name that clients ask for; that of MODEL when not given.")] = None,
    registry: RegistryOption = None,
    option: StorageOption = None,
    step: StepOption = None,
    engine: Annotated[
        Literal["auto", "headway", "vllm"],
        typer.Option(help="What computes: vLLM where it is installed, else this program."),
    ] = "auto",
    engine_option: Annotated[
        list[str] | None,
        typer.Option(help="One more argument of vLLM, as --engine-option=--dtype=bfloat16."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Most sequences in a step; a power of two.", min=1, max=256)] = 32,
    exact: Annotated[
        bool,
        typer.Option(
            help="Keep the bits of a sequence alone. --no-exact is faster; then near ties may be drawn otherwise."
        ),
    ] = True,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a reply.", min=1)] = 4096,
    concurrency: Annotated[int, typer.Option(help="Requests at once; more get 429.", min=1, max=10_000)] = 128,
    body_bytes: Annotated[int, typer.Option(help="Largest body of a request.", min=1024, max=2**26)] = 4 * 2**20,
    request_seconds: Annotated[float, typer.Option(help="Longest time of a reply.", min=1)] = 600.0,
    drain_seconds: Annotated[
        float, typer.Option(help="Time after SIGTERM in which requests are still taken.", min=0)
    ] = 5.0,
    follow_seconds: Annotated[float, typer.Option(help="Time between two looks at an alias.", min=0.1)] = 10.0,
    split: Annotated[
        str | None,
        typer.Option(help="Two aliases of MODEL with their shares: prod=90,candidate=10."),
    ] = None,
    experiment: Annotated[Path | None, typer.Option(help="Folder of the experiment, with --split.")] = None,
    effect: EffectOption = 0.02,
    alpha: AlphaOption = 0.05,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of the server (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the certificate (PEM).")] = None,
) -> None:
    """Run `headway serve`."""
    _check_installed()
    from headway.serve.run import serve_model
    from headway.serve.trial import serve_experiment

    if batch & (batch - 1):
        raise ConfigError(f"{batch} is no power of two", where="--batch", fix="--batch 32")
    tls = tls_pair(tls_cert, tls_key)
    source = Source(model, step, registry, storage_options(option, registry), name)
    options = EngineOptions(engine, batch, exact, max_tokens, tuple(engine_option or ()))
    server = ServerOptions(
        Place(host.strip("[]"), port, tls),
        Limits(concurrency, body_bytes, request_seconds),
        drain_seconds,
        follow_seconds,
    )
    if split is None and experiment is None:
        serve_model(source, options, server)
        return
    if split is None or experiment is None:
        there = "--split" if experiment is None else "--experiment"
        raise ConfigError(
            "an experiment needs shares and a folder", where=there, fix="--split prod=90,candidate=10 --experiment DIR"
        )
    trial = Plan(source.served_name, Split.parse(split), SequentialTest(effect, alpha))
    serve_experiment(trial, experiment, source, options, server=server)


def _check_installed() -> None:
    """Check that the packages of the extra are installed.

    Raises:
        ConfigError: one is missing.
    """
    for package in ("starlette", "uvicorn", "prometheus_client"):
        with needing(package.replace("_", "-"), "serve", "models are served"):
            __import__(package)


serve.command()(plan)
serve.command()(report)
