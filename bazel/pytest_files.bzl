"""Tests by pytest: one target for each file, so that one that failed is named, and the others stay cached."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_files(srcs, deps, data = [], **kwargs):
    """Declare a test for each file.

    Args:
        srcs: Files of tests.
        deps: Libraries that they import, besides pytest.
        data: Files that they read.
        **kwargs: For each test.
    """
    for src in srcs:
        py_test(
            name = src.removesuffix(".py").replace("/", "_"),
            srcs = [
                src,
                "//bazel:pytest_main.py",
            ],
            args = ["$(rootpath %s)" % src],
            data = data,
            main = "//bazel:pytest_main.py",
            deps = deps + ["@pypi//pytest"],
            **kwargs
        )
