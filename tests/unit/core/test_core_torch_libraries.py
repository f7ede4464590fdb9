"""Loading PyTorch's libraries beside other work."""

from __future__ import annotations

import subprocess
import sys

from waits import LONG


def output_of(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LONG)
    return done.stdout.split()


def test_libraries_are_there_before_pytorch_is_imported_and_the_process_can_be_copied_then() -> None:
    words = output_of(
        "import sys\n"
        "from headway.core.startup.torch_libraries import load_libraries_ahead, wait_for_libraries\n"
        "from headway.run.supervisor.processes import has_one_thread\n"
        "load_libraries_ahead(); load_libraries_ahead(); wait_for_libraries()\n"
        "print('libtorch_cpu' in open('/proc/self/maps').read(), 'torch' in sys.modules, has_one_thread())\n"
        "import torch\n"
        "print(float(torch.ones(3, 3).mm(torch.ones(3, 3)).sum()))\n"
    )
    assert words == ["True", "False", "True", "27.0"]


def test_nothing_happens_without_pytorch_or_with_an_odd_one(tmp_path: object) -> None:
    for found in ("None", f"type('Spec', (), {{'origin': {str(tmp_path)!r} + '/torch/__init__.py'}})"):
        words = output_of(
            "import headway.core.startup.torch_libraries as libraries\n"
            f"libraries.find_spec = lambda name: {found}\n"
            "libraries.load_libraries_ahead(); libraries.wait_for_libraries()\n"
            "print('libtorch_cpu' in open('/proc/self/maps').read())\n"
        )
        assert words == ["False"]


def test_an_end_at_any_moment_meanwhile_is_no_crash() -> None:
    for seconds in (0.0, 0.02, 0.05, 0.1):
        script = (
            "import sys, time\n"
            "from headway.core.startup.torch_libraries import load_libraries_ahead\n"
            f"load_libraries_ahead(); time.sleep({seconds}); sys.exit(2)\n"
        )
        assert subprocess.run([sys.executable, "-c", script], timeout=LONG).returncode == 2


def test_whoever_has_not_begun_need_not_wait() -> None:
    assert output_of("import headway.core.startup.torch_libraries as x; x.wait_for_libraries(); print('on')") == ["on"]
