"""Figures that say how the code reads: its size and density, its functions, its docstrings, its rooms and circles.

    python tools/code_figures.py                      # this tree, as a table
    python tools/code_figures.py ../other --json      # another tree, for a program
    python tools/code_figures.py --unknown-verbs      # first words of docstrings that the list of verbs lacks

Every figure follows from the text alone and nothing of the tree is imported, so the script can measure an old tree.
`tests/unit/test_import_circles.py` uses `import_graph` and `circles`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]

ROOT = Path(__file__).resolve().parents[1]
#: Rooms whose code runs inside a worker; a config should be entered by few of their files.
WORKER_ROOMS = ("run/session", "training", "parallel", "models", "data/feeding")
#: Rooms below the session, whose functions should take their section of a config; few take all of it.
BELOW_SESSION = ("training", "data", "models", "parallel", "checkpoint", "telemetry", "cost")
#: Folders below `src/headway` whose subfolders are rooms; any other folder or file there is one.
HALLS = ("run",)
#: What may load at any start: small, and required by `pip install`. Other packages are PyTorch, or not required.
LIGHT_PACKAGES = frozenset(
    "click fastokens numpy orjson psutil pydantic pydantic_core rich tokenizers typer yaml".split()  # noqa: SIM905
)
SHORT_LINES = 6
MANY_FIELDS = 10
#: Nodes with which a function branches; `a and b` and `a or b` count once for each operator.
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.Assert, ast.comprehension, ast.match_case)
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
#: Verbs with which docstrings of this project begin. A noun of the same spelling ("Rows of a step") counts as a noun.
VERBS = frozenset(
    """
    abort accept acquire act activate adapt add adjust advance agree align allocate allow analyze announce answer
    append apply arrange ask assemble assert assign attach average await balance begin bind block boost bound bracket
    break bring broadcast build bundle cache calculate call cancel carry cast catch change charge check choose claim
    clamp classify clean clear clip clone close collect combine come commit compare compile complete compose compress
    compute concatenate configure confirm connect consume continue convert copy correct count cover create cut deal
    decide declare decode decompress decrypt deduplicate defer define delete deliver derive describe destroy detach
    detect determine diagnose disable discard disconnect dispatch display divide do download drain draw drop dump edit
    embed emit empty enable encode encrypt end enforce ensure enter enumerate erase escape establish estimate evaluate
    examine exchange exclude execute exit expand explain export express extend extract fail feed fetch fill filter
    find finish fit fix flag flatten flush fold follow force forget fork format forward free freeze gather generate
    get give go group grow guard guess halve hand handle hash hide hold identify ignore import include increase index
    infer inform initialize insert inspect install interpolate interpret interrupt invert invoke iterate join judge
    keep kill label launch lay lead learn leave let level limit link list listen load locate lock log look lower make
    map mark mask match materialize measure merge mirror mix move multiply name narrow normalise normalize note notice
    notify number observe obtain offer offload omit open order overlay override overwrite own pack pad pair parse
    partition pass patch pause perform pick pin place plan plot point poll pool post predict prefix prepare prepend
    present preserve press prevent print probe process produce profile promise propose protect prove prune publish
    pull push put query queue quote raise rank read reap rebuild receive recognize recompute reconstruct record
    recover redact redirect reduce refer refill refresh refuse register reject relay release reload remember remove
    rename render reopen repair repeat replace replay reply report reproduce request require reseed reserve reset
    reshape resolve respond restart restore resume retrieve retry return reverse rewind rewrite rotate round route run
    sample save say scale scan schedule score seal search see seed seek select send separate serve set settle shard
    share shift shorten show shrink shuffle shut sign signal simulate skip sleep slice solve sort spawn split spread
    stack stage start state stop store stream strip submit subtract suggest sum summarize supervise suppress swap
    switch synchronize take tell terminate test tie time toggle tokenize total trace track train transfer transform
    translate transpose traverse treat trim truncate try turn undo unlock unmap unpack unregister unset unwrap update
    upgrade upload use validate vary verify view visit vote wait wake walk warm warn watch weigh widen wipe withdraw
    wrap write yield zero
    """.split()  # noqa: SIM905 (one word a line would hide the script)
)


def main(arguments: list[str] | None = None) -> None:
    """Print the figures of a tree."""
    parser = argparse.ArgumentParser(description="Figures that say how the code of a tree reads.")
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--worker-paths",
        nargs="+",
        default=WORKER_ROOMS,
        metavar="PATH",
        help="folders and files below src/headway that run inside a worker, where an older tree has them elsewhere",
    )
    parser.add_argument("--unknown-verbs", action="store_true", help="print first words that count as no verb")
    options = parser.parse_args(arguments)
    if options.unknown_verbs:
        words = Counter(word for word in first_words(parse(options.tree / "src").values()) if word not in VERBS)
        for word, number in words.most_common():
            sys.stdout.write(f"{number:5} {word}\n")
        return
    figures = measure(options.tree, options.worker_paths)
    if options.json:
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
        return
    for name, value in figures.items():
        sys.stdout.write(f"{name.replace('_', ' '):<58} {'n/a' if value is None else value:>10}\n")


def measure(tree: Path, worker_paths: Iterable[str] = WORKER_ROOMS) -> dict[str, float | None]:
    """Return the figures of `src` (circles: of `benchmarks` too) in the order in which they are printed."""
    modules = parse(tree / "src")
    functions = [function for module in modules.values() for function in functions_of(module)]
    lengths = [function.end_lineno - function.lineno + 1 for function in functions if function.end_lineno]
    once, private = private_helpers(modules.values())
    words = list(first_words(modules.values()))
    package = tree / "src" / "headway"
    entered = config_entries(package, worker_paths)
    tokens, token_lines = count_tokens(modules)
    classes = [node for module in modules.values() for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    fields = [len(fields_of(node)) for node in classes]
    wide = [node for node, count in zip(classes, fields, strict=True) if count > MANY_FIELDS]
    rooms = room_graph(import_graph(tree / "src"))
    inner = inner_imports(tree / "src")
    loop = next((function for function in functions if function.name == "train_loop"), None)
    return {
        "files": len(modules),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules),
        "tokens": tokens,
        "tokens_per_code_line_without_docstrings": round(tokens / max(1, token_lines), 2),
        "tuple_assignments": sum(count_nodes(module, is_tuple_assignment) for module in modules.values()),
        "conditional_expressions": sum(count_nodes(module, is_conditional) for module in modules.values()),
        "inner_imports_of_own_modules": len(inner),
        "inner_imports_that_load_torch_or_an_optional_package": sum(inner),
        "most_fields_of_a_class": max(fields, default=0),
        f"classes_of_more_than_{MANY_FIELDS}_fields": len(wide),
        f"classes_of_more_than_{MANY_FIELDS}_fields_that_act": sum(map(acts, wide)),
        "functions": len(functions),
        "median_function_lines": statistics.median_low(lengths),
        f"functions_of_{SHORT_LINES}_lines_or_fewer_percent": percent(
            sum(length <= SHORT_LINES for length in lengths), len(lengths)
        ),
        "private_helpers": private,
        "private_helpers_called_once_in_their_file": once,
        "functions_with_docstrings": len(words),
        "docstrings_that_begin_with_a_verb_percent": percent(sum(word in VERBS for word in words), len(words)),
        "ruff_D401": count_of_rule(tree, "D401", 'lint.pydocstyle.convention="google"'),
        "ruff_PLR0917": count_of_rule(tree, "PLR0917", "lint.pylint.max-positional-args=5"),
        "worker_files_entered_by_config": len(entered),
        "worker_functions_entered_by_config": sum(entered.values()),
        "functions_below_session_with_a_whole_config": whole_configs(package),
        "train_loop_lines": None if loop is None else loop.end_lineno - loop.lineno + 1,
        "train_loop_branches": None if loop is None else branches(loop),
        "rooms": len(rooms),
        "floors_of_rooms": floors(rooms),
        "arrows_between_rooms": sum(map(len, rooms.values())),
        "circles_of_rooms": len(circles(rooms)),
        "circles_in_src": len(circles(import_graph(tree / "src"))),
        "circles_of_types_in_src": len(circles(import_graph(tree / "src", with_types=True))),
        "circles_in_benchmarks": len(circles(import_graph(tree / "benchmarks"))),
    }


def parse(folder: Path) -> dict[Path, ast.Module]:
    """Parse every Python file below a folder."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def functions_of(module: ast.Module) -> Iterator[Function]:
    """Find every function and method, nested ones too."""
    return (node for node in ast.walk(module) if isinstance(node, Function))


