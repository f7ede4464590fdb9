"""Bazel without its central registry: modules that stand for those that MODULE.bazel names.

The rules for Python are Debian's, which are the real ones of an earlier version. Packages of pip come from the
environment of the tests, whose interpreter is the toolchain. Rules of images are empty: what they would build is not
tested here.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

#: Where Debian's packages have the rules, in the root of the system that has Bazel.
DEBIAN = {
    "bazel_features": "usr/share/bazel/tools/features",
    "bazel_skylib": "usr/share/bazel/tools/skylib",
    "platforms": "usr/share/bazel/tools/platforms",
    "rules_cc": "usr/share/bazel/rules/cc",
    "rules_java": "usr/share/bazel/rules/java",
    "rules_license": "usr/share/bazel/rules/license",
    "rules_proto": "usr/share/bazel/rules/proto",
}
EMPTY = ("apple_support", "buildozer", "protobuf", "zlib")

_PIP = """\
def _hub_impl(context):
    for name in context.attr.packages:
        context.file(name + "/BUILD.bazel", 'py_library(name = "%s", visibility = ["//visibility:public"])' % name)
    context.file("BUILD.bazel", "")

_hub = repository_rule(implementation = _hub_impl, attrs = {"packages": attr.string_list()})

def _pip_impl(context):
    for module in context.modules:
        for parsed in module.tags.parse:
            names = []
            for line in context.read(parsed.requirements_lock).splitlines():
                if "==" in line and not line.startswith((" ", "#")):
                    names.append(line.partition("==")[0].strip().lower().replace("-", "_").replace(".", "_"))
            _hub(name = parsed.hub_name, packages = names)

_parse = tag_class(attrs = {
    "hub_name": attr.string(),
    "python_version": attr.string(),
    "requirements_lock": attr.label(),
})
pip = module_extension(implementation = _pip_impl, tag_classes = {"parse": _parse})
"""

_PYTHON = """\
def _python_impl(context):
    pass

_toolchain = tag_class(attrs = {"is_default": attr.bool(), "python_version": attr.string()})
python = module_extension(implementation = _python_impl, tag_classes = {"toolchain": _toolchain})
"""

_TOOLCHAIN = """\
load("//python:defs.bzl", "py_runtime", "py_runtime_pair")

py_runtime(name = "runtime", interpreter_path = "{python}", python_version = "PY3")
py_runtime_pair(name = "pair", py3_runtime = ":runtime")
toolchain(name = "toolchain", toolchain = ":pair", toolchain_type = "@bazel_tools//tools/python:toolchain_type")
"""

_OCI = """\
def _base_impl(context):
    context.file("BUILD.bazel", 'filegroup(name = "%s", visibility = ["//visibility:public"])' % context.attr.base)

_base = repository_rule(implementation = _base_impl, attrs = {"base": attr.string()})

def _oci_impl(context):
    for module in context.modules:
        for pulled in module.tags.pull:
            for name in [pulled.name] + [pulled.name + "_" + one.replace("/", "_") for one in pulled.platforms]:
                _base(name = name, base = name)

_pull = tag_class(attrs = {
    "name": attr.string(),
    "image": attr.string(),
    "tag": attr.string(),
    "digest": attr.string(),
    "platforms": attr.string_list(),
})
oci = module_extension(implementation = _oci_impl, tag_classes = {"pull": _pull})
"""

_RULE = """\
def {rule}(name, srcs = [], tars = [], base = None, image = None, tags = [], **kwargs):
    native.filegroup(name = name, srcs = srcs + tars + [one for one in (base, image) if one], tags = tags)
"""


def write_modules(folder: Path, root: Path, python: str) -> str:
    """Write the modules, and return the settings of user.bazelrc that put them in the place of the registry's.

    Args:
        folder: Where they go; Bazel sees it under the same path.
        root: Root of the system that has Bazel.
        python: Interpreter of the tests.
    """
    lines = [f"common --override_module={name}=/{place}" for name, place in DEBIAN.items()]
    for name in EMPTY:
        _write(folder / name, {"MODULE.bazel": f'module(name = "{name}")\n', "BUILD.bazel": ""})
    _write_python(folder / "rules_python", root / "usr/share/bazel/rules/python", python)
    rules = {"oci/defs.bzl": _RULE.format(rule="oci_image") + _RULE.format(rule="oci_load"), "oci/extensions.bzl": _OCI}
    _write(folder / "rules_oci", {"MODULE.bazel": 'module(name = "rules_oci")\n', "oci/BUILD.bazel": "", **rules})
    tar = {"pkg/tar.bzl": _RULE.format(rule="pkg_tar"), "pkg/BUILD.bazel": ""}
    _write(folder / "rules_pkg", {"MODULE.bazel": 'module(name = "rules_pkg")\n', **tar})
    written = (*EMPTY, "rules_python", "rules_oci", "rules_pkg")
    lines += [f"common --override_module={name}={folder / name}" for name in written]
    lines += ["common --registry=file:///nonexistent", "common --lockfile_mode=off"]
    return "\n".join([*lines, ""])


def _write_python(folder: Path, rules: Path, python: str) -> None:
    shutil.copytree(rules, folder)
    module = (folder / "MODULE.bazel").read_text(encoding="utf-8")
    head = re.sub(r"internal_deps = use_extension.*", "", module, flags=re.DOTALL)
    _write(
        folder,
        {
            "MODULE.bazel": f'{head}\nregister_toolchains("//offline:toolchain")\n',
            "offline/BUILD.bazel": _TOOLCHAIN.format(python=python),
            "python/extensions/pip.bzl": _PIP,
            "python/extensions/python.bzl": _PYTHON,
        },
    )


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
