"""Memory of DeepSpeed's ZeRO stages 1 to 3, as the strategies `deepspeed_zero1|2|3` use them.

Derived from the source of DeepSpeed 0.19.8, `deepspeed/runtime/zero`:

- `config.py`, `DeepSpeedZeroConfig`: the default sizes.
- `stage_1_and_2.py`, `DeepSpeedZeroOptimizer.__init__`: the weights of an optimizer group lie in one flat buffer,
  padded to a multiple of 2 elements per worker. Each worker has an fp32 copy of its part, even if weights are fp32, and
  the moments. `setup_buckets`: a buffer for `reduce_bucket_size` elements (two with
  `overlap_comm`) from a backward pass's first gradient until its end. `copy_grads_in_partition`: the gradients of all
  parameters of which the worker has a part. `step`: they are flattened once more.
- `stage3.py`, `_create_fp32_partitions`, `_setup_for_real_optimizer`: parts of weights, their copy for the update, the
  bucket and summed gradients last as long as the run. `_prepare_fp32_grad_for_sub_group`: gradients of
  `sub_group_size` elements at a time are flattened. For gathered weights see `lab/plan/live_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headway.config import Config
from headway.config.derived.deepspeed import engine_settings
from headway.config.optimizers import FP32_BYTES, find_optimizer
from headway.core.errors import ConfigError
from headway.lab.plan.activations import LayerSizes
from headway.lab.plan.flat_buffers import FP64, Bucket, FlatGroup, backwards, flat_groups, owned
from headway.lab.plan.host import BYTES_PER_UPDATE, REST_BYTES, HostPlan, staged_bytes
from headway.lab.plan.layout import Layout
from headway.lab.plan.live_parameters import LiveParameters, live_parameters
from headway.lab.plan.memory_plan import Moment
from headway.lab.plan.pass_memory import Passes, gradients_of
from headway.lab.plan.stages import Stage

#: Keys of the user's JSON for features that the plan does not cover, with the values that disable them.
_UNSUPPORTED: Mapping[str, Any] = {
    "contiguous_gradients": True,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "round_robin_gradients": False,
    "stage3_module_granularity_threshold": 0,
    "stage3_allgather_sequential": False,
    "mics_shard_size": -1,
}


@dataclass(frozen=True)
class ZeroSettings:
    """DeepSpeed's settings that determine sizes, in elements; defaults are those of its `DeepSpeedZeroConfig`."""

    stage: int
    reduce_bucket: int = 500_000_000
    overlaps: bool = False
    """Sums overlap the backward pass; in stage 3 by default."""
    reduces_to_owner: bool = False
    """Sums go to their owner only. With `use_multi_rank_bucket_allreduce`, the default, they go to all workers."""
    sub_group: int = 1_000_000_000
    prefetch_bucket: int = 50_000_000
    persistence: int = 100_000
    """Parameters of at most this many elements stay gathered."""
    persistent_in_all: int = 2**63 - 1
    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000
    offloads: bool = False
    """The copy of the weights for the update, its gradients and moments are in host memory."""
    offloads_weights: bool = False
    """Shards of weights are in host memory too."""

    @classmethod
    def of(cls, config: Config, workers: int) -> ZeroSettings:
        """Read the settings that DeepSpeed gets in a run with this many workers.

        Raises:
            ConfigError: the user's JSON cannot be read, or enables what the plan does not cover.
        """
        settings = engine_settings(config, workers)
        zero: dict[str, Any] = settings["zero_optimization"]
        _check_supported(settings, zero)
        stage: int = zero["stage"]

        def number(key: str, default: int) -> int:
            # Keys of stage 3 have a second name.
            value = zero.get(key, zero.get(key.removeprefix("stage3_")))
            return default if value is None else int(value)

        overlaps = zero.get("overlap_comm")
        one_owner = zero.get("use_multi_rank_bucket_allreduce") is False and zero.get("reduce_scatter") is not False
        weights_device = (zero.get("offload_param") or {}).get("device") or "none"
        return cls(
            stage,
            reduce_bucket=number("reduce_bucket_size", cls.reduce_bucket),
            overlaps=stage == 3 if overlaps is None else bool(overlaps),
            reduces_to_owner=one_owner,
            sub_group=number("sub_group_size", cls.sub_group),
            prefetch_bucket=number("stage3_prefetch_bucket_size", cls.prefetch_bucket),
            persistence=number("stage3_param_persistence_threshold", cls.persistence),
            persistent_in_all=number("stage3_model_persistence_threshold", cls.persistent_in_all),
            max_live=number("stage3_max_live_parameters", cls.max_live),
            max_reuse=number("stage3_max_reuse_distance", cls.max_reuse),
            offloads="offload_optimizer" in zero,
            offloads_weights=stage == 3 and weights_device != "none",
        )


