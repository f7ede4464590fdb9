"""Chat templates that take bounded time and memory, and the place of each message in what they render.

A template comes with a model, and Jinja's sandbox keeps it from files and attributes, not from looping for days or
writing `'a' * 10**10`. So its syntax tree is changed before it is compiled: whatever loops, copies, compares or writes
text spends from a budget first, in characters and items rather than seconds, so that the same conversations are
refused on every machine. The budget grows with the conversation.

The same change lets a loop over the messages mark in the text where each of them begins and ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from types import BuiltinMethodType, FunctionType
from typing import Any

import transformers
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from transformers import tokenization_utils_base
from transformers.utils import chat_template_utils

from headway.core.errors import ConfigError

#: What a rendering may spend, and what more for each character of the conversation. ChatML spends 300 for a message and
#: 1 for each character of it; the template of Qwen3, 2,000 and 5.
_WORK = 2**26
_WORK_PER_CHARACTER = 64
#: What an iteration, a call, an item of a list or a dict spends beside the text in it.
_ITEM = 64
#: What is written for this much work is joined in the time of one more.
_WORK_PER_JOIN = 1024
_LARGEST_NUMBER = 2**20
_MOST_BITS = 4096
#: A width or precision of four digits, or one that is a value itself.
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\*|\d{4,}|\d*\.(\*|\d{4,}))")
_WIDE_FORMAT = re.compile(r":[^{}]*(\{|\d{4,})")
_COMPILE = "_compile_jinja_template"
# names that no template can write
_CHARGE = " charge"
_ITERATE = " iterate"
_ENTER = " enter"
_LEAVE = " leave"

#: What filters, methods and tests spend beside their arguments: one item, an item for each of the value's, the size of
#: the value, or that for each of its items. Others, of which some repeat a text, spend the product of all sizes.
_BOUNDS = {
    name: bound
    for bound, names in (
        ("constant", "attr d default first get keys last length values"),
        ("items", "copy items list map reject rejectattr reverse select selectattr"),
        (
            "linear",
            "== != < <= > >= count dictsort divisibleby endswith eq equalto find float ge greaterthan groupby gt in"
            " index int le lessthan lower lstrip lt max min ne partition removeprefix removesuffix rfind rindex"
            " rpartition rsplit rstrip sort split splitlines startswith strip trim truncate unique upper",
        ),
        # These copy the rest of a text, or a list, for each item; some codecs do.
        ("quadratic", "decode encode striptags sum urlize wordwrap"),
    )
    for name in names.split()
}


class Rendering:
    """One rendering: what it may still spend, and whether it marks the messages.

    Args:
        characters: Length of the conversation.
        mark: Character that marks where a message begins and ends; None if nothing is marked.
        dated: Whether the template may write today's date, as for those who talk to a model.
    """

    def __init__(self, characters: int, mark: str | None = None, dated: bool = False) -> None:
        self.dated = dated
        self._left = self._all = _WORK + _WORK_PER_CHARACTER * characters
        self._mark = mark
        self._numbers: dict[int, int] | None = None
        self.used = False

    def spend(self, work: int) -> None:
        """Take work from the budget.

        Raises:
            RuntimeError: there is not so much left.
        """
        self._left -= work
        if self._left < 0:
            raise RuntimeError("it works on far more text than a conversation of this size has")

    def charge(self, *values: Any, indent: int = 0) -> int:
        """Spend, and return, the size of values: characters, and items at every depth as often as they are reached.

        Args:
            values: Anything.
            indent: Characters that each item is indented by for each level above it.
        """
        if len(values) == 1 and type(values[0]) is str:  # as mostly
            self.spend(_ITEM + len(values[0]))
            return _ITEM + len(values[0])
        total = 0
        pending = [(value, 0) for value in values]
        while pending:
            value, depth = pending.pop()
            held: Any = ()
            if isinstance(value, str | bytes | range):
                total += len(value)
            elif isinstance(value, int):
                _check_bits(value.bit_length())
            elif isinstance(value, dict):
                held = (*value.keys(), *value.values())
            elif isinstance(value, Namespace):
                held = value._Namespace__attrs.values()
            elif isinstance(value, Collection) and not isinstance(value, Undefined):
                held = value
            total += _ITEM + indent * depth + _ITEM * len(held)
            if total > self._left:
                self.spend(total)
            pending += [(item, depth + 1) for item in held]
        self.spend(total)
        return total

    def charge_product(self, *values: Any) -> None:
        """Spend the product of the sizes of values, where a number counts as often as it says."""
        product = 1
        for value in values:
            if isinstance(value, int):
                product *= max(1, _checked(value))
            elif isinstance(value, str | bytes | range):
                product *= max(1, len(value))
            elif isinstance(value, Collection) and not isinstance(value, Undefined):
                product *= self.charge(value)
        self.spend(product + _ITEM)

    def enter(self, context: Context, loop: int, target: Any) -> str:
        """Return the mark of a message that a loop comes to; nothing for anything else."""
        if self._mark is None:
            return ""
        if self._numbers is None:
            self._numbers = {id(message): number for number, message in enumerate(context.parent["messages"])}
        number = self._numbers.get(id(target))
        return "" if number is None else f"{self._mark}{loop}:{number};"

    def charge_join(self) -> None:
        """Spend on joining all that is written so far."""
        self.spend((self._all - self._left) // _WORK_PER_JOIN)

    def leave(self, loop: int) -> str:
        """Return the mark of a loop's end."""
        return "" if self._mark is None else f"{self._mark}{loop}:;"


