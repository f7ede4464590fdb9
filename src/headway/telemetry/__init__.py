"""Records of a run: metrics, the progress line, goodput, hardware, reports and their charts.

Doors: `record.open_run`, `metrics.read_metrics`, `report.write_report`. Readers of run directories use nothing else.
"""
