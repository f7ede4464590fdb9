"""Runs the test file that its argument names; its exit code is that of pytest."""

from __future__ import annotations

import sys

import pytest

if __name__ == "__main__":
    # The folder of runfiles cannot be written.
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
