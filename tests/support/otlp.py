"""A collector of OpenTelemetry in this process: takes OTLP over HTTP, and keeps every request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.local_server import LocalServer


class Collector:
    """Takes metrics at `/v1/metrics`; answers with `code` when that is not 200.

    Args:
        token: What requests must have as `Authorization`, if anything.
    """

    def __init__(self, token: str | None = None) -> None:
        self.token, self.code, self.rejected = token, 200, 0
        self.requests: list[Any] = []
        self.content = b""
        self.lock = threading.Lock()
        self._server = LocalServer(_Handler, collector=self)
        self.endpoint = self._server.endpoint

    def points(self) -> Iterator[tuple[str, float, int, dict[str, str], dict[str, str]]]:
        """Every point in the order of arrival: name, value, time, attributes, and attributes of its resource."""
        for request in self.requests:
            for resource in request.resource_metrics:
                of_resource = _texts(resource.resource.attributes)
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        for point in metric.gauge.data_points:
                            attributes = _texts(point.attributes)
                            yield metric.name, point.as_double, point.time_unix_nano, attributes, of_resource

    def values(self, name: str) -> list[tuple[int, float]]:
        """Times in nanoseconds and values of a metric."""
        return [(time, value) for known, value, time, _, _ in self.points() if known == name]

    def close(self) -> None:
        """End it."""
        self._server.close()


def _texts(attributes: Any) -> dict[str, str]:
    return {one.key: one.value.string_value for one in attributes}


class _Handler(BaseHTTPRequestHandler):
    collector: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
            ExportMetricsPartialSuccess,
            ExportMetricsServiceRequest,
            ExportMetricsServiceResponse,
        )

        content, collector = self.rfile.read(int(self.headers["Content-Length"])), self.collector
        code = collector.code if self.path == "/v1/metrics" else 404
        if collector.token is not None and self.headers.get("Authorization") != collector.token:
            code = 401
        if self.headers["Content-Type"] != "application/x-protobuf":
            code = 415
        if code == 200:
            with collector.lock:
                collector.content += content
                if content:
                    collector.requests.append(ExportMetricsServiceRequest.FromString(content))
        rejected = ExportMetricsPartialSuccess(rejected_data_points=collector.rejected, error_message="too old")
        body = ExportMetricsServiceResponse(partial_success=rejected if collector.rejected else None)
        self.send_response(code)
        self.send_header("Content-Length", str(body.ByteSize()))
        self.end_headers()
        self.wfile.write(body.SerializeToString())

    def log_message(self, *_: object) -> None:
        pass
