"""Reports: a plan as one HTML file to look at, as data, and in the formats of other tools."""

from partita.reports.report import Report, report

__all__ = ["Report", "report"]
