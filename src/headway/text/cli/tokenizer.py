"""`headway tokenizer`: train a tokenizer, inspect one, compare several. `cli.models.tokenizer` adds `extend`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.config.arguments import ConfigArgument, OverridesArgument, load_text
from headway.config.units import Bytes
from headway.core.command_line import JsonOption, as_utf8, print_json, print_table, writing
from headway.core.console import exact_results, notice, print_line
from headway.core.errors import ConfigError, DataError
from headway.core.user_command import suggest
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.reading.sources import find_sources
from headway.text.tokenizing.statistics import measure
from headway.text.tokenizing.train import sample_text, train_tokenizer

if TYPE_CHECKING:
    from headway.config.sections.data import DataConfig
    from headway.text.tokenizing.statistics import TokenizerFigures

tokenizer = typer.Typer(no_args_is_help=True, help="Train a tokenizer, inspect, compare or extend one.")

_SAMPLE_BYTES = 1_000_000


@tokenizer.command()
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for tokenizer.json and tokenizer_config.json.")
    ] = Path("tokenizer"),
    json: JsonOption = False,
) -> None:
    """Train a byte-level BPE on the sources of a config, as `headway data prepare` does by default.

    To share it between stores, set data.tokenizer.path to the folder.

    [bold]Examples[/bold]

    headway tokenizer train run.yaml data.tokenizer.vocab_size=32k -o code-32k

    headway tokenizer train run.yaml data.tokenizer.pattern=llama3 -o llama3-like
    """
    settings = load_text(config, overrides, trains=False).data
    wanted = settings.tokenizer
    sources = find_sources(settings.sources, most=settings.max_document_bytes)
    trained, _ = train_tokenizer(sources, wanted.vocab_size, wanted.training_bytes, wanted.pattern)
    _check_trained(trained, wanted.vocab_size)
    with writing(output):
        trained.save(output)
    facts = _facts(trained, str(output))
    with exact_results():
        if json:
            print_json(facts)
        else:
            _print_facts(facts)


def _check_trained(trained: Tokenizer, asked: int) -> None:
    """Check that a tokenizer has learnt any tokens, and print a notice if they are fewer than asked for.

    Raises:
        DataError: it has nothing but `<|endoftext|>` and the 256 bytes.
    """
    if trained.vocab_size <= 257:
        raise DataError(
            "there is no text to train a tokenizer on, or nothing in it repeats",
            where="data.sources",
            fix=f"{suggest('data prepare', '--dry-run')} lists what is read",
        )
    if trained.vocab_size < asked:
        notice(f"{trained.vocab_size:,} tokens instead of {asked:,}: the text has no more repeated sequences")


@tokenizer.command()
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH|CONFIG",
            help="A tokenizer (tokenizer.json, .model, .tiktoken, a folder, a token store), or YAML file of a run.",
        ),
    ],
    overrides: OverridesArgument = None,
    text: Annotated[str | None, typer.Option("--text", help="Show how this text is split.")] = None,
    json: JsonOption = False,
) -> None:
    """Show vocabulary size, special tokens, and bytes per token on --text, or on a sample of a config's sources.

    [bold]Examples[/bold]

    headway tokenizer inspect data/quickstart --text "def main():"

    headway tokenizer inspect tokenizer.model

    headway tokenizer inspect run.yaml
    """
    sample = [as_utf8(text, "--text")] if text is not None else []
    special = False
    if not path.is_dir() and path.suffix in (".yaml", ".yml"):
        settings = load_text(path, overrides, trains=False).data
        sample = sample or list(
            sample_text(find_sources(settings.sources, most=settings.max_document_bytes), _SAMPLE_BYTES)
        )
        loaded, place = _load_own(settings)
        special = settings.tokenizer.special_tokens_in_text
    else:
        loaded = Tokenizer.load(path, _pattern_of(overrides or []))
        place = str(path)
    ids = loaded.encode_arrays(sample, special_tokens_in_text=special)
    facts = _facts(loaded, place)
    if count := sum(map(len, ids)):
        size = sum(len(part.encode()) for part in sample)
        facts |= {"sample_bytes": size, "bytes_per_token": size / count}
    if text is not None:
        facts["tokens"] = [[number, loaded.decode([number], skip_special_tokens=False)] for number in ids[0].tolist()]
    with exact_results():
        if json:
            print_json(facts)
        else:
            _print_facts(facts)


def _pattern_of(overrides: list[str]) -> str | None:
    """Return the only override that applies to a tokenizer without a config, the pattern.

    Raises:
        ConfigError: other overrides are given.
    """
    settings = dict(override.partition("=")[::2] for override in overrides)
    pattern = settings.pop("data.tokenizer.pattern", None)
    if settings:
        raise ConfigError(
            f"{next(iter(settings))} does not apply to a tokenizer without a config",
            where=" ".join(overrides),
            fix="give a config's YAML file, or data.tokenizer.pattern for a .tiktoken file",
        )
    return pattern


@tokenizer.command()
def compare(
    config: ConfigArgument,
    tokenizers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH|KEY=VALUE",
            help="Tokenizers: files or folders of any format, token stores; and overrides. "
            "The config's own tokenizer when none is given.",
        ),
    ] = None,
    sample: Annotated[
        str, typer.Option("--sample", help="Size of the sample, an equal share from each source.")
    ] = "4 MB",
    json: JsonOption = False,
) -> None:
    """Compare tokenizers on a config's sources: tokens, fertility, unknown and unused tokens, speed, lost text.

    [bold]Examples[/bold]

    headway tokenizer compare run.yaml

    headway tokenizer compare run.yaml ours tokenizer.model cl100k_base.tiktoken

    headway tokenizer compare run.yaml data/first data/second --sample "20 MB"
    """
    given = tokenizers or []
    paths = [argument for argument in given if "=" not in argument or Path(argument).exists()]
    overrides = [argument for argument in given if argument not in paths]
    settings = load_text(config, overrides, trains=False).data
    sources = find_sources(settings.sources, most=settings.max_document_bytes)
    share = _bytes(sample) // len(sources)
    samples = {source.name: list(sample_text([source], share)) for source in sources}
    loaded = [(str(Path(path)), Tokenizer.load(Path(path), settings.tokenizer.pattern)) for path in paths]
    if not loaded:
        own, place = _load_own(settings)
        loaded = [(place, own)]
    wanted = settings.tokenizer
    results = [(name, measure(one, samples, wanted.encoder, wanted.special_tokens_in_text)) for name, one in loaded]
    with exact_results():
        if json:
            print_json([{"tokenizer": name, **figures.to_json()} for name, figures in results])
        else:
            _print_comparison(results)


def _bytes(text: str) -> int:
    from pydantic import TypeAdapter, ValidationError

    try:
        return max(1, int(TypeAdapter(Bytes).validate_python(text)))
    except ValidationError as error:
        what = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(what, where="--sample", fix='give for example "4 MB"') from None


def _load_own(settings: DataConfig) -> tuple[Tokenizer, str]:
    """Load a config's tokenizer, the given one or that of its store; return it with its place."""
    path = settings.tokenizer.path or settings.store
    return Tokenizer.load(path, settings.tokenizer.pattern), str(path)


