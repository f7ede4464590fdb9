"""Metrics of the server in the format of Prometheus. The only file that imports prometheus-client here."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from headway.core.version import __version__
from headway.serve.native import Counted

#: Bounds of the histograms, in seconds.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """What the server counts, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ["path", "status"]
        self._requests = Counter("headway_serve_requests", "Requests answered", labels, registry=self._registry)
        self._seconds = Histogram(
            "headway_serve_request_seconds",
            "Time from a request to the end of its reply",
            ["path"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first = Histogram(
            "headway_serve_first_byte_seconds",
            "Time from a request to the first byte of its reply's body",
            ["path"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._tokens = Counter("headway_serve_tokens", "Tokens of prompts, replies", ["kind"], registry=self._registry)
        self._switches = Counter(
            "headway_serve_switches", "Changes of an alias that were followed", ["outcome"], registry=self._registry
        )
        build = Gauge("headway_build_info", "Version of Headway; 1", ["version"], registry=self._registry)
        build.labels(__version__).set(1)

    def watch(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Report a value that is read at every scrape."""
        Gauge(f"headway_serve_{name}", help_text, registry=self._registry).set_function(value)

    def answered(self, path: str, status: int, seconds: float, first: float | None) -> None:
        """Count an answer."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
        if first is not None:
            self._first.labels(path).observe(first)

    def counted(self, tokens: Counted) -> None:
        """Count the tokens of an answer; from any thread."""
        self._tokens.labels("prompt").inc(tokens.prompt)
        self._tokens.labels("reply").inc(tokens.drawn)

    def switched(self, outcome: str) -> None:
        """Count a change of an alias: `done` or `failed`."""
        self._switches.labels(outcome).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics as text, and its content type."""
        encode, content_type = choose_encoder(accept)
        return bytes(encode(self._registry)), content_type