def _check_supported(settings: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    asked = {f"zero_optimization.{k}": (zero.get(k, off), off) for k, off in _UNSUPPORTED.items()}
    offload = zero.get("offload_optimizer", {})
    asked["zero_optimization.offload_optimizer.ratio"] = (offload.get("ratio", 1.0), 1.0)
    asked["communication_data_type"] = (settings.get("communication_data_type", "fp32"), "fp32")
    for key, (value, counted) in asked.items():
        if value != counted and value is not None:
            raise ConfigError(
                f"a plan does not cover '{key}: {value}' in the DeepSpeed config",
                where="parallel.deepspeed_config",
                fix=f"plan with the default of this key: {counted}",
            )


class EngineStep(Passes):
    """The moments of a step whose update is DeepSpeed's."""

    def moments(self) -> list[Moment]:
        """Return every point of the step that may be the peak."""
        return self._stage_3() if self.zero.stage == 3 else self._stages_1_and_2()

    @cached_property
    def zero(self) -> ZeroSettings:
        """DeepSpeed's settings."""
        return ZeroSettings.of(self.config, self.layout.mesh.data)

    @property
    def _host(self) -> int:
        """Factor of tensors in host memory: 1 if the device is the CPU or nothing is offloaded, else 0."""
        return 0 if self.zero.offloads and not self.on_cpu else 1

    @cached_property
    def _share(self) -> int:
        """Bytes of this worker's part of the weights."""
        workers = self.layout.mesh.data
        if self.zero.stage == 3:  # every parameter is padded to a multiple of the workers
            return sum(FP32_BYTES * -(-count // FP32_BYTES // workers) for count in self.stage.bytes.values())
        return sum(group.share for group in flat_groups(self.stage.shapes, workers))

    def host(self) -> HostPlan:
        """Plan host memory on an accelerator; what is offloaded is what `_host` takes off the device."""
        zero = self.zero
        stage = self.stage
        workers = self.layout.mesh.data
        share = self._share
        moments = self._moments_of_share(share)
        saves = staged_bytes(self.config, share + moments)
        if not zero.offloads:
            return HostPlan(saves=saves, rest=REST_BYTES)
        gradients = 2 * share
        if zero.stage < 3:
            sums = max(owned(flat_groups(stage.shapes, workers), workers))
            gradients += stage.largest + (sums if zero.stage == 2 and self.accumulates else 0)
        stored = sum(weight.element_bytes * -(-weight.elements // workers) for weight in stage.weights)
        return HostPlan(
            weights=share + (stored if zero.offloads_weights else 0),
            gradients=gradients,
            optimizer=moments,
            saves=saves,
            rest=REST_BYTES,
            updated=BYTES_PER_UPDATE * share // FP32_BYTES,
        )

    def _moments_of_share(self, share: int) -> int:
        """Return the bytes of the optimizer's moments for a share; it treats all elements alike."""
        return find_optimizer(self.config.optimizer.name).moment_bytes("", (share // FP32_BYTES,))

    def whole(self, layer: LayerSizes) -> int:
        """Return the bytes of a layer when its backward pass begins.

        The linear layers of stage 3 save the weight itself, whatever it is cast to (`linear.py`,
        `LinearFunctionForZeroStage3`).
        """
        return layer.saved if self.zero.stage == 3 else super().whole(layer)

    # Weights whole on every worker ------------------------------------------------------------------------------------

    def _stages_1_and_2(self) -> list[Moment]:
        zero = self.zero
        stage = self.stage
        workers = self.layout.mesh.data
        groups = flat_groups(stage.shapes, workers)
        flat = sum(group.total for group in groups)
        share = self._share
        host = self._host
        offloads = zero.offloads
        largest = stage.largest
        bucket = FP32_BYTES * zero.reduce_bucket * (1 + zero.overlaps)
        # The rank with the most gradients; a parameter that two workers share counts in full for both.
        own = max(owned(groups, workers))
        copies = share + self._moments_of_share(share) + (2 * share + largest if offloads else 0)
        state = Moment(
            weights=flat + stage.frozen,
            optimizer=host * copies,
            buffers=self.lasting + (largest if offloads else 0),
        )
        if offloads and self.accumulates and zero.stage == 2:
            state = state.plus(gradients=host * own)  # sums of micro-batches
        sums = 0 if offloads else own
        # On an accelerator weights are flattened in host memory.
        begun = flat + stage.frozen + (stage.all if self.on_cpu else 0)
        taken = Moment("taken over", weights=begun, buffers=self.lasting)
        if zero.stage == 1:
            moments = self._summed_at_the_end(state, bucket, groups)
        else:
            moments = self._summed_on_the_way(state, bucket, groups)
        first = max(group.share for group in groups)
        slice_ = max(group.largest_part(rank) for group in groups for rank in {0, workers - 1})
        if not offloads:
            # The norm is computed in fp64, one gradient after the other (`get_grad_norm_direct`).
            moments.append(state.plus("norm", gradients=sums, buffers=FP64 * slice_))
        moments.append(state.plus("update", gradients=0 if offloads else sums + first))
        sent = max(group.total for group in groups) if self.gloo else 0
        moments.append(state.plus("weights sent", communication=sent))
        return [taken, *moments]

    def _summed_at_the_end(self, base: Moment, bucket: int, groups: list[FlatGroup]) -> list[Moment]:
        """Plan stage 1: gradients stay whole until the last micro-batch, then go through the bucket."""
        stage = self.stage
        growing = not self.accumulates
        zero = self.zero
        before = 0 if growing else stage.all
        head, most = (stage.projection, stage.all - stage.own_table - stage.layer) if growing else (0, 0)
        table = 0 if growing and stage.own_table else stage.table
        there = base.plus(gradients=before, communication=0 if growing else bucket)
        under_way = base.plus(gradients=before, communication=bucket)
        # In the order of the weights, one optimizer group after the other; all gradients exist at first.
        order = {name: stage.bytes[name] for group in groups for name in group.places}
        sent = [
            Bucket(order, groups, rank, zero.reduce_bucket, offloads=zero.offloads, all_there=True)
            for rank in (0, self.layout.mesh.data - 1)
        ]
        return [
            *self.losses(there),
            under_way.plus("last layer, backward", activations=self.last_layer, gradients=head, buffers=self.passing),
            under_way.plus("first layer, backward", activations=self.first_layer, gradients=most, buffers=self.passing),
            under_way.plus("embedding, backward", gradients=stage.all - before, buffers=table),
            base.plus("gradients sent", gradients=max(bucket_.most for bucket_ in sent), communication=bucket),
        ]

    def _summed_on_the_way(self, base: Moment, bucket: int, groups: list[FlatGroup]) -> list[Moment]:
        """Plan stage 2: a full bucket is summed, and the owned part of it is stored."""
        stage = self.stage
        zero = self.zero
        workers = self.layout.mesh.data
        moments: list[Moment] = []
        for rank in {0, workers - 1}:
            filled = Bucket(backwards(stage.bytes), groups, rank, zero.reduce_bucket, offloads=zero.offloads)
            before = filled.own if self.accumulates else 0
            there = base.plus(gradients=before)
            under_way = there.plus(communication=bucket)
            moments += self.losses(there)
            for index in reversed(range(stage.layers)):
                here = gradients_of(filled.extra, index)
                below = sum(self.kept[:index])
                moments += [
                    under_way.plus("a layer, backward", activations=below + self.whole(self.sizes.dense),
                                   buffers=self.passing, gradients=here[0]),
                    under_way.plus("gradients sent", activations=below, buffers=self.sizes.gradient,
                                   gradients=max(here)),
                ]  # fmt: skip
            moments.append(under_way.plus("gradients sent", gradients=filled.last))
        return moments

    # Weights divided --------------------------------------------------------------------------------------------------

    def _stage_3(self) -> list[Moment]:
        zero = self.zero
        stage = self.stage
        workers = self.layout.mesh.data
        # Every parameter is padded to a multiple of the workers.
        parts = {name: FP32_BYTES * -(-count // FP32_BYTES // workers) for name, count in stage.bytes.items()}
        share = self._share
        host = self._host
        # Frozen weights are divided as well, in their own type.
        stored = [weight.element_bytes * -(-weight.elements // workers) for weight in stage.weights]
        weights = 0 if zero.offloads_weights and not self.on_cpu else sum(stored)
        copies = share + self._moments_of_share(share) + (share if zero.offloads else 0)
        bucket = FP32_BYTES * zero.reduce_bucket
        live = live_weights(zero, stage, self.layout, self.gloo)
        state = Moment(
            weights=weights,
            gradients=host * share,
            optimizer=host * copies,
            communication=bucket,
            buffers=self.lasting,
        )
        matrix = max(stage.down, stage.gate_up)
        # Products under autocast make a temporary copy of their matrix in both passes.
        cast = self.sizes.dense.casts and matrix // 2
        through = Bucket(backwards(stage.bytes), (), 0, zero.reduce_bucket, gloo=self.gloo)
        # All weights are on the device until they are sharded, one parameter after the other.
        moments = [Moment("taken over", weights=stage.all + stage.frozen + max(stored), buffers=self.lasting)]
        moments.append(state.plus("embedding, forward", communication=live.embedding, buffers=self.sizes.gradient))
        moments += [
            state.plus("a layer, forward", activations=sum(self.kept[:index]) + self.whole(self.sizes.dense),
                       communication=whole, buffers=cast)
            for index, whole in enumerate(live.forward)
        ]  # fmt: skip
        moments += self.losses(state.plus(communication=live.loss))
        for index, whole in enumerate(live.backward):
            here = gradients_of(through.extra, index)
            below = sum(self.kept[:index])
            moments += [
                # Buffers of collectives are freed before products are computed.
                state.plus("weights gathered", activations=below + self.whole(self.sizes.dense), communication=whole),
                state.plus("a layer, backward", activations=below + self.whole(self.sizes.dense),
                           communication=live.settled[index], buffers=self.passing + cast),
                state.plus("gradients sent", activations=below, buffers=self.sizes.gradient, gradients=max(here),
                           communication=live.settled[index]),
            ]  # fmt: skip
        last = max(through.extra.get("embedding.weight", 0), through.last)
        moments.append(state.plus("gradients sent", communication=live.settled[0], gradients=last))
        moments.append(state.plus("norm", buffers=FP64 * max(parts.values())))
        # A subgroup's gradients are flattened while it is updated; no weights are gathered.
        flat = 0 if zero.offloads else min(share, FP32_BYTES * zero.sub_group)
        moments.append(state.plus("update", gradients=flat))
        return moments


def live_weights(zero: ZeroSettings, stage: Stage, layout: Layout, gloo: bool) -> LiveParameters:
    """Return which weights are gathered at which point of a step in stage 3."""
    return live_parameters(
        stage.weights,
        tied=all(weight.name != "head.weight" for weight in stage.weights),
        recomputes=layout.checkpointing != "none",
        workers=layout.mesh.data,
        persistence=zero.persistence,
        persistent_in_all=zero.persistent_in_all,
        prefetch_bucket=zero.prefetch_bucket,
        max_live=zero.max_live,
        max_reuse=zero.max_reuse,
        gloo=gloo,
    )
