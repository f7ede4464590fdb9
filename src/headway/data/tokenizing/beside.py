"""What the files next to a given tokenizer say: its chat template, and settings for users of its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.core.console import notice
from headway.core.errors import DataError
from headway.core.files.foreign import read_text
from headway.core.files.scratch import scratch_folder
from headway.data.tokenizing.chat import ChatEncoder
from headway.data.tokenizing.settings_files import LISTS
from headway.data.tokenizing.tokenizer import Tokenizer

#: Settings that are copied unchanged from the files next to tokenizer.json.
_SETTINGS = ("chat_template", "model_max_length", "padding_side", "truncation_side", "model_input_names")


def chat_encoder(tokenizer: Tokenizer, special_tokens_in_text: bool, dated: bool = False) -> ChatEncoder:
    """Open the encoder of conversations for a given tokenizer, as its store would have it.

    Args:
        tokenizer: Of any format.
        special_tokens_in_text: As for `ChatEncoder`.
        dated: As for `ChatEncoder`.

    Raises:
        ConfigError: transformers is not installed, or there is no chat template.
        DataError: transformers cannot load the tokenizer.
    """
    with scratch_folder("headway-chat-") as folder:
        tokenizer.save(folder, settings_beside(tokenizer))
        return ChatEncoder(folder, tokenizer, tokenizer.where, special_tokens_in_text, dated)


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Return whether the files next to a tokenizer hold a chat template."""
    return bool(tokenizer.settings.values.get("chat_template")) or _template_file(tokenizer).is_file()


def _template_file(tokenizer: Tokenizer) -> Path:
    return Path(tokenizer.where).with_name("chat_template.jinja")


def settings_beside(tokenizer: Tokenizer) -> dict[str, Any]:
    """Collect the settings in the files next to a given tokenizer, for users of a model trained with it.

    The tokenizer class is omitted: it could tokenize a text differently than tokenizer.json does. Tokens without an id
    are omitted too: they would get an id that the model's embedding lacks.
    """
    given = tokenizer.settings
    settings = {key: given.values[key] for key in _SETTINGS if given.values.get(key) is not None}
    settings |= {key: token for key, token in given.roles().items() if key not in tokenizer.unknown_roles}
    settings |= {key: given.listed(key) for key in LISTS if isinstance(given.values.get(key), list)}
    settings |= {key: given.values[key] for key in LISTS if isinstance(given.values.get(key), dict)}
    if tokenizer.unknown_roles:
        names = ", ".join(f"{key} ({token!r})" for key, token in tokenizer.unknown_roles.items())
        notice(f"the files next to the tokenizer name tokens that it does not have; they are left out: {names}")
    template = _template_file(tokenizer)
    try:
        settings["chat_template"] = read_text(template)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        fix = "repair or remove it"
        raise DataError(f"the chat template cannot be read: it {reason}", where=str(template), fix=fix) from None
    return settings