def count_tokens(modules: Mapping[Path, ast.Module]) -> tuple[int, int]:
    """Count tokens, and the lines that hold one; without docstrings, comments and layout."""
    total = lines = 0
    for path, module in modules.items():
        documented = {line for node in ast.walk(module) for line in docstring_lines(node)}
        with path.open("rb") as file:
            held = [
                token.start[0]
                for token in tokenize.tokenize(file.readline)
                if token.type not in (*LAYOUT, tokenize.ENCODING) and token.start[0] not in documented
            ]
        total += len(held)
        lines += len(set(held))
    return total, lines


def docstring_lines(node: ast.AST) -> range:
    """Return the lines of the docstrings in a block: strings that are statements, of attributes too."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return range(node.lineno, node.end_lineno + 1) if is_text else range(0)


def count_nodes(module: ast.Module, wanted: Callable[[ast.AST], bool]) -> int:
    """Count the nodes of a module that a function accepts."""
    return sum(map(wanted, ast.walk(module)))


def is_tuple_assignment(node: ast.AST) -> bool:
    """Return whether a node is `a, b = x, y`."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def is_conditional(node: ast.AST) -> bool:
    """Return whether a node is `a if b else c`."""
    return isinstance(node, ast.IfExp)


def inner_imports(folder: Path) -> list[bool]:
    """Return for each import of an own module inside a function whether it loads what its file does not load itself:
    PyTorch, or a package that is not required."""
    files = {module_name(path.relative_to(folder)): path for path in sorted(folder.rglob("*.py"))}
    modules = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    packages, graph = loaded_at_once(modules)

    def packages_of(names: Iterable[str]) -> set[str]:
        return {package for name in names for package in packages[name]}

    found = []
    for name, module in modules.items():
        inside = {node for function in functions_of(module) for node in ast.walk(function)}
        for node in inside:
            if any(imported.partition(".")[0] == "headway" for imported in names_of(node)):
                loaded = packages_of(reached(graph, own_modules(node, modules)))
                found.append(bool(loaded - packages_of(reached(graph, [name]))))
    return found


