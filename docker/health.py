"""Tell whether a container is healthy: docker asks, and so do compose files. Kubernetes has probes of its own.

`python health.py train`: no run waits for a step longer than the alert HeadwayNoStep allows.
`python health.py serve`: the server answers on its port.
"""

import http.client
import json
import os
import ssl
import subprocess
import sys
import urllib.request

SECONDS = 20


def training() -> bool:
    """Return whether no live run has stopped making steps; Headway's own alert decides."""
    command = ["headway", "top", os.environ.get("HEADWAY_RUNS", "runs"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    return all("HeadwayNoStep" not in run["alerts"] for run in json.loads(done.stdout))


def serving() -> bool:
    """Return whether the server answers."""
    place = f"127.0.0.1:{os.environ.get('PORT', '8000')}/healthz"
    try:
        with urllib.request.urlopen(f"http://{place}", timeout=SECONDS / 2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        # With TLS: the certificate is for the name that clients know, and this is the same machine.
        tls = ssl._create_unverified_context()
        with urllib.request.urlopen(f"https://{place}", timeout=SECONDS / 2, context=tls) as answer:
            return bool(answer.status == 200)


def main() -> int:
    """Return 0 for a healthy container, else 1, as docker reads it."""
    try:
        healthy = serving() if sys.argv[1:] == ["serve"] else training()
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
