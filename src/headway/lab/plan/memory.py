"""Bytes on the worker that needs most, by part, at the moments of a step that may be the peak.

Everything is arithmetic over the shape, the strategy and the mesh; `docs/plan.md` describes how it was checked. Memory
that the allocator and the communication library hold in addition is the plan's reserve (`memory_plan.py`). The driver's
memory and fragmentation are not counted: `recommend.USABLE_SHARE` leaves room for them.
"""

from __future__ import annotations

from dataclasses import replace

from headway.config import Config, ModelConfig
from headway.config.optimizers import FP32_BYTES, UpdateSizes, find_optimizer
from headway.core.errors import ConfigError
from headway.lab.plan.activations import Activations, masked_pairs
from headway.lab.plan.deepspeed import EngineStep
from headway.lab.plan.host import HostPlan, plan_host
from headway.lab.plan.host_weights import BF16_BYTES, HostWeightsStep
from headway.lab.plan.layout import Layout
from headway.lab.plan.memory_plan import MemoryPlan, Moment
from headway.lab.plan.pass_memory import Passes
from headway.lab.plan.stages import BUCKET_BYTES, BUCKETS_IN_FLIGHT, Stage, pipeline_stages
from headway.models.shape import Shape


def plan_memory(
    config: Config, model: ModelConfig, layout: Layout, device: str, gloo: bool | None = None
) -> MemoryPlan:
    """Plan the memory of a step.

    Args:
        config: A resolved config; `train` and `optimizer` matter.
        model: A complete config, including `vocab_size`.
        layout: How the step is split over workers.
        device: "cpu" or "cuda".
        gloo: Whether collectives use gloo, which needs its own buffers; by default on the CPU.

    Raises:
        ConfigError: offload is set although moments are in host memory already.
    """
    on_cpu = device == "cpu"
    if config.optimizer.offload and on_cpu and not (layout.strategy.cuts_parameters or layout.strategy.is_deepspeed):
        raise ConfigError(
            "moments are in host memory already when training on cpu",
            where="optimizer.offload",
            fix="optimizer.offload=false",
        )
    gloo = on_cpu if gloo is None else gloo
    length = config.train.sequence_length // layout.mesh.cp
    stages: list[Stage]
    if model.implementation == "transformers":  # traced with torch; the plan of a native decoder does without
        from headway.lab.plan.pretrained import (
            hidden_size,
            pretrained_activations,
            pretrained_buffers,
            pretrained_stage,
        )

        sizes = pretrained_activations(config, model, layout, device)
        stages = [pretrained_stage(config, model)]
        # its passes make their own masks, if any
        tables = pretrained_buffers(config, model)
        pairs = 0
    else:
        if not _varies(model) or model.experts or max(layout.mesh.tp, layout.mesh.cp) > 1:
            sizes = Activations.of_layout(config, model, layout, device)
        else:
            from headway.lab.plan.hybrid import hybrid_activations  # traced with torch too

            sizes = hybrid_activations(config, model, layout, device)
        stages = pipeline_stages(config, model, layout)
        kinds = 1 if model.local_rope_theta is None else 2
        tables = 2 * kinds * model.max_sequence_length * Shape.of(model).rotary_dim * FP32_BYTES
        pairs = masked_pairs(config, model, layout.mesh.cp, layout.micro_batch)
    teacher = 0
    if config.logits_key is not None:
        from headway.lab.plan.losses import logits_loss_bytes, teacher_bytes  # traced with torch, too

        dim = hidden_size(config, model) if model.implementation == "transformers" else Shape.of(model).dim
        assert model.vocab_size is not None, "the config is complete"
        loss = logits_loss_bytes(config, model.vocab_size, dim, layout.micro_batch * length)
        sizes = replace(sizes, loss_forward=loss[0], loss_backward=loss[1])
        teacher = teacher_bytes(config)
    # Ids and targets in int64. On the CPU the batches of a whole step are in the same memory.
    batches = 16 * layout.micro_batch * length * (layout.micro_batches if on_cpu else 1)
    kind: type[Passes] = _Step
    if layout.strategy.is_deepspeed:
        kind = EngineStep
    elif config.train.weights != "fp32":
        kind = HostWeightsStep
        stages = [replace(stage, element_bytes=BF16_BYTES, gathers_half=False) for stage in stages]
    moments: list[Moment] = []
    hosts: list[HostPlan] = []
    for stage in stages:
        lasting = batches + tables + pairs + stage.received * sizes.gradient
        step = kind(stage, layout, sizes, config, on_cpu=on_cpu, gloo=gloo, lasting=lasting)
        host = step.host()
        hosts.append(host)
        kept = {"weights": teacher}
        if kind is HostWeightsStep and on_cpu:  # which has both in one memory
            kept = {"weights": teacher + host.weights, "gradients": host.gradients, "optimizer": host.optimizer}
        moments += [moment.plus(moment.name, **kept) for moment in step.moments()]
    # Besides that of all workers, a communicator for each dimension with several of them.
    split = sum(size > 1 for size in layout.mesh.sizes.values())
    return MemoryPlan(
        moments,
        communicators=1 + split if split and not on_cpu else 0,
        host=HostPlan() if on_cpu else max(hosts, key=lambda host: host.total),
        caches=not on_cpu,
    )


