"""The sink for OpenTelemetry: OTLP over HTTP, protobuf, as a collector takes it.

Every value is a gauge at the time of its record, in a series of its run. A step is a value too (`headway.step`): as an
attribute it would make a series of each point. OTLP has no way to ask what is there, so after a kill the last batch is
sent again: the same points of the same series at the same times, which a data base stores once or refuses.
"""

from __future__ import annotations

import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import unquote

from headway.config.sections.track import OpentelemetryConfig, http_problem
from headway.core.console import warning
from headway.core.credentials.http import open_url
from headway.core.credentials.secrets import redact
from headway.core.errors import ConfigError, needing
from headway.telemetry.catalogue import Unit, metric
from headway.tracking.servers import address_from, ask_server
from headway.tracking.sink import Batch, Description, Refused, SinkSpec, Status, TrackedRun, Unreachable

_PATH = "/v1/metrics"
_DEFAULT = "http://localhost:4318"
_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_TIMEOUT_SECONDS = 20.0
#: Status codes after which OTLP asks to try again, and one that a proxy gives.
_TRY_AGAIN = (408, 429)
#: Units as OpenTelemetry writes them (UCUM).
_UNITS = {
    Unit.NUMBER: "1",
    Unit.STEPS: "{step}",
    Unit.RATE: "{item}/s",
    Unit.SECONDS: "s",
    Unit.TIMESTAMP: "s",
    Unit.RATIO: "1",
    Unit.GIB: "GiBy",
    Unit.GIB_PER_SECOND: "GiBy/s",
    Unit.USD: "{USD}",
    Unit.USD_PER_HOUR: "{USD}/h",
    Unit.CELSIUS: "Cel",
    Unit.WATTS: "W",
    Unit.MEGAHERTZ: "MHz",
}


class OpentelemetrySink:
    """Sends a run to a collector.

    Args:
        url: Where it takes metrics.
        headers: Headers of each request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = headers
        self._resource: dict[str, str] = {}
        self._tls: ssl.SSLContext | None = None
        self._has_rejected = False

    def open(self, run: TrackedRun, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Name the run's series; nothing is sent."""
        _messages()
        self._tls = _tls(self._url)
        self._resource = {
            **_pairs("OTEL_RESOURCE_ATTRIBUTES"),
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or "headway",
            "service.instance.id": run.id + run.suffix,
            "headway.run": run.title,
        }
        return state

    def describe(self, description: Description) -> Mapping[str, Any]:
        """Send the facts about the run as attributes of `headway.run.info`."""
        data = {f"headway.dataset.{one.name}": one.digest for one in description.datasets}
        self._post([_gauge("headway.run.info", [(time.time(), 1.0, {**description.tags, **data})])])
        return {}

    def send(self, batch: Batch) -> Mapping[str, Any]:
        """Send the points, each metric's in one message."""
        series: dict[str, list[tuple[float, float, Mapping[str, str]]]] = {}
        steps: dict[float, int] = {}
        for point in batch.points:
            series.setdefault(point.name, []).append((point.time, point.value, {}))
            steps[point.time] = point.step
        metrics = [_gauge(metric_name(name), points, name) for name, points in series.items()]
        self._post([*metrics, _gauge("headway.step", [(moment, step, {}) for moment, step in steps.items()])])
        return {}

    def flush(self) -> Mapping[str, Any]:
        """Return the state: every request has been answered."""
        return {}

    def set_status(self, status: Status, ended: float | None) -> None:
        """Send the status as an attribute of `headway.run.status`."""
        self._post([_gauge("headway.run.status", [(ended or time.time(), 1.0, {"status": status})])])

    def close(self) -> None:
        """Do nothing: no connection stays open."""

    def _post(self, metrics: Iterable[Any]) -> None:
        messages = _messages()
        content = messages.ExportMetricsServiceRequest(resource_metrics=[_of_resource(self._resource, metrics)])
        request = _request(self._url, self._headers, content.SerializeToString())
        try:
            with open_url(request, _TIMEOUT_SECONDS, self._tls) as response:
                answer = messages.ExportMetricsServiceResponse.FromString(response.read(2**20))
        except urllib.error.HTTPError as error:
            if 400 <= error.code < 500 and error.code not in _TRY_AGAIN:
                raise Refused(
                    f"the collector refuses the points ({error.code})",
                    where=redact(self._url),
                    fix=f"export {_HEADERS}=..." if error.code in (401, 403) else "see the collector's log",
                ) from error
            raise Unreachable(f"it answers {error.code}") from error
        except (OSError, HTTPException) as error:
            raise Unreachable(redact(str(getattr(error, "reason", error)))) from error
        except Exception as error:  # protobuf's own: it is no base class that could be named without the package
            raise Unreachable(f"its answer is none of OTLP: {redact(str(error))[:200]}") from error
        if (rejected := answer.partial_success.rejected_data_points) and not self._has_rejected:
            self._has_rejected = True  # points that were rejected must not be sent again
            why = redact(answer.partial_success.error_message)[:200]
            warning(f"the collector at {redact(self._url)} rejects {rejected} points: {why}")


