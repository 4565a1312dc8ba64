"""How the API pages read docstrings: doctests as code, maths as MathML, reducers as their users call them."""

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1(?! *$).*)*", re.MULTILINE)
MATHS = re.compile(r"^\.\. math::(.*(?:\n+ +\S.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Prepare what was found in the source, before anything is rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence doctests, which Markdown takes for quotations, and convert ``.. math::``, which it does not know."""
        if obj.docstring:
            text = MATHS.sub(lambda found: convert(found[1].strip(), display="block"), obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", text)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """`@reducer` turns ``async def f(x, comm, *, op)`` into a factory ``f(*, op)``: show that one."""
        if any(decorator.callable_path.rpartition(".")[2] == "reducer" for decorator in func.decorators):
            func.parameters = griffe.Parameters(*list(func.parameters)[2:])
            func.returns = "Pipeline"
            func.labels.discard("async")
