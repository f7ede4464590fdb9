"""A mixture of experts: how its loads are balanced, and the kinds of parallelism that it does not allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headway.config.derived.lanes import divisors, nearest
from headway.config.schema import Config
from headway.config.sections.model import division_problems
from headway.config.strategies import find_strategy, simplest_strategy
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.sections.model import ModelConfig

#: DeepSeek-V3, section 4.2, and the weights of Fedus et al. 2021, section 2.2, and Zoph et al. 2022, section 3.2.
_BIAS_RATE = 0.001
_BALANCE_LOSS = 0.01
_Z_LOSS = 0.001
#: Keys of `model` that say how loads are balanced.
BALANCE_KEYS = ("balance_bias_rate", "balance_loss", "router_z_loss")


def resolved_balance(model: ModelConfig) -> dict[str, float | None]:
    """Resolve the keys that balance experts, where they are not given.

    Softmax scores are balanced by the loss, since no softmax router of transformers has a bias. The experts of a
    pretrained model are balanced already, and trained by the cross-entropy alone.
    """
    given = {key: getattr(model, key) for key in BALANCE_KEYS}
    if model.experts is None:
        return given
    if model.from_pretrained is not None:
        found = dict.fromkeys(BALANCE_KEYS, 0.0)
    elif model.router_score == "sigmoid":
        found = {"balance_bias_rate": _BIAS_RATE, "balance_loss": 0.0, "router_z_loss": _Z_LOSS}
    else:
        found = {"balance_bias_rate": 0.0, "balance_loss": _BALANCE_LOSS, "router_z_loss": _Z_LOSS}
    return {key: found[key] if value is None else value for key, value in given.items()}


def balance_in_words(model: ModelConfig) -> str:
    """Say what the native decoder adds to the training of experts."""
    words = {
        "balance_loss": "the routers' load-balancing loss with weight {:g}",
        "router_z_loss": "their z-loss with weight {:g}",
        "balance_bias_rate": "a bias of each expert that moves by {:g} a step",
    }
    found = resolved_balance(model)
    added = [text.format(found[key]) for key, text in words.items() if found[key]]
    if not added:
        return f"nothing is added to the loss for the routers of experts (model.{', model.'.join(words)})"
    return f"added for the routers of experts: {', '.join(added)}"


def sharding_problems(config: Config, neighbours: int) -> Iterator[ConfigError]:
    """Yield why experts cannot be sharded over so many workers, whatever the model.

    Args:
        config: The config.
        neighbours: Workers with different tokens in one stage and one copy of the model: the data-parallel ones, times
            those that share rows by context or tensor parallelism.
    """
    workers = config.parallel.expert
    if workers == 1:
        return
    if neighbours % workers:
        yield ConfigError(
            f"experts cannot be sharded over {workers} of {neighbours} workers that have different tokens",
            where="parallel.expert, parallel.workers",
            fix=f"parallel.expert={nearest(workers, divisors(neighbours))}",
        )
    if config.determinism == "elastic":
        yield ConfigError(
            "determinism 'elastic' sums gradients lane by lane, but an expert multiplies the tokens of all its workers"
            " at once, so its sums depend on their number",
            where="determinism, parallel.expert",
            fix="determinism=run, or parallel.expert=1",
        )
    if config.optimizer.offload:
        sharding = simplest_strategy(lambda s: s.offloads_itself)
        yield ConfigError(
            "moments in host memory belong to whole parameters, but expert-parallel workers have parts of some",
            where="optimizer.offload, parallel.expert",
            fix=f"optimizer.offload=false, or parallel.expert=1 with parallel.strategy={sharding}",
        )
    if config.train.micro_batch == "auto":
        yield ConfigError(
            "the largest micro-batch cannot be tried with sharded experts: in every step the routers decide how many"
            " tokens a worker gets",
            where="train.micro_batch, parallel.expert",
            fix="train.micro_batch=1, or parallel.expert=1",
        )


def decoder_problems(config: Config) -> Iterator[ConfigError]:
    """Yield the problems of `parallel_problems`, for the native decoder with a complete shape."""
    if config.model.experts is None and config.parallel.expert > 1:
        yield ConfigError(
            f"the model has no experts that {config.parallel.expert} workers could share",
            where="parallel.expert, model.experts",
            fix="parallel.expert=1, or set model.experts",
        )
    yield from parallel_problems(config)
    yield from division_problems(config.model, config.parallel)


def parallel_problems(config: Config) -> Iterator[ConfigError]:
    """Yield the kinds of parallelism that a model with experts does not allow."""
    parallel = config.parallel
    experts = config.model.experts
    if experts is not None and experts % parallel.expert:
        yield ConfigError(
            f"{experts} experts cannot be shared evenly by {parallel.expert} workers",
            where="parallel.expert, model.experts",
            fix=f"parallel.expert={nearest(parallel.expert, divisors(experts))}",
        )
    strategy = find_strategy(parallel.strategy)
    if experts is not None and strategy.is_deepspeed:
        yield ConfigError(
            "the losses of routers enter the backward pass separately from the loss, which DeepSpeed would scale",
            where="model.experts, parallel.strategy",
            fix=f"parallel.strategy={strategy.counterpart}",
        )
    if experts is not None and not strategy.sums_gradients and parallel.tensor > parallel.expert:
        yield ConfigError(
            f"strategy '{strategy.name}' sums no gradients, but tensor-parallel workers have other tokens for the same"
            " experts",
            where="parallel.strategy, parallel.tensor, parallel.expert",
            fix=f"parallel.strategy=auto, or parallel.expert={parallel.tensor}",
        )
