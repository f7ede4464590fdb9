"""A web server of this process on a port of its own, for servers that stand in for what tests cannot reach."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LocalServer:
    """Answers until it is closed.

    Args:
        handler: Of a request.
        port: Where it listens; 0 stands for one that is free.
        seen: What every handler has as attributes.
    """

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0, **seen: Any) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (handler,), seen))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
