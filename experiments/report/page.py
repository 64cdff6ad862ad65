"""The report as one HTML page that needs no other file."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from espalier.experiments.report import tables
from espalier.experiments.report.contents import NOTES, Report
from espalier.experiments.report.measures import breakdowns

_TEMPLATE = "page.html"


def render_page(report: Report) -> str:
    """Render the page; texts of problems and models are escaped."""
    environment = Environment(
        loader=PackageLoader("espalier.experiments.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    places = {row.unique_id: place for place, row in enumerate(report.problems)}
    numbers = {id(m.run): number for number, m in enumerate(report.measures, start=1)}
    return environment.get_template(_TEMPLATE).render(
        report=report,
        notes=NOTES,
        main=tables.main_table(report.measures),
        breakdowns=[
            (found.title, tables.breakdown_table(report.measures, found))
            for found in breakdowns([m.run for m in report.measures])
        ],
        pairs=[
            (difference, numbers[id(difference.first)], numbers[id(difference.second)], cells)
            for difference in report.differences
            for cells in [tables.difference_cells(difference)]
        ],
        places=places,
    )
