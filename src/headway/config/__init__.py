"""The config of a run: its schema, and the specs of strategies and optimizers.

Each floor imports only those before it: `base` and `units`; specs, batches, shapes and templates; `sections`; `schema`,
which puts the sections together; values `derived` from them; `checks` across sections; `resolving`; `loading` from
files.
"""

from headway.config.batches import Batches, BatchStage
from headway.config.checks.ineffective import ineffective_settings
from headway.config.derived.identity import changes, identity
from headway.config.derived.lanes import LaneGrid, resolve_lanes, resolve_threads
from headway.config.derived.mesh import (
    MeshShape,
    crossing_groups,
    effective_strategy,
    resolve_grid,
    resolve_mesh,
    usable_machines,
)
from headway.config.loading.load import dump_config, load_config, load_resolved, override
from headway.config.optimizers import OptimizerSpec, find_optimizer
from headway.config.resolving import resolve
from headway.config.schema import (
    Config,
    EvaluationConfig,
    OptimizerConfig,
    ScheduleConfig,
    TelemetryConfig,
)
from headway.config.sections.checkpoint import CheckpointConfig, RemoteConfig, RetentionConfig
from headway.config.sections.data import (
    DataConfig,
    DedupConfig,
    MixtureConfig,
    SourceConfig,
    StageConfig,
    TokenizerConfig,
)
from headway.config.sections.health import HealthConfig
from headway.config.sections.model import ModelConfig
from headway.config.sections.parallel import ParallelConfig
from headway.config.sections.preemption import PreemptionConfig
from headway.config.sections.train import TrainConfig
from headway.config.shapes import SHAPES
from headway.config.strategies import DEEPSPEED, StrategySpec, find_strategy
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
    "resolve",
    "resolve_grid",
    "resolve_lanes",
    "resolve_mesh",
    "resolve_threads",
    "usable_machines",
    "crossing_groups",
]
