"""The config of a run: its schema, its loader, and the values that follow from it."""

from headway.config.batches import Batches, BatchStage
from headway.config.checkpoint import CheckpointConfig, RemoteConfig, RetentionConfig
from headway.config.data import DataConfig, DedupConfig, MixtureConfig, SourceConfig, StageConfig, TokenizerConfig
from headway.config.health import HealthConfig
from headway.config.identity import changes, identity
from headway.config.ineffective import ineffective_settings
from headway.config.lanes import LaneGrid, resolve_lanes, resolve_threads
from headway.config.load import dump_config, load_config, load_resolved, override
from headway.config.mesh import MeshShape, crossing_groups, resolve_grid, resolve_mesh, usable_machines
from headway.config.optimizers import OptimizerSpec, find_optimizer
from headway.config.parallel import ParallelConfig
from headway.config.preemption import PreemptionConfig
from headway.config.schema import (
    Config,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TelemetryConfig,
    TrainConfig,
)
from headway.config.shapes import SHAPES
from headway.config.strategies import DEEPSPEED, StrategySpec, effective_strategy, find_strategy
from headway.config.units import Interval

__all__ = [
    "DEEPSPEED",
    "SHAPES",
    "BatchStage",
    "Batches",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DedupConfig",
    "EvaluationConfig",
    "HealthConfig",
    "Interval",
    "LaneGrid",
    "MeshShape",
    "MixtureConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OptimizerSpec",
    "ParallelConfig",
    "PreemptionConfig",
    "RemoteConfig",
    "RetentionConfig",
    "ScheduleConfig",
    "SourceConfig",
    "StageConfig",
    "StrategySpec",
    "TelemetryConfig",
    "TokenizerConfig",
    "TrainConfig",
    "changes",
    "dump_config",
    "effective_strategy",
    "find_optimizer",
    "find_strategy",
    "identity",
    "ineffective_settings",
    "load_config",
    "load_resolved",
    "override",
    "resolve_grid",
    "resolve_lanes",
    "resolve_mesh",
    "resolve_threads",
    "usable_machines",
    "crossing_groups",
]
