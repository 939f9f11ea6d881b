"""Report recorded results by tables, figures and a page. Others use `suite.report.build.build_report`."""