def _varies(model: ModelConfig) -> bool:
    """Return whether layers differ, or save what the table of `lab/plan/activations.py` does not have."""
    own_scores = model.attention_softcap is not None or model.qk_norm_over != "head"
    return bool(model.layer_pattern or model.attention_pattern) or own_scores or not model.pre_norms


class _Step(Passes):
    """The moments of one stage's step."""

    def moments(self) -> list[Moment]:
        """Return every point of the step that may be the peak."""
        return self._sharded() if self.layout.strategy.cuts_parameters else self._replicated()

    def host(self) -> HostPlan:
        """Plan host memory: with `optimizer.offload` copies of weights and gradients, and moments."""
        return plan_host(self.config, self.stage, self.layout)

    # Weights whole on every worker ------------------------------------------------------------------------------------

    def _replicated(self) -> list[Moment]:
        """Plan strategies with whole weights: `single`, `ddp`, `zero1` and `zero2`."""
        stage = self.stage
        layout = self.layout
        name = self.config.optimizer.name
        owners = layout.mesh.replicas if layout.strategy.divides_update else 1
        optimizer = self.moments_of(stage.largest_moments(owners, name))
        state = Moment(weights=stage.all + stage.frozen, optimizer=optimizer, buffers=self.lasting)
        bucket = max(stage.largest, min(BUCKET_BYTES, stage.largest_share(owners)))
        if layout.strategy.shards_gradients and not layout.elastic:
            # Gradients wait until their bucket is full, and go to its owner.
            gradients = stage.largest_share(owners)
            moments = self.losses(state.plus(gradients=gradients if self.accumulates else 0))
            moments += self.layers_handed_over(state, stage.handed_over(owners, sums=self.accumulates))
        else:
            in_buckets = layout.strategy.fills_buckets or layout.elastic
            growing = not (in_buckets or self.accumulates)
            # With one lane there are no sums to keep.
            lanes = self.copies_of_lanes * stage.all if layout.lanes > 1 else 0
            moments = self._passes(state.plus(gradients=0 if growing else stage.all, buffers=lanes), growing)
            if layout.elastic:
                # Half of a bucket arrives from the nearest worker (`parallel/tree.py`).
                parts = stage.largest // 2 if layout.mesh.data > 1 else 0
                lanes = self.copies_of_lanes * stage.all
                moments.append(state.plus("sum of lanes", gradients=stage.all, buffers=lanes, communication=parts))
            gradients = stage.all
        moments.append(state.plus("update", gradients=gradients, buffers=self._update(owners)))
        if owners > 1:
            in_flight = min(stage.all, BUCKETS_IN_FLIGHT * bucket)
            moments.append(state.plus("weights sent", gradients=gradients, communication=in_flight))
        return moments

    def _passes(self, base: Moment, growing: bool) -> list[Moment]:
        """Plan forward and backward pass; gradients grow as they are computed, or accumulate into those in `base`."""
        stage = self.stage
        head, most = (stage.projection, stage.all - stage.own_table - stage.layer) if growing else (0, 0)
        # An embedding's gradient is as large as its table, however few rows were used (see `models/layers/tied.py`).
        mesh = self.layout.mesh
        joined = stage.tied and self.on_cpu and mesh.tp * mesh.pp == 1
        table = 0 if growing and (stage.own_table or joined) else stage.table
        return [
            *self.losses(base),
            base.plus("last layer, backward", activations=self.last_layer, gradients=head, buffers=self.passing),
            base.plus("first layer, backward", activations=self.first_layer, gradients=most, buffers=self.passing),
            base.plus("embedding, backward", gradients=stage.all if growing else 0, buffers=table),
        ]

    def _update(self, owners: int) -> int:
        """Return the optimizer's temporaries on this device."""
        optimizer = self.config.optimizer
        stage = self.stage
        if optimizer.offload and not self.on_cpu:
            return 0
        updated = stage.largest_share(owners) if owners > 1 else stage.all
        sizes = UpdateSizes(
            updated,
            stage.largest,
            stage.largest_hidden,
            stage.largest_in_8_bits,
            elastic=self.layout.elastic,
            cpu=self.on_cpu,
        )
        return find_optimizer(optimizer.name).update_bytes(sizes)

    # Weights cut between workers --------------------------------------------------------------------------------------

    def _sharded(self) -> list[Moment]:
        """Plan `zero3` and `hsdp`: layers are gathered as units, all other weights as the root.

        A unit arrives in one flat buffer and is copied out of it; the buffer lives until the next unit is copied out.
        The root (embedding, projection; in half precision also norms) and its gradients live from the beginning of the
        forward pass to the end of the backward pass. gloo needs one more buffer when a unit arrives or leaves. The sum
        in the fixed tree needs the parts in the order of the tree, and half of them again to receive. In half precision
        a unit and its gradients are half as large, except for the sum, which is in fp32.

        Gradients that accumulate are whole between sums, which come once a step, in every micro-batch, or at the end of
        every lane if elastic (`fsdp.py`). Only sums are shards, and so are those of lanes.
        """
        stage = self.stage
        layout = self.layout
        shards = self.layout.shards
        name = self.config.optimizer.name
        norms = stage.norms if self.half else 0
        root = stage.root + norms
        layers = stage.layers
        offload = self.config.optimizer.offload and not self.on_cpu
        leaving_unit = stage.layer - norms // layers
        trained_unit = leaving_unit // 2 if self.half else leaving_unit
        unit = trained_unit + stage.frozen_layer
        whole_root = root + stage.frozen_root
        gloo = int(self.gloo)
        leaving = 1.5 if layout.elastic else gloo
        own = 0 if offload else stage.shard(shards)
        frozen = 0 if offload else stage.frozen // shards
        sums = layout.lanes if layout.elastic else layout.micro_batches if self.sums_each_micro_batch else 1
        is_whole = layout.micro_batches > sums
        state = Moment(
            weights=own + frozen,
            optimizer=self.moments_of(stage.shard_of_moments(shards, name)),
            buffers=self.lasting,
            gradients=(stage.all if is_whole else 0) + (own if sums > 1 else 0),
        )
        if layout.elastic and layout.lanes > 1:
            state = state.plus(buffers=self.copies_of_lanes * stage.shard(shards))
        growing = not is_whole
        whole_layers = stage.in_layers * trained_unit // max(1, stage.layer) + sum(stage.frozen_layers)
        stays = 0 if layout.reshard_after_forward else whole_layers
        ahead = ((layout.prefetch or 1) - 1) * unit
        kept = 0 if stays else unit + ahead
        head = stage.projection if growing else 0
        grown = unit if growing else 0
        sent = 0 if offload or state.gradients else stage.shard_of_layers(shards)
        done = sent // layers
        second = self.last_layer - self.kept[-1] if layers > 1 else self.last_layer
        before_last = self.after_forward - self.last_norm - self.kept[-1]
        arriving = max(self.passing, gloo * kept)
        root_shard = 0 if offload else stage.shard_of_root(shards)
        moments = [
            state.plus("root gathered", communication=(2 + gloo) * whole_root + unit),
            state.plus("last layer gathered", activations=before_last,
                       communication=whole_root + 2 * unit + ahead + (stays or unit)),
            state.plus("loss", activations=self.after_forward, buffers=self.loss,
                       communication=whole_root + unit + stays),
            state.plus("loss, backward", activations=self.after_forward, buffers=self.loss_backward,
                       communication=whole_root + kept + stays),
            state.plus("last layer, backward", activations=self.last_layer, gradients=head, buffers=arriving,
                       communication=whole_root + 2 * kept + stays),
            # From here on the buffer of the last sent gradients is still alive.
            state.plus("next layer, backward", activations=second, gradients=head + done, buffers=arriving,
                       communication=whole_root + 2 * kept + leaving_unit + stays),
            state.plus("first layer, backward", gradients=head + grown + sent,
                       communication=whole_root + (kept or unit) + int((1 + leaving) * leaving_unit),
                       buffers=self.sizes.gradient),
            state.plus("root's gradients", gradients=(root if growing else 0) + sent,
                       communication=whole_root + leaving_unit, buffers=0 if growing else stage.table),
            state.plus("root sent", gradients=sent + (stage.table if growing else 0),
                       communication=whole_root + int(leaving * root) + root_shard),
        ]  # fmt: skip
        update = Moment("update", weights=state.weights, optimizer=state.optimizer, gradients=own)
        temporaries = 0 if offload else self._update(1) // shards
        return [*moments, update.plus(buffers=self.lasting + temporaries)]
