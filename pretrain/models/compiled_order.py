"""A look at the code that torch's compiler has made, before it runs: no result of a collective may be used before it has arrived.

Inductor of torch 2.13 has put a fused kernel between a reduce-scatter and its wait. Gradients were then what lay in the memory.
"""

from __future__ import annotations

import re

_COLLECTIVE = re.compile(r"\s+(?:(\w+) = )?torch\.ops\._c10d_functional\.(\w+)\.default\((\w+)")
_ALIAS = re.compile(r"\s+(\w+) = (?:reinterpret_tensor\()?(\w+)(?:\[\d+\]|,.*\))?(?:; del \w+)?(?:\s*#.*)?$")
_NO_USE = re.compile(r"\s*(#|del |assert_)")


def check_waits(code: str) -> None:
    """Raise RuntimeError if code of Inductor uses what a collective makes before its `wait_tensor`. `code`: the Python code that calls the kernels."""
    pending: dict[str, str] = {}
    """Collectives by the name of the tensor that they make."""
    names: dict[str, str] = {}
    for line in code.splitlines():
        if re.match(r"\s*(def|class) ", line):
            pending, names = {}, {}
        if _NO_USE.match(line):
            continue
        if found := _COLLECTIVE.match(line):
            result, kind, sent = found.groups()
            if kind == "wait_tensor":
                pending.pop(names.get(sent, sent), None)
                continue
            _refuse_used(line[found.start(3) :], pending, names)
            # One that ends with _ changes the tensor that it is given.
            pending[names.get(sent, sent) if kind.endswith("_") else result] = kind
        elif found := _ALIAS.match(line):
            names[found[1]] = names.get(found[2], found[2])
        elif pending:
            _refuse_used(line, pending, names)


def _refuse_used(text: str, pending: dict[str, str], names: dict[str, str]) -> None:
    for word in re.findall(r"\w+", text):
        if (name := names.get(word, word)) in pending:
            raise RuntimeError(f"its code would use the result of {pending[name]} before that has arrived")
