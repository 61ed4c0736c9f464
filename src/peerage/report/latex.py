"""Tables for papers: LaTeX with the rules of booktabs."""

import re
from collections.abc import Sequence

from peerage.records.rows import RunRecord
from peerage.report import seeds, tables
from peerage.report.series import by_method

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "…": r"\ldots{}", "°": r"$^\circ$", "\N{NARROW NO-BREAK SPACE}": r"\,",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


def latex(records: Sequence[RunRecord]) -> str:
    r"""The comparison as a `tabular`: methods with several seeds, or single runs, as rows.

    It needs \usepackage{booktabs}.
    """
    found = by_method(records)
    if any(method.seeds > 1 for method in found):
        methods = seeds.MethodTable.of(found)
        targets = [line[1:] for line in methods.targets()]
        lines = [[*line, *more] for line, more in zip(methods.lines(), targets, strict=True)]
    else:
        titles, texts = tables.cells(tables.compare(records))
        lines = [titles, *texts]
    return tabular(lines)


def tabular(lines: Sequence[Sequence[str]]) -> str:
    """A table whose first line is the header and whose first column is left-aligned."""
    texts = [[escape(text) for text in line] for line in lines]
    rows = [" & ".join(line) + r" \\" for line in texts]
    return "\n".join(
        [
            "% \\usepackage{booktabs}",
            rf"\begin{{tabular}}{{l{'r' * (len(lines[0]) - 1)}}}",
            r"\toprule",
            rows[0],
            r"\midrule",
            *rows[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def escape(text: str) -> str:
    r"""A text as LaTeX; numbers with a range have an en dash.

    >>> print(escape("a_b 60.0..80.0 %"))
    a\_b 60.0--80.0\,\%
    """
    text = re.sub(r"(?<=\d)\.\.(?=\d)", "--", text)
    text = "".join(SPECIAL.get(character, character) for character in text)
    return re.sub(r"(?<=\d) (?=\\%)", r"\\,", text)
