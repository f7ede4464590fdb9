"""Checks of what a run needs besides its data and its run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

from headway.config import Config, find_strategy
from headway.config.checks.contradictions import combined
from headway.config.optimizers import DEFAULT_OPTIMIZER, TORCHAO, find_optimizer
from headway.config.strategies import AUTO
from headway.core.errors import ConfigError, HeadwayError
from headway.core.functions import identify_function
from headway.core.hub import is_on_hub
from headway.core.storage import check_filesystem
from headway.models.build import build_without_memory
from headway.models.hub.sizes import model_without_weights
from headway.parallel.tensor import plan_of
from headway.parallel.world import pick_device
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import RunOptions
from headway.run.session.checks import check_keys_present
from headway.training.evaluation.benchmarks import check_installed
from headway.training.job import load_callbacks
from headway.training.setup.available import FLASH, check_attention, check_available
from headway.training.setup.model_proofs import prove_class
from headway.training.setup.torchao_import import missing_package


@dataclass
class Problems:
    """The errors that checks have raised."""

    errors: list[HeadwayError] = field(default_factory=list)

    def of(self, check: Callable[[], object]) -> None:
        with self.collecting():
            check()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except HeadwayError as error:
            if error.what not in {known.what for known in self.errors}:
                self.errors.append(error)

    def report(self) -> None:
        """Raise the only error as it is, and several as one of a config.

        Raises:
            HeadwayError: there are errors.
        """
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise combined([ConfigError(error.what, where=error.where, fix=error.fix) for error in self.errors])


def check_apart(config: Config, options: RunOptions, *, here: bool = True) -> None:
    """Check by a small model that a class of transformers tells packed documents apart, if `data.document_mask` asks.

    A run that has begun has proven it, and its checkpoints know that. An attempt does not ask: it has the weights in
    a moment, and its process may still be copied, which it could not once it has computed.

    Args:
        config: With the shape of its model.
        options: What to do about an earlier run of this name.
        here: Whether the run would be on this machine; otherwise the CPU is asked.

    Raises:
        ConfigError: it does not.
    """
    if config.model.implementation != "transformers" or not config.data.document_mask:
        return
    continues = RunDirectory(config.run_directory).has_begun() and not options.restart
    is_there = here or not asks_the_hub(config)
    if is_there and not continues:
        prove_class(config.model, pick_device(config.train.device if here else "cpu"))


def check_parts(config: Config, *, makes_callbacks: bool = True) -> None:
    """Check everything that a run on this machine needs besides its data and its run directory.

    These are packages, devices, keys, functions and classes that the config names, and how its model is cut.

    Args:
        config: Resolved, with the shape of its model.
        makes_callbacks: Make the callbacks that the config names; not where this process is about to do that.

    Raises:
        HeadwayError: with every problem that was found.
    """
    found = Problems()
    find_problems(config, found, here=True)
    if makes_callbacks:
        found.of(lambda: load_callbacks(config.callbacks))
    found.report()


def find_problems(config: Config, found: Problems, here: bool) -> None:
    """Find what `check_parts` checks, but for callbacks; devices only if the run would be on this machine."""
    found.of(lambda: check_installed_for(config))
    if here:
        found.of(lambda: _check_available(config))
    found.of(lambda: check_keys_present(config.checkpoint))
    if config.loss is not None:
        found.of(lambda: identify_function(config.loss or "", "loss"))
    if config.parallel.tensor > 1 and config.task is None:
        found.of(lambda: _check_is_cut(config))


def check_installed_for(config: Config) -> None:
    """Check that the libraries which a config needs are installed.

    Raises:
        ConfigError: one is not.
    """
    optimizer = config.optimizer
    package = find_strategy(config.parallel.strategy).needs
    if package is not None and find_spec(package.module) is None:
        raise missing_package(package, f"strategy '{config.parallel.strategy}'", "parallel.strategy", AUTO)
    package = find_optimizer(optimizer.name).needs
    if package is not None and find_spec(package.module) is None:
        raise missing_package(package, f"optimizer '{optimizer.name}'", "optimizer.name", DEFAULT_OPTIMIZER)
    attention = config.model.attention
    if attention in FLASH and find_spec(FLASH[attention][0]) is None:
        raise ConfigError(
            f"attention '{attention}' needs the package {FLASH[attention][1]}, which is not installed",
            where="model.attention",
            fix=f"install {FLASH[attention][1]} for this GPU and PyTorch, or model.attention=sdpa",
        )
    if config.train.precision == "fp8" and find_spec(TORCHAO.module) is None:
        raise missing_package(TORCHAO, "precision 'fp8'", "train.precision", "bf16")
    if config.evaluation.benchmarks is not None:
        check_installed()
    if config.checkpoint.remote is not None:
        check_filesystem(config.checkpoint.remote.url, "checkpoint.remote.url:")
    if config.data.remote is not None:
        check_filesystem(config.data.remote, "data.remote:")


def _check_available(config: Config) -> None:
    """Check what this machine lacks (`check_available`)."""
    strategy = find_strategy(config.parallel.strategy)
    device = pick_device(config.train.device)
    check_available(config.train, config.optimizer, strategy, device)
    check_attention(config.model.attention, config.train.precision, device)


def asks_the_hub(config: Config) -> bool:
    teacher = None if config.distill is None else config.distill.teacher
    return is_on_hub(config.model.from_pretrained) or is_on_hub(teacher)


def _check_is_cut(config: Config) -> None:
    """Check that the class of the model says how workers share its matrices.

    Raises:
        ConfigError: it does not, or not for this number of workers.
    """
    if config.model.implementation == "transformers":
        plan_of(model_without_weights(config.model), config.parallel.tensor)
    elif config.model.vocab_size is not None:  # otherwise it follows from a vocabulary that could not be read
        shape = config.model.model_copy(update={"from_pretrained": None})
        model, _ = build_without_memory(shape, vocab_size=config.model.vocab_size, seed=0)
        plan_of(model, config.parallel.tensor)