def _facts(loaded: Tokenizer, where: str) -> dict[str, Any]:
    return {
        "tokenizer": where,
        "vocab_size": loaded.vocab_size,
        "begin_of_text": list(loaded.begin_of_text()),
        "end_of_text": loaded.end_of_text,
        "special_tokens": loaded.special_tokens,
        "fingerprint": loaded.fingerprint,
    }


def _print_facts(facts: dict[str, Any]) -> None:
    special = [f"{token} ({number})" for token, number in facts["special_tokens"].items()]
    more = f", and {len(special) - 10:,} more" if len(special) > 10 else ""
    print_line(f"tokenizer        {facts['tokenizer']}")
    print_line(f"vocabulary       {facts['vocab_size']:,} token ids")
    print_line(f"begin of text    {' '.join(facts['begin_of_text']) or 'none'}")
    print_line(f"end of text      {facts['end_of_text']}")
    print_line(f"special tokens   {', '.join(special[:10]) or 'none'}{more}")
    print_line(f"fingerprint      {facts['fingerprint']}")
    if "bytes_per_token" in facts:
        print_line(f"bytes per token  {facts['bytes_per_token']:.2f} on {facts['sample_bytes']:,} bytes")
    if "tokens" in facts:
        print_line("tokens           " + " ".join(f"{number}:{text!r}" for number, text in facts["tokens"]))


def _print_comparison(results: list[tuple[str, TokenizerFigures]]) -> None:
    rows = []
    for name, figures in results:
        parts = {**figures.sources, **({"all": figures.total} if len(figures.sources) > 1 else {})}
        for source, part in parts.items():
            unknown = f"{part.unknown / part.tokens:.3%}" if part.tokens else "n/a"
            rates = [f"{rate:.3f}" if rate is not None else "n/a" for rate in (part.bytes_per_token, part.fertility)]
            rows.append([name, source, f"{part.text_bytes:,}", f"{part.tokens:,}", *rates, unknown])
    headers = ["tokenizer", "source", "bytes", "tokens", "bytes/token", "tokens/word", "unknown"]
    print_table(headers, rows, numeric=range(2, 7))
    print_line()
    rows = [
        [
            name,
            f"{figures.vocab_size:,}",
            f"{figures.unused:,} ({figures.unused / figures.vocab_size:.0%})",
            figures.encoder,
            f"{figures.tokens_per_second / 1e6:.1f}M",
            f"{figures.round_trips:,} of {figures.round_trips_tried:,}",
        ]
        for name, figures in results
    ]
    headers = ["tokenizer", "vocabulary", "unused here", "encoder", "tokens/s", "texts that come back"]
    print_table(headers, rows, numeric=(1, 2, 4, 5))
    for name, figures in results:
        if figures.lost is not None:
            print_line()
            print_line(f"{name} does not give back {figures.lost!r}...")
