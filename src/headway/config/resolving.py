"""Completion of a config: values that follow from others, such as a model's shape from its preset, steps from tokens.

A resolved config is complete: running it again gives an identical run.
"""

from __future__ import annotations

from pathlib import Path

from headway.config.checks.contradictions import combined, find_problems
from headway.config.derived.experts import resolved_balance
from headway.config.schema import Config
from headway.config.sections.data import TokenizerConfig, given_tokenizer, named_sources
from headway.config.sections.model import ModelConfig


def resolve(config: Config, trains: bool = True) -> Config:
    """Complete a config: tokens become steps, the store gets its path from the name, the tokenizer is that of the
    model to continue, and so on.

    Args:
        trains: The config must give the length of training; otherwise `train.steps` may stay open.

    Raises:
        ConfigError: parts of the config contradict each other, or neither steps nor tokens is given.
    """
    problems = find_problems(config, trains)
    if problems:
        raise combined(problems)
    train = config.train
    if config.task is not None:  # it has neither a token store nor a decoder
        return config.model_copy(update={"train": train.in_whole_steps(), "optimizer": config.optimizer.completed()})
    model = config.model
    if model.from_pretrained is None:
        assert model.dim and model.heads
        follows = {
            "kv_heads": model.kv_heads or model.heads,
            "head_dim": model.head_dim or model.dim // model.heads,
            **resolved_balance(model),
        }
        # These keys stay unset: if `override` changes the shape, other values follow from it.
        model = ModelConfig.model_construct(set(model.model_fields_set), **{**dict(model), **follows})
    store = Path(str(config.data.store).replace("{name}", config.name))
    tokenizer = config.data.tokenizer
    if tokenizer.path is None:  # unset for `override`, as above
        values = {**dict(tokenizer), "path": given_tokenizer(config.data, model.from_pretrained)}
        tokenizer = TokenizerConfig.model_construct(set(tokenizer.model_fields_set), **values)
    sources = named_sources(config.data.sources)
    data = config.data.model_copy(update={"sources": sources, "store": store, "tokenizer": tokenizer})
    completed = {"train": train.in_whole_steps(), "model": model, "data": data}
    return config.model_copy(update={**completed, "optimizer": config.optimizer.completed()})
