"""A Python library from a wheel in this repository."""

_BUILD = """\
load("@rules_python//python:defs.bzl", "py_library")

py_library(
    name = "{name}",
    srcs = glob(["{name}/**/*.py"]),
    data = glob(["{name}/**"], exclude = ["**/*.py", "**/* *", "**/*.bazel"]),
    imports = ["."],
    visibility = ["//visibility:public"],
    deps = {deps},
)
"""

def _required(metadata):
    """Return the packages that a wheel's metadata requires without an extra, as labels of the hub `pypi`."""
    labels = []
    for line in metadata.splitlines():
        if not line:
            break  # the description begins
        if not line.startswith("Requires-Dist: ") or "extra ==" in line:
            continue
        name = line.removeprefix("Requires-Dist: ")
        for end in "<>=!~;[( ".elems():
            name = name.partition(end)[0]
        labels.append("@pypi//" + name.lower().replace("-", "_").replace(".", "_"))
    return sorted(labels)

def _vendored_wheel_impl(context):
    wheel = context.path(context.attr.wheel)
    context.symlink(wheel, "wheel.zip")  # an archive is known by its name
    context.extract("wheel.zip")
    information = wheel.basename.rpartition("-py3")[0] + ".dist-info/METADATA"
    context.file("BUILD.bazel", _BUILD.format(
        name = wheel.basename.partition("-")[0],
        deps = repr(_required(context.read(information))),
    ))

vendored_wheel = repository_rule(
    attrs = {"wheel": attr.label(
        allow_single_file = [".whl"],
        mandatory = True,
    )},
    doc = "Unpacks a wheel, and declares its package with what it requires.",
    implementation = _vendored_wheel_impl,
)
