"""`headway tokenizer`: train a vocabulary, and look into one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.common import ConfigArgument, JsonOption, OverridesArgument, as_utf8, load, print_json, writing

if TYPE_CHECKING:
    from headway.data.tokenizer import Tokenizer

tokenizer = typer.Typer(no_args_is_help=True, help="Train a tokenizer, and look into one.")

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
    """Train a byte-level BPE on a config's sources, as `headway data prepare` does by itself.

    To use it for several stores, set data.tokenizer.path to the folder.

    [bold]Examples[/bold]

    headway tokenizer train run.yaml data.tokenizer.vocab_size=32768 --output tokenizers/code-32k
    """
    from headway.data.sources import find_sources
    from headway.data.tokenizer import train_tokenizer

    settings = load(config, overrides).data
    trained = train_tokenizer(
        find_sources(settings.sources), settings.tokenizer.vocab_size, settings.tokenizer.training_bytes
    )
    with writing(output):
        trained.save(output)
    facts = _facts(trained, str(output))
    if json:
        print_json(facts)
    else:
        _print_facts(facts)


@tokenizer.command()
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH|CONFIG",
            help="A tokenizer.json, a folder with one, a token store, or YAML file of a run.",
            show_default=False,
        ),
    ],
    overrides: OverridesArgument = None,
    text: Annotated[str | None, typer.Option("--text", help="Show how this text is split.")] = None,
    json: JsonOption = False,
) -> None:
    """Show vocabulary size, special tokens, and bytes per token of --text, or of a sample of a config's sources.

    [bold]Examples[/bold]

    headway tokenizer inspect data/quickstart --text "def main():"
    headway tokenizer inspect run.yaml
    """
    from headway.data.sources import find_sources
    from headway.data.tokenizer import Tokenizer, sample_text

    sample = [as_utf8(text, "--text")] if text is not None else []
    if not path.is_dir() and path.suffix != ".json":
        settings = load(path, overrides).data
        sample = sample or list(sample_text(find_sources(settings.sources), _SAMPLE_BYTES))
        path = settings.tokenizer.path or settings.store
    loaded = Tokenizer.load(path)
    facts = _facts(loaded, str(path)) | _measured(loaded, sample)
    if text is not None:
        facts["tokens"] = [[number, loaded.decode([number])] for number in loaded.encode_batch([text])[0]]
    if json:
        print_json(facts)
    else:
        _print_facts(facts)


def _facts(loaded: Tokenizer, where: str) -> dict[str, Any]:
    return {
        "tokenizer": where,
        "vocab_size": loaded.vocab_size,
        "end_of_text": loaded.end_of_text,
        "special_tokens": loaded.special_tokens,
        "fingerprint": loaded.fingerprint,
    }


def _measured(loaded: Tokenizer, texts: list[str]) -> dict[str, Any]:
    count = sum(map(len, loaded.encode_arrays(texts)))
    size = sum(len(text.encode()) for text in texts)
    return {"sample_bytes": size, "bytes_per_token": size / count} if count else {}


def _print_facts(facts: dict[str, Any]) -> None:
    special = ", ".join(f"{token} ({number})" for token, number in facts["special_tokens"].items())
    print(f"tokenizer        {facts['tokenizer']}")
    print(f"vocabulary       {facts['vocab_size']:,} token ids")
    print(f"end of text      {facts['end_of_text']}")
    print(f"special tokens   {special or 'none'}")
    print(f"fingerprint      {facts['fingerprint']}")
    if "bytes_per_token" in facts:
        print(f"bytes per token  {facts['bytes_per_token']:.2f} on {facts['sample_bytes']:,} bytes")
    if "tokens" in facts:
        print("tokens           " + " ".join(f"{number}:{text!r}" for number, text in facts["tokens"]))


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.add_typer(tokenizer, name="tokenizer")
