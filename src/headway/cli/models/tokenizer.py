"""`headway tokenizer`: the verbs of the wing of text, and `extend`, which changes a model too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.core.command_line import JsonOption, as_utf8, print_json, writing
from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.cli.tokenizer import tokenizer

TokenOption = Annotated[
    list[str] | None,
    typer.Option("--token", "-t", help="A token that any text may contain; several are allowed."),
]
SpecialOption = Annotated[
    list[str] | None,
    typer.Option(
        "--special-token",
        "-s",
        help="A token for chat templates, which no text becomes.",
    ),
]


@tokenizer.command()
def extend(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face model.")],
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write.")],
    token: TokenOption = None,
    special_token: SpecialOption = None,
    json: JsonOption = False,
) -> None:
    """Add tokens to a pretrained model and its tokenizer, and write both as a new folder.

    A new token's rows in the embeddings and in the output projection are the means of the rows of its pieces, so it
    means what its text meant before. Train from the folder: model.from_pretrained. Needs the
    extra hf.

    [bold]Examples[/bold]

    headway tokenizer extend models/mine extended --special-token "<|tool|>"

    headway tokenizer extend models/mine extended -t naphthalene -t anthracene
    """
    from headway.models.hub.new_tokens import extend_vocabulary, with_new_tokens

    plain, special = (
        [as_utf8(name, option) for name in names or []]
        for names, option in ((token, "--token"), (special_token, "--special-token"))
    )
    old = Tokenizer.load(model)
    if not [*plain, *special]:
        raise ConfigError("no token is given", where="headway tokenizer extend", fix='--token "WORD"')
    tokens = dict.fromkeys(plain, False) | dict.fromkeys(special, True)
    for name in tokens:
        if name in old.added_tokens or name in old.special_tokens or not name.strip():
            what = f"the vocabulary has the token {name!r} already" if name.strip() else "a token has no text"
            raise ConfigError(what, where=old.where, fix="leave it out")
    ids = dict(zip(tokens, range(old.vocab_size, old.vocab_size + len(tokens)), strict=True))
    pieces = {ids[name]: old.encode_batch([name])[0] for name in tokens}
    empty = next((name for name in tokens if not pieces[ids[name]]), None)
    if empty is not None:
        raise ConfigError(f"the text of {empty!r} has no token, so no mean", where=old.where, fix="leave it out")
    with writing(output):
        extend_vocabulary(model, output, pieces, with_new_tokens(old.content, tokens, old.vocab_size))
    Tokenizer.load(output)
    if json:
        print_json({"folder": str(output), "vocab_size": old.vocab_size + len(tokens), "tokens": ids})
    else:
        named = ", ".join(f"{name} ({number})" for name, number in ids.items())
        notice(f"{output}: {old.vocab_size + len(tokens):,} token ids, new: {named}")