def metric_name(name: str) -> str:
    """Return the name of a metric in OpenTelemetry: words with dots."""
    return f"headway.{name.replace('/', '.')}"


def _gauge(name: str, points: Iterable[tuple[float, float, Mapping[str, str]]], recorded: str = "") -> Any:
    """Make the message of a metric from times, values and attributes; unit and help are those of the catalogue."""
    from opentelemetry.proto.metrics.v1.metrics_pb2 import Gauge, Metric, NumberDataPoint

    known = metric(recorded)
    values = [
        NumberDataPoint(time_unix_nano=int(1e9 * moment), as_double=value, attributes=_attributes(attributes))
        for moment, value, attributes in points
    ]
    help_text, unit = (known.help, _UNITS[known.unit]) if known is not None else ("", "1")
    return Metric(name=name, description=help_text, unit=unit, gauge=Gauge(data_points=values))


def _of_resource(resource: Mapping[str, str], metrics: Iterable[Any]) -> Any:
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
    from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics, ScopeMetrics
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    scope = ScopeMetrics(scope=InstrumentationScope(name="headway"), metrics=metrics)
    return ResourceMetrics(resource=Resource(attributes=_attributes(resource)), scope_metrics=[scope])


def _attributes(values: Mapping[str, str]) -> list[Any]:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

    return [KeyValue(key=name, value=AnyValue(string_value=text)) for name, text in values.items()]


def _messages() -> Any:
    with needing("opentelemetry-proto", "opentelemetry", "the tracker opentelemetry"):
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
    return metrics_service_pb2


def _request(url: str, headers: Mapping[str, str], content: bytes) -> urllib.request.Request:
    return urllib.request.Request(url, data=content, headers={**headers, "Content-Type": "application/x-protobuf"})


def _setting(name: str) -> str | None:
    """Return a setting of OpenTelemetry's exporters: the one for metrics wins."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_METRICS_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")


def _pairs(variable: str) -> dict[str, str]:
    """Return the pairs of a variable that holds `name=value,...` with values as in URLs.

    Raises:
        ConfigError: it holds something else.
    """
    found = {}
    for part in filter(None, os.environ.get(variable, "").split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ConfigError("this variable is no list of pairs", where=variable, fix=f"export {variable}=name=value")
        found[name.strip()] = unquote(value.strip())
    return found


def _headers() -> dict[str, str]:
    found = _pairs("OTEL_EXPORTER_OTLP_METRICS_HEADERS") or _pairs(_HEADERS)
    if any(sign in text for text in (*found, *found.values()) for sign in "\r\n"):
        raise ConfigError("a header has a line end in it", where=_HEADERS, fix="remove it")
    if not all(map(_HEADER_NAME.fullmatch, found)):  # it may have a credential in it, which errors must not repeat
        raise ConfigError(
            "a header has a name that no header can have", where=_HEADERS, fix=f"export {_HEADERS}=name=value"
        )
    return found


def _tls(url: str) -> ssl.SSLContext | None:
    """Return how to check the collector's certificate, and the one that this side shows."""
    if not url.startswith("https:"):
        return None
    own = _setting("CLIENT_CERTIFICATE")
    key = _setting("CLIENT_KEY")
    try:
        found = ssl.create_default_context(cafile=_setting("CERTIFICATE"))
        if own:
            found.load_cert_chain(own, key, password="")  # of a key with a password, OpenSSL would ask the terminal
    except OSError as error:
        raise ConfigError(
            f"a certificate cannot be read: {error.strerror or error}",
            where="OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
            fix="name PEM files that this user may read",
        ) from error
    return found


def _url(settings: OpentelemetryConfig) -> str:
    """Return where the collector takes metrics."""

    def named(variable: str) -> str | None:
        return address_from(variable, "the collector", problem=http_problem, credentials=_HEADERS, example=_DEFAULT)

    if settings.endpoint is None and (whole := named("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")):
        return whole
    base = (settings.endpoint or named("OTEL_EXPORTER_OTLP_ENDPOINT") or _DEFAULT).rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


def _check(settings: OpentelemetryConfig, where: str) -> None:
    url = _url(settings)
    _pairs("OTEL_RESOURCE_ATTRIBUTES")
    ask_server(
        _request(url, _headers(), b""),  # a request without points
        "OpenTelemetry collector",
        credentials=f"{_HEADERS}=Authorization=Bearer%20...",
        address=f"{where}.opentelemetry.endpoint, or OTEL_EXPORTER_OTLP_ENDPOINT",
        tls=_tls(url),
    )


SPEC = SinkSpec(
    lambda settings, where: _url(settings),
    lambda settings, run, where: OpentelemetrySink(_url(settings), _headers()),
    _check,
    library=("opentelemetry.proto", "opentelemetry-proto", "opentelemetry"),
)