def loaded_at_once(modules: Mapping[str, ast.Module]) -> tuple[Graph, Graph]:
    """Return which heavy packages, and which other modules, each module loads as soon as it is imported itself."""
    packages: Graph = {}
    graph: Graph = {}
    for name, module in modules.items():
        at_once = list(top_level(module))
        foreign = {imported.partition(".")[0] for node in at_once for imported in names_of(node)}
        packages[name] = foreign - LIGHT_PACKAGES - {*sys.stdlib_module_names, "headway"}
        graph[name] = {other for node in at_once for other in own_modules(node, modules)} - {name}
    return packages, graph


def top_level(module: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a module that run when it is imported: none of a function, none that are for types alone."""
    pending: list[ast.AST] = [module]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending.extend(node.orelse)
        elif not isinstance(node, Function | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def names_of(node: ast.AST) -> list[str]:
    """Return the dotted names that a statement imports; none of another statement."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def own_modules(node: ast.AST, modules: Mapping[str, ast.Module]) -> set[str]:
    """Return the modules of a package that a statement imports, and the packages around them, which load first."""
    found: set[str] = set()
    for name in names_of(node):
        words = name.split(".")
        found |= {part for part in (".".join(words[:end]) for end in range(1, len(words) + 1)) if part in modules}
    return found


def reached(graph: Graph, names: Iterable[str]) -> set[str]:
    """Return the modules that some modules lead to, themselves too."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending.extend(graph[name])
    return found


def fields_of(definition: ast.ClassDef) -> set[str]:
    """Return the names that instances of a class hold: declared in its body, or assigned to `self` in its methods.

    Sections of a config, whose fields are the keys that users write, have none here.
    """
    if any(ast.unparse(base) in ("Section", "BaseModel") for base in definition.bases):
        return set()
    declared = {
        node.target.id
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node)
    }
    methods = [node for node in definition.body if isinstance(node, Function)]
    assigned = {
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return declared | assigned


def acts(definition: ast.ClassDef) -> bool:
    """Return whether a class has methods that do something: other than properties, constructors and `__names__`.

    A class without one is a record: its fields are often those of a file, a message or a table.
    """
    return any(
        isinstance(node, Function)
        and not node.name.startswith("__")
        and not any(ast.unparse(mark).endswith(("property", "method")) for mark in node.decorator_list)
        for node in definition.body
    )


def branches(function: Function) -> int:
    """Count the branches of a function, those of functions inside it too."""
    nodes = list(ast.walk(function))
    operators = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return operators + sum(isinstance(node, BRANCHES) for node in nodes)


def whole_configs(package: Path) -> int:
    """Count the functions below the session with a parameter that is a whole `Config`."""
    modules = (module for room in BELOW_SESSION for module in parse(package / room).values())
    return sum(
        any(argument.annotation and re.search(r"\bConfig\b", ast.unparse(argument.annotation)) for argument in given)
        for module in modules
        for given in map(parameters, functions_of(module))
    )


def private_helpers(modules: Iterable[ast.Module]) -> tuple[int, int]:
    """Count private functions: those that their file names exactly once besides their definition, and all."""
    once = private = 0
    for module in modules:
        uses = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(module)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        for function in functions_of(module):
            if function.name.startswith("_") and not function.name.endswith("__"):
                private += 1
                once += uses[function.name] == 1
    return once, private


def first_words(modules: Iterable[ast.Module]) -> Iterator[str]:
    """Yield the first word of every function's docstring; properties are exempt, since they are nouns."""
    for module in modules:
        for function in functions_of(module):
            names = [ast.unparse(decorator) for decorator in function.decorator_list]
            docstring = ast.get_docstring(function)
            if docstring and not any(name.endswith(("property", ".setter")) for name in names):
                yield docstring.split()[0].strip(".,:;`'\"()").lower()


def count_of_rule(tree: Path, rule: str, setting: str) -> int | None:
    """Count what ruff finds in `src` by one rule; None where there is no ruff."""
    ruff = shutil.which("ruff") or shutil.which("ruff", path=str(Path(sys.executable).parent))
    if ruff is None:
        return None
    command = [ruff, "check", "--isolated", "--no-cache", "--preview", "--select", rule, "--output-format", "json"]
    found = subprocess.run(
        [*command, "--config", setting, "src"], cwd=tree, capture_output=True, text=True, check=False
    )
    return len(json.loads(found.stdout))


def config_entries(package: Path, paths: Iterable[str]) -> dict[str, int]:
    """Count by file the functions with a parameter named `config`, in some folders and files of a package."""
    files = (
        file
        for path in paths
        for file in ([package / path] if path.endswith(".py") else sorted((package / path).rglob("*.py")))
    )
    entered: dict[str, int] = {}
    for file in files:
        module = ast.parse(file.read_text(encoding="utf-8"))
        count = sum(
            any(argument.arg == "config" for argument in parameters(function)) for function in functions_of(module)
        )
        if count:
            entered[str(file.relative_to(package))] = count
    return entered


def parameters(function: Function) -> list[ast.arg]:
    """Return all parameters of a function, keyword-only ones too."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def import_graph(folder: Path, *, with_types: bool = False) -> Graph:
    """Return which modules below a folder import which, at run time, or also for their types alone.

    Imports inside functions count, since they hide a circle but do not break it; those under `if TYPE_CHECKING` do only
    `with_types`.
    A script finds its neighbours by their bare names, and files of other folders where it extends `sys.path`; a file of
    a package is found by its whole name only.
    """
    files = {module_name(path.relative_to(folder)): path for path in sorted(folder.rglob("*.py"))}
    graph: Graph = {name: set() for name in files}
    for name, path in files.items():
        package = list(path.relative_to(folder).parent.parts)
        is_script = not (path.parent / "__init__.py").exists()
        places = [".".join(package[:depth]) for depth in range(len(package), -1, -1)] if is_script else [""]
        for imported, level in imported_names(ast.parse(path.read_text(encoding="utf-8")), with_types):
            roots = [".".join(package[: len(package) - level + 1])] if level else places
            candidates = (f"{root}.{imported}".strip(".") for root in roots)
            known = next(filter(None, (longest(candidate, files) for candidate in candidates)), None)
            if known is None and is_script:
                known = only_script(imported.partition(".")[0], files)
            if known and known != name:
                graph[name].add(known)
    return graph


def module_name(path: Path) -> str:
    """Return the dotted name of a file; a package has that of its folder."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def longest(name: str, files: Mapping[str, Path]) -> str | None:
    """Return the module that a dotted name leads to: itself, or the module before its last word."""
    return next((module for module in (name, name.rpartition(".")[0]) if module in files), None)


def only_script(name: str, files: Iterable[str]) -> str | None:
    """Return the one module with a bare name in any folder; None for the standard library's and for ambiguous names."""
    found = [module for module in files if module.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 and name not in sys.stdlib_module_names else None


def imported_names(module: ast.Module, with_types: bool = False) -> Iterator[tuple[str, int]]:
    """Yield dotted names that a module imports at run time (or for types), each with how many dots stand before it."""
    pending: list[ast.AST] = [module]
    while pending:
        node = pending.pop()
        if not with_types and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from ((f"{base}.{alias.name}".strip("."), node.level) for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def room_graph(graph: Graph) -> Graph:
    """Return which rooms import which; the package's own `__init__` and `__main__` are none."""
    rooms: Graph = {}
    for module, imported in graph.items():
        room = room_of(module)
        if room:
            others = {room_of(other) for other in imported} - {room, ""}
            rooms.setdefault(room, set()).update(others)
    return rooms


def room_of(module: str) -> str:
    """Return the room of a module: `headway.training.loop` is in `training`, `headway.run.session.start` in
    `run.session`; "" where it is in none."""
    words = module.split(".")[1:]
    depth = 2 if words[:1] and words[0] in HALLS else 1
    return ".".join(words[:depth]) if len(words) >= depth and words != ["__main__"] else ""


def floors(graph: Graph) -> int:
    """Return the floors of a house: the rooms of the longest chain of imports; rooms in a circle share a floor."""
    group = {name: index for index, names in enumerate(circles(graph)) for name in names}
    heights: dict[object, int] = {}

    def height(name: str) -> int:
        own: object = group.get(name, name)
        if own not in heights:
            members = [other for other in graph if group.get(other, other) == own]
            below = {other for member in members for other in graph[member] if group.get(other, other) != own}
            heights[own] = 1 + max((height(other) for other in below if other in graph), default=0)
        return heights[own]

    return max(map(height, graph), default=0)


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other around: strongly connected components, by Tarjan."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            place = stack.index(name)
            component = stack[place:]
            del stack[place:]
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in order:
            visit(name)
    return sorted(found)


def percent(part: int, whole: int) -> float:
    """Return a share in percent, with one decimal."""
    return round(100 * part / whole, 1) if whole else 0.0


if __name__ == "__main__":
    main()