_current: ContextVar[Rendering | None] = ContextVar("rendering", default=None)


def _rendering() -> Rendering:
    found = _current.get()
    if found is None:
        raise RuntimeError("nothing is rendered")  # Jinja asks for constants while it compiles, and takes this as a no
    return found


@contextmanager
def bounded(rendering: Rendering) -> Iterator[None]:
    """Let what transformers renders in this block spend from one budget.

    The function that compiles templates is a private one of transformers, whose public ones take the text of a template
    and nothing else. They are used all the same, since they prepare messages and tools as the model's users do.

    Raises:
        ConfigError: transformers compiles its templates in another way.
    """
    # Older versions render in the second one.
    known = [module for module in (chat_template_utils, tokenization_utils_base) if hasattr(module, _COMPILE)]
    for module in known:
        theirs = getattr(module, _COMPILE)
        if not hasattr(theirs, "bounds"):
            setattr(module, _COMPILE, _replacing(theirs))
    if known:
        token = _current.set(rendering)
        try:
            yield
        finally:
            _current.reset(token)
    if not rendering.used:
        raise ConfigError(
            "this version does not compile chat templates where it is expected to, so their work cannot be bounded",
            where=f"transformers {transformers.__version__}",
            fix="install an earlier version of transformers",
        )


def _replacing(theirs: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a compiler of templates that bounds those of this module's renderings, and no others."""

    def compile_template(source: str) -> Any:
        rendering = _current.get()
        if rendering is None:
            return theirs(source)
        rendering.used = True
        token = _current.set(None)
        try:
            return _compile(source, theirs, rendering.dated)
        finally:
            _current.reset(token)

    compile_template.bounds = True  # type: ignore[attr-defined]
    return compile_template


@lru_cache(8)
def _compile(source: str, theirs: Callable[[str], Any], dated: bool) -> Any:
    environment = _Environment(theirs("").environment, dated)
    tree = _Bounding().visit(environment.parse(source))
    tree.set_environment(environment)
    return environment.from_string(tree)


class _Environment(ImmutableSandboxedEnvironment):
    """An environment like that of transformers whose operators, calls, filters and tests spend."""

    intercepted_binops = frozenset(("+", "-", "*", "//", "**", "%"))

    def __init__(self, theirs: Any, dated: bool) -> None:
        super().__init__(
            trim_blocks=theirs.trim_blocks,
            lstrip_blocks=theirs.lstrip_blocks,
            extensions=[type(extension) for extension in theirs.extensions.values()],
            finalize=_charged,
        )
        # Undefined, the first as it was in older versions of transformers: a store must not depend on day or chance.
        left_out = ("lipsum",) if dated else ("strftime_now", "lipsum")
        self.globals = {key: value for key, value in theirs.globals.items() if key not in left_out}
        self.filters = {
            name: _spending(name, function) for name, function in theirs.filters.items() if name != "random"
        }
        self.filters |= {_CHARGE: _charged, _ITERATE: _iterated, _ENTER: _enter, _LEAVE: _leave}
        self.tests = {
            name: _spending(name, test) if _BOUNDS.get(name) == "linear" else test
            for name, test in theirs.tests.items()
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` if its result is of a bounded size."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            _check_bits(bits * abs(right) if operator == "**" else bits + right.bit_length())
        elif operator == "+":
            _rendering().charge(left, right)
        elif operator in ("*", "%") and not isinstance(left, float) and not isinstance(right, float):
            if operator == "%":
                _check_widths(_WIDE_PERCENT, left)
            _rendering().charge_product(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, if its result is of a bounded size."""
        if isinstance(__obj, BuiltinMethodType):
            args = _spend_on(__obj.__name__, (__obj.__self__, *args), kwargs)[1:]
        elif isinstance(__obj, FunctionType):
            _rendering().charge_product(*args, *_values(kwargs))
        else:  # a macro, a namespace, a dict, a tag
            _rendering().charge(*args, *_values(kwargs))
            if isinstance(getattr(__obj, "__self__", None), Extension):
                _rendering().charge_join()  # as `{% generation %}` does, to find its place
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` of the sandbox, which spends before."""
        format_text = super().wrap_str_format(value)
        if format_text is None:
            return None
        text = value.__self__

        def bounded_format(*args: Any, **kwargs: Any) -> str:
            _check_widths(_WIDE_FORMAT, text)
            _rendering().charge_product(text, [*args, *kwargs.values()])
            return format_text(*args, **kwargs)

        return bounded_format


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise RuntimeError(f"it computes with integers of more than {_MOST_BITS:,} bits")


def _checked(number: int) -> int:
    if abs(number) > _LARGEST_NUMBER:
        raise RuntimeError(f"it repeats by a number above {_LARGEST_NUMBER:,}")
    return abs(number)


def _check_widths(pattern: re.Pattern[str], text: Any) -> None:
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    if isinstance(text, str) and pattern.search(text):
        raise RuntimeError("it pads a text to a width that may be above 999")


def _values(named: dict[str, Any]) -> Iterator[Any]:
    return (value for name, value in named.items() if not name.startswith("_"))  # `_loop_vars` are Jinja's own


def _spend_on(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Spend on a filter or a method of a value; returns its arguments, in which lists stand for generators."""
    rendering = _rendering()
    bound = _BOUNDS.get(name)
    if name != "first":
        args = tuple([*arg] if isinstance(arg, Iterator) else arg for arg in args)
    value, *more = (*args, *_values(named))
    items = len(value) if isinstance(value, Sized) else 1
    if bound in ("constant", "items"):
        rendering.spend(_ITEM + (_ITEM * items if bound == "items" else 0))
        if more:
            rendering.charge(*more)
    elif name == "replace" and isinstance(value, str) and len(more) >= 2 and all(isinstance(m, str) for m in more[:2]):
        rendering.spend(_ITEM + 2 * len(value) + value.count(more[0]) * len(more[1]))
    elif name in ("tojson", "pprint"):
        indent = named.get("indent", args[2] if len(args) > 2 else 0) if name == "tojson" else 4
        rendering.charge(value, indent=len(indent) if isinstance(indent, str) else _checked(indent or 0))
    elif bound is not None:
        size = rendering.charge(value, *more)
        if bound == "quadratic":
            rendering.spend(size * items)
    elif isinstance(value, int):
        rendering.charge(value)
        rendering.charge_product(*more)
    else:
        if name == "format":
            _check_widths(_WIDE_PERCENT, value)
        rendering.charge_product(value, *more)
    return args


def _spending(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or a test, so that it spends first."""
    skipped = int(hasattr(function, "jinja_pass_arg"))  # a context, or an environment, comes first

    @wraps(function)
    def spending(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:skipped], *_spend_on(name, args[skipped:], kwargs), **kwargs)

    return spending


@pass_context
def _charged(context: Context, value: Any) -> Any:
    """Spend on a value that is written, copied or compared."""
    _rendering().charge(value)
    return value


@pass_context
def _iterated(context: Context, value: Any) -> Any:
    """Spend on what a loop goes over, even if a condition leaves all of it out."""
    if isinstance(value, Sized):
        _rendering().spend(len(value))
    return value


@pass_context
def _enter(context: Context, target: Any, loop: int, text: int) -> str:
    """Begin an iteration, or a macro."""
    rendering = _rendering()
    rendering.spend(_ITEM + text)
    return rendering.enter(context, loop, target)


@pass_context
def _leave(context: Context, loop: int) -> str:
    """End a loop."""
    return _rendering().leave(loop)


class _Bounding(NodeTransformer):
    """Puts filters that spend around what loops, compares and joins texts."""

    def __init__(self) -> None:
        self._loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        text = _text_in(node)
        self.generic_visit(node)
        self._loops += 1
        target: nodes.Expr = nodes.Const(None)
        if isinstance(node.target, nodes.Name):
            target = nodes.Name(node.target.name, "load")
        entered = _filtered(node, target, _ENTER, self._loops, text)
        node.iter = _filtered(node, node.iter, _ITERATE)
        node.body.insert(0, nodes.Output([entered]).set_lineno(node.lineno))
        return [node, nodes.Output([_filtered(node, nodes.Const(self._loops), _LEAVE)]).set_lineno(node.lineno)]

    def _visit_called(self, node: Any) -> nodes.Node:
        text = _text_in(node)
        self.generic_visit(node)
        entered = _filtered(node, nodes.Const(None), _ENTER, 0, text)
        node.body.insert(0, nodes.ExprStmt(entered).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_Block = visit_CallBlock = _visit_called

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) == 1 and node.ops[0].op in ("eq", "ne") and isinstance(node.ops[0].expr, nodes.Const):
            return node  # takes no longer than its constant is, and is most of what templates compare
        node.expr = _charging(node.expr)
        for operand in node.ops:
            operand.expr = _charging(operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_charging(part) for part in node.nodes]
        return node

    def _visit_container(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or not any(node.find_all(nodes.Name)):
            return node  # type: ignore[no-any-return]
        return _charging(node)

    visit_List = visit_Tuple = visit_Dict = _visit_container

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node, node.node, _ITERATE)
        else:  # what a dict hashes
            node.arg = _charging(node.arg)
        return node


def _text_in(node: nodes.Node) -> int:
    """Return the length of all text that a part of a template spells out."""
    texts = [*(found.data for found in node.find_all(nodes.TemplateData))]
    return sum(map(len, texts)) + sum(len(str(found.value)) for found in node.find_all(nodes.Const))


def _charging(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, node, _CHARGE)


def _filtered(at: nodes.Node, value: Any, name: str, *args: int) -> nodes.Filter:
    constants: list[Any] = [nodes.Const(arg).set_lineno(at.lineno) for arg in args]
    value.set_lineno(at.lineno)
    return nodes.Filter(value, name, constants, [], None, None).set_lineno(at.lineno)  # type: ignore[return-value]


def marked_spans(text: str, mark: str) -> tuple[str, dict[int, list[tuple[int, int]]]]:
    """Read the marks in a rendering: the text without them, and what loops have written for each message.

    Returns:
        For the number of each message, the spans [start, end) in the text, those without text left out.
    """
    parts = re.split(_mark_pattern(mark), text)
    spans = dict[int, list[tuple[int, int]]]()
    at = len(parts[0])
    begun: dict[str, tuple[int, int]] = {}
    for loop, number, following in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        before = begun.pop(loop, None)
        if before is not None and before[1] < at:
            spans.setdefault(before[0], []).append((before[1], at))
        if number:
            begun[loop] = int(number), at
        at += len(following)
    return "".join(parts[::3]), spans


def after_loops(text: str, mark: str) -> tuple[str, str]:
    """Cut a rendering with marks after its last loop: the text up to there, and the rest; both without marks."""
    marks = [*re.finditer(_mark_pattern(mark), text)]
    end = marks[-1].end() if marks else 0
    return re.sub(_mark_pattern(mark), "", text[:end]), text[end:]


def _mark_pattern(mark: str) -> str:
    return f"{mark}(\\d+):(\\d*);"
