"""Gathered weights under DeepSpeed's ZeRO stage 3, by simulating a step of its coordinator.

DeepSpeed 0.19.8, `deepspeed/runtime/zero/partitioned_param_coordinator.py`, `PartitionedParameterCoordinator`: every
module gathers its own parameters before its forward and backward pass (`fetch_sub_module`). It then starts to gather
the next ones, up to `prefetch_bucket_size` elements at a time, as long as at most `max_live_parameters` are gathered.
Afterwards it releases parameters that are neither small nor used again within the next `max_reuse_distance` elements
(`release_sub_module`, `__params_to_release`). With 1e9 for both, the default, models of less than about half a billion
parameters stay gathered from the first use of a weight to its last.

`partition_parameters.py`, `AllGatherCoalescedHandle`: parameters fetched together arrive in one buffer and are copied
out when the first of them is used; the buffer lives until all of them have been used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from headway.lab.plan.stages import Weight

#: Modules of a layer in the order of its forward pass, named by their parameter; those in capitals have none.
_LAYER = (
    "LAYER",
    "attention_norm.weight",
    "ATTENTION",
    "attention.qkv.weight",
    "attention.q_norm.weight",
    "attention.k_norm.weight",
    "attention.output.weight",
    "feed_forward_norm.weight",
    "FEED_FORWARD",
    "feed_forward.gate_up_groups.weight",
    "feed_forward.down.weight",
)
#: Order of their backward passes. A module without parameters ends after all modules in it, which does not affect the
#: gathered weights.
_LAYER_BACKWARD = (
    "LAYER",
    "FEED_FORWARD",
    "feed_forward.down.weight",
    "feed_forward.gate_up_groups.weight",
    "feed_forward_norm.weight",
    "ATTENTION",
    "attention.output.weight",
    "attention.q_norm.weight",
    "attention.k_norm.weight",
    "attention.qkv.weight",
    "attention_norm.weight",
)
#: Modules whose backward pass begins before recomputation is complete.
_BEFORE_RECOMPUTING = 3


@dataclass(frozen=True)
class LiveParameters:
    """Bytes of weights that are gathered or in flight, at the peak."""

    embedding: int
    """Peak until rows are embedded, when no layer keeps anything yet."""
    forward: tuple[int, ...]
    """Peak in each layer's forward pass."""
    loss: int
    backward: tuple[int, ...]
    """Peak in each layer's backward pass, in layer order; that of the first includes the embedding."""
    settled: tuple[int, ...]
    """`backward` without buffers of collectives, which are freed before gradients are sent."""


@dataclass(frozen=True)
class _Call:
    """One call of a module."""

    part: str
    """Part of the step: "embedding", "loss", or "forward" or "backward" and the layer."""
    parameters: tuple[str, ...]
    stays: bool = False
    """Whether it ends with the pass: it is the whole model, or no gradient marks its end."""


@lru_cache(maxsize=256)
def live_parameters(
    weights: tuple[Weight, ...],
    *,
    tied: bool,
    recomputes: bool,
    workers: int,
    persistence: int,
    persistent_in_all: int,
    prefetch_bucket: int,
    max_live: int,
    max_reuse: int,
    gloo: bool,
) -> LiveParameters:
    """Compute the gathered weights in any step after the first, when the order of modules is known.

    Args:
        weights: All parameters in the order of the model. Frozen ones are divided and gathered too.
        tied: The embedding table is also the projection.
        recomputes: The forward passes of layers are recomputed.
        workers: Number of workers that share the weights.
        persistence: Parameters of at most this many elements stay gathered ...
        persistent_in_all: ... up to this many elements in total.
        prefetch_bucket: Most elements to prefetch at a time.
        max_live: Most gathered elements when prefetching.
        max_reuse: Distance in elements within which a parameter that is used again stays gathered.
        gloo: Collectives need their own buffer.
    """
    elements = {weight.name: weight.elements for weight in weights}
    small = set[str]()
    total = 0
    for name, count in elements.items():
        if count + total <= persistent_in_all and count <= persistence:
            small.add(name)
            total += count
    # No gradient passes through a frozen embedding, so its backward pass never begins.
    embeds_again = any(weight.trained for weight in weights if weight.name == "embedding.weight")
    calls = _calls(elements, tied, recomputes, embeds_again)
    walk = _Walk(calls, weights, small, workers, gloo)
    walk.go(prefetch_bucket, max_live, max_reuse)
    most = walk.most
    layers = 1 + max(int(name.split(".")[1]) for name in elements if name.startswith("layers."))
    forward = tuple(most[f"forward {index}"] for index in range(layers))
    backward = tuple(most[f"backward {index}"] for index in range(layers))
    settled = tuple(walk.settled[f"backward {index}"] for index in range(layers))
    return LiveParameters(most["embedding"], forward, most["loss"], backward, settled)


