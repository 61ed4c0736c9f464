"""Results as tables, figures and pages, the same for one run and for a comparison of several."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerage.display import shell
from peerage.errors import InputError
from peerage.records.rows import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class View:
    """Methods that show the runs in `records`; reports are imported on first use."""

    @property
    def records(self) -> Sequence[RunRecord]:
        raise NotImplementedError

    def table(self) -> list[dict[str, Any]]:
        """One row of numbers per run, as `peerage compare` and `peerage report` show them."""
        from peerage.report.tables import compare

        return compare(self.records)

    def frame(self, scope: str = "network") -> Any:
        """The rows of one scope (`network`, `node` or `group`) as a pandas DataFrame.

        Of several runs, the first columns are `run`, `algorithm` and `seed`.
        """
        try:
            import pandas as pd
        except ImportError:
            raise InputError("result.frame() needs pandas; pip install pandas") from None
        from peerage.report.tables import labels

        scopes = {"network": "network", "node": "nodes", "group": "groups"}
        if scope not in scopes:
            raise InputError(f"scope must be one of {', '.join(scopes)}; got {scope!r}")
        rows: list[dict[str, Any]] = []
        for name, record in zip(labels(self.records), self.records, strict=True):
            seed = record.experiment.get("seed", 0)
            about = {"run": name, "algorithm": record.algorithm, "seed": seed}
            named = about if len(self.records) > 1 else {}
            rows += [{**named, **row} for row in getattr(record, scopes[scope])]
        return pd.json_normalize(rows)

    def plot(self, kind: str = "accuracy", *, width: str | float | None = None) -> "Figure":
        """A matplotlib figure: a recorded metric over the rounds, or another kind.

        Kinds are `accuracy`, `loss` and all other metrics, and `difference`, `nodes`, `traffic`,
        `time`, `graph`, `data`, `clusters` and others; `peerage list plots` lists them. Runs that
        differ only in their seed are one curve. For a paper, `width` is `column`, `page` or inches.
        """
        from peerage.report.figures import render
        from peerage.report.plots import paper_plot, plot

        figure = (
            plot(self.records, kind) if width is None else paper_plot(self.records, kind, width)
        )
        if (notebook := shell()) is not None:
            # IPython shows figures only after an import of pyplot, which is not needed here.
            formatter = notebook.display_formatter.formatters["image/png"]
            if type(figure) not in formatter:
                formatter.for_type(type(figure), lambda figure: render(figure, "png"))
        return figure

    def report(self, path: str | Path) -> Path:
        """Write a report; the suffix selects the format, as for `peerage report --out`.

        They are .html, .pdf, .md, .csv, .tex, .parquet, .json, .png and .svg.
        """
        from peerage.report.export import export

        path = Path(path)
        export(self.records, path)
        return path

    def _repr_html_(self) -> str:
        from peerage.report.notebook import runs_html

        return runs_html(self.records)