def _calls(elements: dict[str, int], tied: bool, recomputes: bool, embeds_again: bool) -> list[_Call]:
    """List every module call, forward and backward.

    The whole model uses the projection outside of its module.
    """
    layers = 1 + max(int(name.split(".")[1]) for name in elements if name.startswith("layers."))
    projection = ("embedding.weight",) if tied else ("head.weight",)

    def layer(index: int, modules: tuple[str, ...], part: str) -> list[_Call]:
        found = []
        for module in modules:
            name = f"layers.{index}.{module}"
            if module.isupper() or name in elements:
                found.append(_Call(part, () if module.isupper() else (name,)))
        return found

    def own_order(index: int) -> tuple[str, ...]:
        """Return the modules of a layer with others than those above, in the order in which they are declared."""
        prefix = f"layers.{index}."
        names = tuple(name.removeprefix(prefix) for name in elements if name.startswith(prefix))
        return () if set(names) <= set(_LAYER) else names

    calls = [_Call("embedding", projection, stays=True), _Call("embedding", ("embedding.weight",))]
    for index in range(layers):
        calls += layer(index, own_order(index) or _LAYER, f"forward {index}")
    calls += [_Call("loss", ("norm.weight",)), _Call("loss", projection, stays=True), _Call("loss", ("norm.weight",))]
    for index in reversed(range(layers)):
        part = f"backward {index}"
        own = own_order(index)
        again = layer(index, own or _LAYER, part) if recomputes else []
        backward = layer(index, ("LAYER", *reversed(own)) if own else _LAYER_BACKWARD, part)
        calls += [*backward[:_BEFORE_RECOMPUTING], *again, *backward[_BEFORE_RECOMPUTING:]]
    return [*calls, _Call("backward 0", ("embedding.weight",), stays=True)] if embeds_again else calls


class _Arrival:
    """Parameters that were fetched together."""

    def __init__(self, names: list[str], buffer: int) -> None:
        self.names = set(names)
        self.buffer = buffer
        self.arrived = False


class _Walk:
    """The simulation of one step."""

    def __init__(
        self, calls: list[_Call], weights: tuple[Weight, ...], small: set[str], workers: int, gloo: bool
    ) -> None:
        self.calls = calls
        self.small = small
        self.gloo = gloo
        self.elements = {weight.name: weight.elements for weight in weights}
        self.bytes = {weight.name: weight.element_bytes * weight.elements for weight in weights}
        self.aligned = {
            weight.name: weight.element_bytes * workers * -(-weight.elements // workers) for weight in weights
        }
        self.whole = set(small)
        self.arrivals: dict[str, _Arrival] = {}
        self.fetched_for = dict.fromkeys(self.elements, -1)
        self.available = 0
        #: Peak bytes in each part of the step, with and without buffers of collectives.
        self.most: dict[str, int] = {}
        self.settled: dict[str, int] = {}
        #: The whole model uses the projection from its first call on.
        self.held = set(calls[0].parameters)

    def go(self, prefetch_bucket: int, max_live: int, max_reuse: int) -> None:
        """Simulate the step and record the peaks."""
        queue = deque((name, index) for index, call in enumerate(self.calls) for name in call.parameters)

        for index, call in enumerate(self.calls):
            self._ask([name for name in call.parameters if not self._known(name)])
            self._note(call.part)
            for name in call.parameters:
                self._arrive(name)
                self._note(call.part)
            expected = {name for name in call.parameters if self.fetched_for[name] < index}
            for _ in range(min(len(expected), len(queue))):
                name, used = queue.popleft()
                self.fetched_for[name] = used
            wanted: list[str] = []
            count = 0
            limit = min(max_live - self.available, prefetch_bucket)
            while queue and count < limit:
                name, used = queue.popleft()
                self.fetched_for[name] = max(self.fetched_for[name], used)
                if not self._known(name) and name not in wanted:
                    wanted.append(name)
                    count += self.elements[name]
            self._ask(wanted)
            self._note(call.part)
            self._leave(index, call, max_reuse)

    def _known(self, name: str) -> bool:
        return name in self.whole or name in self.arrivals

    def _note(self, part: str) -> None:
        arriving = {id(arrival): arrival for arrival in self.arrivals.values()}.values()
        there = sum(self.bytes[name] for name in self.whole)
        there += sum(arrival.buffer for arrival in arriving)
        self.settled[part] = max(self.settled.get(part, 0), there)
        if self.gloo:
            there += sum(arrival.buffer for arrival in arriving if not arrival.arrived)
        self.most[part] = max(self.most.get(part, 0), there)

    def _ask(self, names: list[str]) -> None:
        if names:
            arrival = _Arrival(names, sum(self.aligned[name] for name in names))
            self.arrivals |= dict.fromkeys(names, arrival)
            self.available += sum(self.elements[name] for name in names)

    def _arrive(self, name: str) -> None:
        arrival = self.arrivals.pop(name, None)
        if arrival is not None:
            # Everything that was fetched together is copied out now. A single parameter is used in place.
            self.whole |= arrival.names
            arrival.arrived = True

    def _leave(self, index: int, call: _Call, max_reuse: int) -> None:
        stays = self.small | self.held
        passed = 0
        for later in self.calls[index + 1 :]:
            if passed >= max_reuse:
                break
            stays.update(later.parameters)
            passed += sum(self.elements[name] for name in later.parameters)
        for name in call.parameters:
            if name in self.whole and name not in stays and self.fetched_for[name] <= index:
                self.whole.discard(name)
                self.available -= self.elements[name]
